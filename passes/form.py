"""The form of a pass, and the data that passes hand on: the choice for one node, and those for a whole graph.

A pass is a frozen dataclass whose fields are its options, called with one graph at a time. It changes the graph, and
returns how often each of its rewrites fired (0 for one that found nothing). The properties that it ensures are verified
after it (`pipeline.py`). One pass decides instead, and returns its decisions.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch.fx import Graph, Node

from .contract.errors import PolicyError
from .contract.plan import Decision
from .contract.policy import Target
from .contract.reasons import BODY, Reason
from .graph.bodies import Border
from .graph.notes import CAST_OPERAND, provenance
from .graph.values import LOW_DTYPES, Inference, ValueDtype, recast, run
from .ops.rules import LOW
from .runtime.casts import CAST, cast_floating

Position = tuple[str, int]  # an operand: argument name, index in a list argument


class Cast(NamedTuple):
    """An operand is cast."""

    place: Position
    dtype: torch.dtype


class SetDtype(NamedTuple):
    """The dtype argument of a call, or the dtype of a relative user cast, becomes another one."""

    dtype: torch.dtype


class Replace(NamedTuple):
    """A Python number among the arguments becomes another one."""

    old: float | Node
    new: float


class Clamp(NamedTuple):
    """An operand is brought into the range of the dtype in which it is read."""

    place: Position


class UnderAutocast(NamedTuple):
    """The call runs under autocast, whatever is inside."""

    device: str
    low: torch.dtype


Edit = Cast | SetDtype | Replace | Clamp | UnderAutocast


@dataclass(frozen=True)
class Choice:
    """The dtype chosen for one node to run in."""

    dtype: torch.dtype  # what the node runs in
    reason: Reason  # why; its type says what has decided
    edits: tuple[Edit, ...] = ()  # what has to be changed in the graph so that it does

    @functools.cached_property
    def casts(self) -> dict[Position, torch.dtype]:
        """The operands that are cast, and to what."""
        return {e.place: e.dtype for e in self.edits if isinstance(e, Cast)}

    @property
    def lowers(self) -> bool:
        """Its operands are cast to low by the rule of its op, or, at the border of a body, by those of ops inside."""
        return self.reason.kind in (LOW, BODY)

    def has(self, kind: type[Edit]) -> bool:
        """Say whether there is an edit of a kind."""
        return any(isinstance(e, kind) for e in self.edits)

    def edited(self, *edits: Edit, but: type[Edit] | None = None) -> Choice:
        """Return the choice with more edits; those of one kind are left out."""
        kept = self.edits if but is None else tuple(e for e in self.edits if not isinstance(e, but))
        return replace(self, edits=(*kept, *edits))


Colours = Mapping[Node, Choice]


@dataclass(frozen=True)
class Assignment:
    """The choices for one graph; it never changes, and a pass that inserts nodes makes another one."""

    colours: Colours  # the choice for every node that touches a floating value
    dtypes: Mapping[Node, ValueDtype]  # the dtype every value will have
    original: Mapping[Node, ValueDtype]  # the dtype every value had as captured
    returned: Mapping[Node, ValueDtype]  # the dtype that each output of the graph must have
    infer: Inference  # gives a node's output dtypes from those of its operands
    # Where `torch.autocast` was seen to give other dtypes than the rules say it does.
    disagreements: tuple[str, ...] = ()
    # The simulations of the bodies of higher-order ops, which their own passes carry out.
    bodies: Mapping[Node, Any] = field(default_factory=dict)
    # The dtype that autocast runs each node of `colours` in.
    autocast: Mapping[Node, torch.dtype] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()  # the choices in the form of the plan
    # Nanoseconds that the cost model measured, by key of the call.
    timings: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Freeze the mappings."""
        for name in ("colours", "dtypes", "original", "returned", "bodies", "autocast"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

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
    """One graph on its way through the passes: that of the model, or the body of a higher-order op in it."""

    graph: Graph  # as captured at first; changed in place
    attribute: Callable[[str], Any]  # resolves the target of a get_attr
    target: Target  # the device and the low dtype that it is compiled for
    border: Border = field(default_factory=Border)  # the dtypes at its edges, and the graphs inside it
    index: int = 0  # its number in the plan
    simulated: Any = None  # for the body of a higher-order op, what its caller has decided for it
    assignment: Assignment | None = None  # what was decided; None before that
    # The dtypes of each node that the present pass has inserted: as captured, and as it will have them.
    inserted: dict[Node, tuple[ValueDtype, ValueDtype]] = field(default_factory=dict)

    @property
    def decided(self) -> Assignment:
        """The assignment, which exists once the pass that decides has run, without what the present pass inserts."""
        if self.assignment is None:
            raise PolicyError(
                "nothing is decided on this graph: the pass `decide` of a pipeline returns an Assignment."
            )
        return self.assignment

    def dtypes_of(self, value: Node) -> tuple[ValueDtype, ValueDtype]:
        """Return the dtype of a value as captured, and the one that it will have."""
        return self.inserted.get(value) or (self.decided.original.get(value), self.decided.dtypes.get(value))

    def insert(self, op: Callable[..., Any], args: tuple[Any, ...], *, before: Node, by: str) -> Node:
        """Insert a call before a node, with a value, its dtypes, and a note of the rewrite that made it.

        Args:
            op: what is called.
            args: its arguments, of which the first is a node.
            before: the node that it comes before, and that it says it comes from.
            by: the rewrite, as "pass/rewrite".
        """
        with self.graph.inserting_before(before):
            node = self.graph.call_function(op, args)
        node.meta = provenance(before, by)
        if op in (CAST, cast_floating):  # of which there are many: nothing has to be run
            node.meta |= {"val": args[0].meta["val"]} if "val" in args[0].meta else {}
        else:
            with torch.no_grad():
                node.meta["val"] = run(node, lambda n: n.meta.get("val"))
        if self.assignment is not None:
            self.inserted[node] = self._inferred(node)
        return node

    def cast(self, value: Node, dtype: torch.dtype, *, before: Node, by: str = CAST_OPERAND) -> Node:
        """Insert a cast of a value, or of the items of a container, before a node."""
        items = isinstance(self.dtypes_of(value)[1], tuple)
        return self.insert(cast_floating if items else CAST, (value, dtype), before=before, by=by)

    def _inferred(self, node: Node) -> tuple[ValueDtype, ValueDtype]:
        """Return the dtypes of a new node: as if it had been captured, and as it will have them."""
        infer, of = self.decided.infer, self.dtypes_of
        if node.target not in (CAST, cast_floating):
            return infer(node, lambda n: of(n)[0]), infer(node, lambda n: of(n)[1])
        value: Any = node.args[0]
        dtype: Any = node.args[1]
        captured, assigned = of(value)
        return captured, recast(assigned, dtype) if isinstance(assigned, tuple) else dtype

    def after(self, assignment: Assignment | None = None) -> Unit:
        """Return the graph after a pass: with what that has decided, or with the dtypes of what it has inserted."""
        if assignment is None and self.inserted:
            decided, inserted = self.decided, self.inserted
            original = {**decided.original, **{n: captured for n, (captured, _) in inserted.items()}}
            dtypes = {**decided.dtypes, **{n: assigned for n, (_, assigned) in inserted.items()}}
            assignment = replace(decided, original=original, dtypes=dtypes)
        return replace(self, assignment=assignment or self.assignment, inserted={})


class Pass(Protocol):
    """The interface of a pass."""

    name: ClassVar[str]  # its name in reports, in plans and in `fxamp report --print-after`
    ensures: ClassVar[Ensures]  # what has to be verified after it

    def __call__(self, unit: Unit) -> dict[str, int] | Assignment:
        """Run over one graph; return how often each rewrite fired, or what was decided."""
