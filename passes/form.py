"""The form of a pass, and the data that passes hand on: the decision on one node, and those on a whole graph.

A pass is a frozen dataclass whose fields are its options, called with one graph at a time. It changes the graph, and
returns how often each of its rewrites fired (0 for one that found nothing). The properties that it ensures are verified
after it (`watch.py`). One pass decides instead, and returns its decisions.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch.fx import Graph, Node

from .contract.errors import PolicyError
from .contract.plan import Decision
from .contract.reasons import Reason
from .graph.bodies import Border
from .graph.values import LOW_DTYPES, Dtypes, Inference

AS_AUTOCAST = "as_autocast"  # a kind: it runs under autocast, whatever is inside
Position = tuple[str, int]  # an operand: argument name, index in a list argument


@dataclass(frozen=True)
class Colouring:
    """The decision on one node.

    Attributes:
        dtype: what the node runs in.
        kind: the kind of the rule, or "override", "region", "cast", "body", "as_autocast".
        reason: why.
        operand_dtypes: the operands that must be cast, and to what.
        set_dtype: the new dtype argument of a relative user cast.
        literals: Python numbers to replace, (old, new).
        clamped: operands to bring into the low dtype's range first.
        causes: the nodes whose decisions this one follows from.
        settled: no placement of values may change the dtype that the node runs in.
        ranges: what buffers hold that the low dtype cannot, where that decided.
    """

    dtype: torch.dtype
    kind: str
    reason: Reason
    operand_dtypes: Mapping[Position, torch.dtype] = field(default_factory=dict)
    set_dtype: torch.dtype | None = None
    literals: tuple[tuple[float | Node, float], ...] = ()
    clamped: tuple[Position, ...] = ()
    causes: tuple[Node, ...] = ()
    settled: bool = False
    ranges: tuple[str, ...] = ()


Colours = dict[Node, Colouring]


@dataclass(frozen=True)
class Assignment:
    """The decisions on one graph.

    Attributes:
        colours: the decision of every node that touches a floating value.
        dtypes: the dtype every value will have; passes add those of the nodes that they insert.
        original: the dtype every value had as captured.
        returned: the dtype that each output of the graph must have.
        infer: gives a node's output dtypes from those of its operands.
        disagreements: where `torch.autocast` was seen to give other dtypes than the rules say it does.
        bodies: the simulations of the bodies of higher-order ops, which their own passes carry out.
        autocast: the dtype that autocast runs each node of `colours` in.
        decisions: the colours in the form of the plan.
        timings: nanoseconds that the cost model measured, by key of the call.
    """

    colours: Colours
    dtypes: Dtypes
    original: Dtypes
    returned: Dtypes
    infer: Inference
    disagreements: tuple[str, ...] = ()
    bodies: Mapping[Node, Any] = field(default_factory=dict)
    autocast: Mapping[Node, torch.dtype] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    timings: Mapping[str, int] = field(default_factory=dict)

    @property
    def widened(self) -> list[Node]:
        """The outputs that are low and must be FP32."""
        low = (n for n, dtype in self.returned.items() if dtype == torch.float32 and self.dtypes.get(n) in LOW_DTYPES)
        return [n for n in low if n.op.startswith("call")]


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
        """The assignment, which exists once the decision of the pipeline has run."""
        if self.assignment is None:
            raise PolicyError(
                "nothing is decided on this graph: the pass `decide` of a pipeline returns an Assignment."
            )
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
