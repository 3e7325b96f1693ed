"""Which part of a plan a captured graph carries out, when a plan is replayed.

A plan lists the decisions of each state, and of each graph where Dynamo breaks one. A state that the plan has not is
decided by its policy, and what the plan says of the same nodes is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from passes.contract.plan import Plan
from passes.graph.values import keys

from ..capture.graph import Graph
from ..capture.state import State, state_of

OR = " or "  # between the states that have the same decisions, in the name of a part of a plan


class Replaying:
    """Finds the part of a plan for one graph of a model, beside the graphs that were captured before.

    One that is not the `whole` of a call, or is a part of a larger graph, has some of the nodes of its part.
    """

    def __init__(self, plan: Plan, graphs: Sequence[Graph], model: nn.Module, method: str, whole: bool) -> None:
        self._plan, self._state, self._part = plan, state_of(model, method), plan
        known = place_of(plan, self._state) is not None if plan.states else not graphs
        self._exact = known and whole and all(graph.state != self._state for graph in graphs)

    def __call__(self, graph: Any) -> tuple[Plan | None, bool]:
        """Return the part of the plan for an FX graph, and whether it is of this very graph."""
        whole = self._plan.part(place_of(self._plan, self._state) or 0) if self._plan.states else self._plan
        names = set(keys(graph.nodes).values())
        overlap = [len(names & {d.key for d in whole.of_graph(g).decisions}) for g in range(whole.graphs)]
        first = overlap.index(max(overlap)) if overlap else 0
        self._part = whole.from_graph(first)
        return self._part, self._exact

    def notes(self, made: Plan) -> tuple[str, ...]:
        """Return what is to be said of decisions that are not the plan's."""
        planned = {(d.graph, d.key): d.colour for d in self._part.decisions}
        other = [d.key for d in made.decisions if planned.get((d.graph, d.key)) != d.colour]
        if not other:
            return ()
        return (f"{len(other)} nodes in {self._state} are not in the plan that is replayed, and are decided by its "
                f"policy: {', '.join(other[:3])}",)  # fmt: skip


def place_of(plan: Plan, state: State) -> int | None:
    """Return the place of a state among those of a plan, None where the plan has not got it."""
    named = [name.partition(": ")[2].split(OR) for name in plan.states]
    return next((at for at, names in enumerate(named) if str(state) in names), None)
