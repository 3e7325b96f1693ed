"""Replay a plan: carry it out on a graph that it fits, or say where it does not."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import torch

from ..contract.errors import PlanError
from ..contract.plan import Decision, Plan
from ..contract.plan_format import REMEDY


def replay(decisions: Sequence[Decision], plan: Plan, own: Container[str] | None = None) -> tuple[Decision, ...]:
    """Check that a plan fits a graph, node by node, and that its colours are those decided here.

    Colours follow from one another, so a plan is replayed as a whole. If its policy gives another colour here, because
    torch or a rule has changed, an error says so and nothing is converted. The decisions come back with the reasons of
    the plan, since the measurements behind those are not repeated.

    Args:
        decisions: what the plan's policy decides here.
        plan: plan of this graph.
        own: the keys that the graph must have, None for all. The others may be missing here.

    Raises:
        PlanError: a decision has no node, a node has no decision, or a colour differs; names the first.
    """
    ours = {d.key: d for d in decisions}
    theirs = _fitting(ours, {d.key: d for d in plan.decisions}, own)
    for key, decision in theirs.items():
        if not isinstance(getattr(torch, decision.colour, None), torch.dtype):
            raise PlanError(f"the plan gives {key} the colour {decision.colour!r}, which is not a dtype; {REMEDY}")
        if ours[key].colour != decision.colour:
            raise PlanError(
                f"the plan runs {key} ({ours[key].source}) in {decision.colour}; its policy gives {ours[key].colour} "
                f"with torch {torch.__version__} (the plan was made with {plan.torch_version}). {REMEDY}"
            )
    return tuple(replace(d, reason=theirs[d.key].reason, code=theirs[d.key].code) for d in decisions)


def _fitting(
    ours: Mapping[str, Decision], theirs: Mapping[str, Decision], own: Container[str] | None
) -> dict[str, Decision]:
    """Return a plan's decisions on this graph; raise PlanError if graph or plan lacks one that the other has."""
    missing = [k for k in theirs if k not in ours and (own is None or k in own)]
    extra = [k for k in ours if k not in theirs]
    if missing or extra:
        key = (missing or extra)[0]
        where = f" ({ours[key].source})" if key in ours else ""
        kind = "decides on a node that the model does not have" if missing else "does not know a node of the model"
        raise PlanError(
            f"the plan does not fit this model: it {kind}: {key}{where}; {len(missing)} missing, {len(extra)} new. "
            f"{REMEDY}"
        )
    return {k: d for k, d in theirs.items() if k in ours}
