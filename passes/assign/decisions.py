"""Write the decisions on a graph as its part of the plan, before any cast is inserted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Graph, Node

from ..colouring import Assignment
from ..contract.plan import Decision
from ..form import Ensures, Unit
from ..graph.values import keys, module_path, source
from ..ops import ops


@dataclass(frozen=True)
class WriteDecisions:
    """Write the decisions on a graph in the form of a plan."""

    name: ClassVar = "write-decisions"
    ensures: ClassVar = Ensures.NOTHING_NEW

    def __call__(self, unit: Unit) -> dict[str, int]:
        """Write the decisions into the plan; no edit is made."""
        unit.decisions = tuple(_decisions(unit.graph, unit.decided, unit.index))
        return {}


def _decisions(graph: Graph, assignment: Assignment, index: int) -> list[Decision]:
    names = keys(graph.nodes)
    return [_decision(node, names, assignment, index) for node in graph.nodes if node in assignment.colours]


def _decision(node: Node, names: dict[Node, str], assignment: Assignment, index: int) -> Decision:
    colouring = assignment.colours[node]
    autocast = assignment.autocast.get(node, colouring.dtype)
    return Decision(
        key=names[node],
        graph=index,
        op=ops.name(node),
        module_path=module_path(node),
        source=source(node),
        colour=_name(colouring.dtype),
        autocast_dtype=_name(autocast),
        kind=colouring.kind,
        reason=str(colouring.reason),
        code=colouring.reason.code.value,
        causes=tuple(names[c] for c in colouring.causes if c in names),
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
