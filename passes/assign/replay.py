"""Replay a plan: carry it out on a graph that it fits, or say where it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..contract.errors import PlanError
from ..contract.plan import Decision, Plan
from ..contract.plan_format import REMEDY


def replay(decisions: Sequence[Decision], plan: Plan, exact: bool = True) -> tuple[Decision, ...]:
    """Check that a plan fits a graph, node by node, and that its colours are those decided here.

    Colours follow from one another, so a plan is replayed as a whole. If its policy gives another colour here, because
    torch or a rule has changed, an error says so and nothing is converted. The decisions come back with the reasons of
    the plan, since the measurements behind those are not repeated.

    Args:
        decisions: what the plan's policy decides here.
        plan: plan of this graph.
        exact: the plan is of this very graph. If not, it is of the same model in another state, or of a part of it:
            the plan gives the reason where it decides as the policy does here.

    Raises:
        PlanError: a decision has no node, a node has no decision, or a colour differs; names the first.
    """
    ours = {d.key: d for d in decisions}
    theirs = {d.key: d for d in plan.decisions}
    if not exact:
        alike = {d.key for d in decisions if d.key in theirs and theirs[d.key].colour == d.colour}
        return tuple(_explained(d, theirs[d.key]) if d.key in alike else d for d in decisions)
    _refuse_unfit(ours, theirs)
    for key, decision in theirs.items():
        if not isinstance(getattr(torch, decision.colour, None), torch.dtype):
            raise PlanError(f"the plan gives {key} the colour {decision.colour!r}, which is not a dtype; {REMEDY}")
        if ours[key].colour != decision.colour:
            raise PlanError(
                f"the plan runs {key} ({ours[key].source}) in {decision.colour}; its policy gives {ours[key].colour} "
                f"with torch {torch.__version__} (the plan was made with {plan.torch_version}). {REMEDY}"
            )
    return tuple(_explained(d, theirs[d.key]) for d in decisions)


def _explained(decision: Decision, planned: Decision) -> Decision:
    return replace(decision, reason=planned.reason, code=planned.code)


def _refuse_unfit(ours: Mapping[str, Decision], theirs: Mapping[str, Decision]) -> None:
    """Raise PlanError if graph or plan lacks a decision that the other has."""
    missing = [k for k in theirs if k not in ours]
    extra = [k for k in ours if k not in theirs]
    if missing or extra:
        key = (missing or extra)[0]
        where = f" ({ours[key].source})" if key in ours else ""
        kind = "decides on a node that the model does not have" if missing else "does not know a node of the model"
        raise PlanError(
            f"the plan does not fit this model: it {kind}: {key}{where}; {len(missing)} missing, {len(extra)} new. "
            f"{REMEDY}"
        )
