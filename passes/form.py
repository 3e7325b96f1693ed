"""The form of a pass: a frozen dataclass whose fields are its options, called with one graph at a time.

It changes the graph, and returns how often each of its rewrites fired (0 for one that found nothing). The properties
that it ensures are verified after it (`watch.py`). One pass decides instead, and returns its decisions.

    @dataclass(frozen=True)
    class DropCasts:
        name: ClassVar = "drop-casts"
        ensures: ClassVar = Ensures.DTYPES

        def __call__(self, unit: Unit) -> dict[str, int]:
            return {"no_op": _no_op(unit.graph, unit.decided)}
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch.fx import Graph

from .colouring import Assignment
from .graph.bodies import Border


class Ensures(enum.Enum):
    """The properties of a graph that have to be verified after a pass, since the pass may have broken them."""

    NOTHING_NEW = "the pass neither inserts nor changes a node"
    STRUCTURE = "the graph is well formed"
    DTYPES = "the graph is well formed, and every value has the dtype that it was assigned"


@dataclass(frozen=True)
class Unit:
    """One graph on its way through the passes: that of the model, or the body of a higher-order op in it.

    Attributes:
        graph: as captured at first; changed in place.
        attribute: resolves the target of a get_attr.
        border: the dtypes at its edges, and the graphs inside it.
        index: its number in the plan.
        simulated: for the body of a higher-order op, what its caller has decided for it.
        assignment: what was decided; None before that.
    """

    graph: Graph
    attribute: Callable[[str], Any]
    border: Border = field(default_factory=Border)
    index: int = 0
    simulated: Any = None
    assignment: Assignment | None = None

    @property
    def decided(self) -> Assignment:
        """The assignment, which exists once AssignPrecision has run."""
        assert self.assignment is not None, "dtypes are not assigned yet: AssignPrecision runs later"
        return self.assignment


class Pass(Protocol):
    """The interface of a pass.

    Attributes:
        name: its name in reports, in plans and in `fxamp report --print-after`.
        ensures: what has to be verified after it.
    """

    name: ClassVar[str]
    ensures: ClassVar[Ensures]

    def __call__(self, unit: Unit) -> dict[str, int] | Assignment:
        """Run over one graph; return how often each rewrite fired, or what was decided."""
