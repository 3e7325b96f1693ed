"""One forward run over a graph: the dtype of every node, the casts of its operands, and the dtypes of its results.

What decides, and in which order, is the strategy's: autocast's or a policy's (`decide.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..._torch import pytree
from ...contract.policy import Policy, Target
from ...contract.reasons import BODY, Code, Reason
from ...form import Cast, Choice
from ...graph.aliases import Aliases, is_opaque
from ...graph.bodies import Body, Border
from ...graph.grad import is_leaf, shares_cast, what_it_reads
from ...graph.notes import note_of
from ...graph.values import (
    ELIGIBLE,
    LOW_DTYPES,
    Dtypes,
    Inference,
    ValueDtype,
    first_float,
    is_floating,
    keys,
    module_types,
    original_dtypes,
)
from ...ops import ops
from ...ops.rules import LOW, Rule, row_of
from .extremes import Extremes

if TYPE_CHECKING:
    from .decide import AutocastRules


@dataclass(frozen=True)
class Site:
    """A call to decide on, and the row of its op."""

    node: Node
    row: Rule
    kind: str  # the kind by which it is coloured: at first that of the row on the device
    floats: tuple[ops.Operand, ...]  # its floating operands, and those of unknown dtype
    low: Any  # the low dtype here; an autocast region in the model's code may choose another one

    def of_kind(self, kind: str) -> Site:
        """Return the same call with another kind."""
        return replace(self, kind=kind)

    def says(self, why: Reason, *, final: bool = False) -> Reason:
        """Return a reason with the kind of the call, unless it is another decider's."""
        return replace(why, kind=why.kind or self.kind, final=final or why.final)


@dataclass(eq=False)
class Simulation:
    """A run over one graph, node by node: its inputs, and what earlier nodes established, which deciders read."""

    rules: AutocastRules  # the strategy that decides: autocast's, or the policy's
    policy: Policy  # what the user asks for; the default one for autocast
    target: Target
    graph: Graph
    original: Dtypes
    infer: Inference
    aliases: Aliases
    border: Border = field(default_factory=Border)  # the dtypes at the edges of the graph
    reference: Simulation | None = None  # the run that did what autocast does, if there was one
    # Representatives of alias sets that must stay FP32; they are kept from one run to the next.
    pinned: set[Node] = field(default_factory=set)
    islands: frozenset[Node] = frozenset()  # norms written by hand
    retained: Mapping[Node, Reason] = field(default_factory=dict)  # calls that keep the FP32 of autocast, and why
    # Whether calls of this graph lack a low kernel; not shared, so that no plan depends on another.
    lacking: dict[Any, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device, self.low = self.target
        self.named = keys(self.graph.nodes) if self.policy.ops else {}
        self.stacks = module_types(self.graph) if self.policy.modules else {}
        self.elsewhere = elsewhere(self.graph, self.device)

    def run(self) -> None:
        """Colour all nodes, in order; of an earlier run only the pinned alias sets are left."""
        self.colours: dict[Node, Choice] = {}  # the decisions so far
        self.dtypes: Dtypes = {**self.original, **self.border.inputs}  # of what the run has reached, else the original
        self.upcast: set[Node] = set()  # values that the user has upcast, and results of ops that only move them
        self.bodies: dict[Node, Simulation] = {}  # the runs through the bodies of higher-order ops
        self.extremes = Extremes(self.low)  # values that the low dtype cannot hold
        for node in self.graph.nodes:
            floats: list[ops.Operand] = []
            if node.op.startswith("call"):
                if ops.carries_number(node):
                    continue
                row = row_of(node)
                floats = [o for o in ops.operands(node) if is_floating(self.dtypes[o.node])]
                if row.asks == "item":
                    self.dtypes[node] = self.infer(node, self.dtypes.__getitem__)
                elif any(b.first is not None for b in self.border.bodies.get(node, ())):
                    self._enter(node, self.border.bodies[node][0])
                elif not row.asks and (floats or is_floating(self.original[node])):
                    self.rules.visit(self, node, floats)
            self.rules.learn(self, node, floats)

    def under_autocast(self, node: Node) -> ValueDtype:
        """Return the dtypes that autocast gives a value; None if that is not known."""
        return None if self.reference is None else self.reference.dtypes.get(node)

    def returned(self) -> Dtypes:
        """Return the dtype that each output of the graph must have."""
        values = self.graph.output_node().all_input_nodes
        if self.border.autocast_outputs:
            return {n: self._output_under_autocast(n) for n in values}
        dtypes = self.original if self.border.restore_outputs else self.dtypes
        return {n: dtypes[n] for n in values}

    def _output_under_autocast(self, value: Node) -> ValueDtype:
        """Return the dtype of an output that is read under autocast: its own or autocast's, if asked for or wider."""
        if note_of(value).leaves:
            return note_of(value).leaves_as or self.original[value]
        ours, autocast = note_of(value).low_of_its_own or self.dtypes[value], self.under_autocast(value)
        if isinstance(ours, torch.dtype) and isinstance(autocast, torch.dtype) and {ours, autocast} <= {*ELIGIBLE}:
            low = {ours, autocast} <= {*LOW_DTYPES}  # of the two neither is wider
            return autocast if low or self.policy.output_dtype == "autocast" else torch.promote_types(ours, autocast)
        return ours

    def _enter(self, node: Node, body: Body) -> None:
        """Run through the body of a higher-order op with the dtypes that its operands have here."""
        pinned, operands = not is_opaque(node) and self.aliases.find(node) in self.pinned, body.operands(node)
        border = Border({p: self.dtypes[v] for p, v in operands.items()}, pinned, bodies=body.bodies())
        inside, edits = self._inside(node, body, border), tuple[Cast, ...]()
        several = (p for p in operands if self._is_cast_for_several(node, operands[p]))
        if lent := {*filter(inside.only_lowers, several)}:
            inside = self._inside(
                node, body, replace(border, inputs={**border.inputs, **dict.fromkeys(lent, self.low)})
            )
            values = {operands[p] for p in lent}
            edits = tuple(Cast(o.place, self.low) for o in ops.operands(node) if o.node in values)
        self.bodies[node] = inside
        self.dtypes[node] = self.original[node] if pinned else body.dtypes(inside.dtypes)
        why = Reason(Code.BODY, "its body is rewritten, for the dtypes of its operands", BODY)
        why = why.because(Code.MUTATED(Code.MUTATED.meaning)) if pinned else why
        self.colours[node] = Choice(first_float(self.dtypes[node]) or torch.float32, why, edits)

    def _inside(self, node: Node, body: Body, border: Border) -> Simulation:
        """Run through a body with these dtypes at its border."""
        reference = None if self.reference is None else self.reference.bodies.get(node)
        graph, original = body.graph, original_dtypes(body.graph, body.attribute)
        common = self.target, graph, original, self.infer, Aliases(graph), border
        inside = Simulation(self.rules, self.policy, *common, reference)
        self.rules.settle(inside)
        return inside

    def only_lowers(self, value: Node) -> bool:
        """Say whether every read of a value is a cast to low by the rule of its reader."""
        reads = [(u, o.place) for u in value.users for o in ops.operands(u) if o.node is value]
        return {*value.users} == {u for u, _ in reads} and all(
            u in self.colours and self.colours[u].lowers and self.colours[u].casts.get(place) == self.low
            for u, place in reads
        )

    def _is_cast_for_several(self, node: Node, value: Node) -> bool:
        """Say whether casts of an operand of a body are shared with another product, or with another body."""
        if self.reference is None or self.dtypes.get(value) != torch.float32 or not is_leaf(value):
            return False
        others = (u for u in self._readers[what_it_reads(value)] if u is not node)
        lower = any(u in self.border.bodies or row_of(u).kind(self.device) == LOW for u in others)
        return lower and shares_cast(self.policy.sharing, value, node, True, frozenset([value]))

    @functools.cached_property
    def _readers(self) -> Mapping[object, Sequence[Node]]:
        """Who reads each value; a front end may read an attribute at several nodes."""
        readers: dict[object, list[Node]] = {}
        for node in self.graph.nodes:
            readers.setdefault(what_it_reads(node), []).extend(node.users)
        return readers


def elsewhere(graph: Graph, device: str) -> set[Node]:
    """Return the values on another kind of device than the policy's, of which autocast casts none.

    A graph that is planned ahead has all values on the device of this machine. There it is those on the CPU that its
    model will leave there: what a call makes without saying on which device, and what is computed of nothing else.
    """
    devices = {n: v.device.type for n in graph.nodes if isinstance(v := n.meta.get("val"), Tensor)}
    if any(each == device and not n.op.startswith("call") for n, each in devices.items()):
        return {n for n, each in devices.items() if each != device}
    if device == "cpu":
        return set()
    leaves = {n: pytree.tree_leaves(n.meta["val"]) for n in graph.nodes if "val" in n.meta}
    apart = {n for n, values in leaves.items() if not any(isinstance(v, Tensor) for v in values)}  # numbers
    for node in (n for n in graph.nodes if n.op.startswith("call")):
        moved = any(isinstance(value, torch.device) for value in (*node.args, *node.kwargs.values()))
        if "cpu" in (node.target, *node.args) or not (moved or set(node.all_input_nodes) - apart):
            apart.add(node)
    return apart & devices.keys()
