"""Replay a plan: carry it out on a graph that it fits, or say where it does not."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from ..colouring import Assignment
from ..contract.errors import PlanError
from ..contract.plan import Decision, Plan
from ..contract.plan_format import REMEDY
from ..form import Ensures, Unit
from ..graph.values import keys, source


@dataclass(frozen=True)
class Replay:
    """Check that a plan fits every graph that it decides on.

    Attributes:
        plan: the plan to carry out.
        own: the decisions, by graph and key, that the graphs must have; None for all.
    """

    name: ClassVar = "replay"
    ensures: ClassVar = Ensures.NOTHING_NEW
    plan: Plan
    own: frozenset[tuple[int, str]] | None = None

    def __call__(self, unit: Unit) -> dict[str, int]:
        """Check one graph."""
        own = None if self.own is None else frozenset(key for at, key in self.own if at == unit.index)
        replay(unit.graph, unit.decided, self.plan.of_graph(unit.index), own)
        return {}


def replay(graph: Graph, assignment: Assignment, plan: Plan, own: Container[str] | None = None) -> None:
    """Check that a plan fits a graph, node by node, and that its colours are those decided here.

    Colours follow from one another, so a plan is replayed as a whole. If its policy gives another colour here, because
    torch or a rule has changed, an error says so and nothing is converted.

    Args:
        graph: not changed.
        assignment: what the plan's policy decides here.
        plan: plan of this graph.
        own: the keys that the graph must have, None for all. The others may be missing here.

    Raises:
        PlanError: a decision has no node, a node has no decision, or a colour differs; names the first.
    """
    names = keys(graph.nodes)
    ours = {names[n]: n for n in graph.nodes if n in assignment.colours}
    theirs = _fitting(ours, {d.key: d for d in plan.decisions}, own)
    for key, decision in theirs.items():
        node = ours[key]
        colour = getattr(torch, decision.colour, None)
        if not isinstance(colour, torch.dtype):
            raise PlanError(f"the plan gives {key} the colour {decision.colour!r}, which is not a dtype; {REMEDY}")
        if assignment.colours[node].dtype != colour:
            raise PlanError(
                f"the plan runs {key} ({source(node)}) in {decision.colour}; its policy gives "
                f"{str(assignment.colours[node].dtype).removeprefix('torch.')} with torch {torch.__version__} "
                f"(the plan was made with {plan.torch_version}). {REMEDY}"
            )


def _fitting(
    ours: Mapping[str, Node], theirs: Mapping[str, Decision], own: Container[str] | None
) -> dict[str, Decision]:
    """Return a plan's decisions on this graph; raise PlanError if graph or plan lacks one that the other has."""
    missing = [k for k in theirs if k not in ours and (own is None or k in own)]
    extra = [k for k in ours if k not in theirs]
    if missing or extra:
        key = (missing or extra)[0]
        where = f" ({source(ours[key])})" if key in ours else ""
        kind = "decides on a node that the model does not have" if missing else "does not know a node of the model"
        raise PlanError(
            f"the plan does not fit this model: it {kind}: {key}{where}; {len(missing)} missing, {len(extra)} new. "
            f"{REMEDY}"
        )
    return {k: d for k, d in theirs.items() if k in ours}
