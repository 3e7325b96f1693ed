"""Which values of a graph share storage, and what is written to.

Values that may share storage count as sharing it. Only known writes count as writes: ask `may_write` too.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from typing import Any

from torch.fx import Graph, Node

from .._torch import OpOverload, OpOverloadPacket, own_schema, qualified_name
from ..ops import ops
from ..ops.rules import row_of
from .notes import is_inserted, note_of


def is_opaque(node: Node) -> bool:
    """Say whether nothing is known about what a call does: a module, a higher-order op, a function outside torch."""
    name = ops.name(node)
    outside = row_of(node).higher_order if "::" in name else "." in name or node.op == "call_module"
    return outside and not (is_inserted(node) or note_of(node).pure)


def may_alias(node: Node) -> bool:
    """Say whether a node's output may share storage with an operand."""
    shares = {"": False, "sole": len(ops.inputs(node)) == 1}.get(row_of(node).may_alias, True)
    return shares or is_in_place(node) or "out" in node.kwargs or is_opaque(node) or makes_view(node)


def makes_view(node: Node) -> bool:
    """Say whether an op makes a view for all operands."""
    schema = ops.schema_of(node)
    return row_of(node).asks == "item" or (schema is not None and any(r.alias_info is not None for r in schema.returns))


def out_operands(node: Node) -> list[Node]:
    """Return the operands that receive the results of a call: `out=`, or the arguments that its schema marks so."""
    overload = isinstance(node.target, OpOverload)
    names = {"out", *(a.name for s in _schemas(node.target) if overload for a in s.arguments if a.is_out)}
    return [o.node for o in ops.operands(node) if o.name in names]


def may_write(node: Node) -> list[Node]:
    """Return the operands that a call writes to, or may write to: all that a function or module outside torch gets."""
    if is_opaque(node) and not (row_of(node).higher_order or ops.name(node).startswith("torch.")):
        return node.all_input_nodes
    return mutated_operands(node)


def mutated_operands(node: Node) -> list[Node]:
    """Return the operands that a node is known to write to."""
    if not node.op.startswith("call"):
        return []
    written = {*_written_by(node.target)}
    if "out" in node.kwargs:
        written.add("out")
    if not isinstance(node.target, OpOverload) and is_in_place(node):
        written |= {o.name for o in list(ops.operands(node))[:1]}
    if row_of(node).writes:
        argument, default, unless, *also = row_of(node).writes
        if ops.argument(node, argument, default) is not unless:
            written.update(also)
    return [o.node for o in ops.operands(node) if o.name in written] if written else []


@functools.lru_cache(maxsize=4096)
def _written_by(target: Any) -> tuple[str, ...]:
    """Return the names of the arguments that an operator writes to by its schema; a packet's operands have none."""
    arguments = [(i, a) for schema in _schemas(target) for i, a in enumerate(schema.arguments)]
    written = [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return tuple(name for i, argument in written for name in (argument, f"arg{i}"))


def _schemas(target: Any) -> list[Any]:
    """Return the schemas that a call of an operator may use: that of an overload, or all of a custom packet."""
    if isinstance(target, OpOverload):
        return [own_schema(target)]
    if isinstance(target, OpOverloadPacket) and not qualified_name(target).startswith("aten::"):
        return [own_schema(getattr(target, overload)) for overload in target.overloads()]
    return []


def is_in_place(node: Node) -> bool:
    """Say whether a call writes to its first argument, which most in-place ops return."""
    name = ops.name(node)
    return row_of(node).in_place or (name.endswith("_") and not name.endswith("__"))


class Aliases:
    """Sets of values that may share storage (union-find, four times as fast as networkx's), and when each is written.

    A view made after the last write to its storage is left out: no later write can show that it is a view.
    """

    def __init__(self, graph: Graph) -> None:
        self._order = {n: i for i, n in enumerate(graph.nodes)}
        calls = [(i, node) for node, i in self._order.items() if node.op.startswith("call")]
        written = [(i, n) for i, node in calls for n in mutated_operands(node)]
        unknown = [(i, n) for i, node in calls if is_opaque(node) for n in node.all_input_nodes]
        writes = sorted(written + unknown, key=lambda w: w[0])
        last: dict[Node, int] = {}  # by representative
        if writes:
            self._unite(graph, None)
            last = {self.find(node): when for when, node in writes}
        self._unite(graph, {n: last[root] for n in graph.nodes if (root := self.find(n)) in last} if last else {})
        self.mutated = {self.find(n) for _, n in written}  # the representative of each set that is written
        self._writes: dict[Node, list[int]] = {}
        for when, node in writes:
            self._writes.setdefault(self.find(node), []).append(when)

    def _unite(self, graph: Graph, last: dict[Node, int] | None) -> None:
        """Unite each view with its base: all of them, or those made before the last write to their storage (`last`)."""
        self._parent: dict[Node, Node] = {n: n for n in graph.nodes}
        attributes: dict[Any, Node] = {}
        for node, when in self._order.items():
            if node.op == "get_attr":
                self._union(attributes.setdefault(node.target, node), node)
            if node.op.startswith("call") and (last is None or last.get(node, -1) >= when) and may_alias(node):
                for value in shared_operands(node):
                    self._union(value, node)

    def find(self, node: Node) -> Node:
        """Return the representative of a value's alias set."""
        while self._parent[node] is not node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def epoch(self, node: Node, at: Node) -> int:
        """Return how many calls before the node `at` write, or may write, to the storage of the value."""
        return bisect_left(self._writes.get(self.find(node), []), self._order[at])

    def is_mutated(self, node: Node) -> bool:
        """Say whether anything in the value's alias set is ever written."""
        return self.find(node) in self.mutated

    def sets(self) -> dict[Node, list[Node]]:
        """Return the mutated alias sets, by representative."""
        out: dict[Node, list[Node]] = {root: [] for root in self.mutated}
        for node in self._parent:
            root = self.find(node)
            if root in out:
                out[root].append(node)
        return out

    def _union(self, a: Node, b: Node) -> None:
        self._parent[self.find(b)] = self.find(a)


def shared_operands(node: Node) -> list[Node]:
    """Return the operands whose storage an aliasing op may share: the first, unless the schema names others."""
    operands = list(ops.operands(node))
    if is_opaque(node):
        return node.all_input_nodes
    if row_of(node).may_alias == "all":
        return ops.inputs(node)
    if "out" in node.kwargs:
        return [o.node for o in operands if o.name == "out"]
    schema = ops.schema_of(node)
    if schema is not None and any(r.alias_info is not None for r in schema.returns):
        marked = {a.name for a in schema.arguments if a.alias_info is not None}
        if shared := [o.node for o in operands if o.name in marked]:
            return shared
    return [o.node for o in operands if o.name == operands[0].name]
