"""The outputs of a graph: which of them others are computed from, and which are views of one storage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ops import ops
from ..ops.rules import row_of
from .aliases import Aliases, is_in_place, is_opaque, may_alias, may_write, mutated_operands, shared_operands
from .grad import grad_modes, requires_grad
from .values import dtypes_of, is_floating


class Outputs:
    """Some outputs of a graph, as it is when this is made."""

    def __init__(self, graph: Graph, values: Iterable[Node]) -> None:
        self._nodes: list[Node] = list(graph.nodes)
        self._order, self._modes = {n: i for i, n in enumerate(self._nodes)}, grad_modes(graph)
        self.aliases, self._live, chosen = Aliases(graph), _live(graph), set(values)
        self._names: dict[Node, list[Node]] = defaultdict(list)
        for node in self._nodes:
            self._names[tensor_of(node)].append(node)
        # The outputs that share a storage as views, in the order of the graph, by what all of them view.
        self.families: dict[Node, list[Node]] = defaultdict(list)
        # For each output, who reads it after its last write and passes gradients of another output on to it; no view.
        self.readers: dict[Node, list[Node]] = {}
        self._between: set[Node] = set()  # the views between an output and another one that it is a view of
        for value in (n for n in self._nodes if n in chosen):
            views = views_of(value)
            self.families[views[-1]].append(value)
            bases = [i for i, n in enumerate(views) if i and not chosen.isdisjoint(self.names(n))]
            self._between.update(views[: max(bases, default=0)])
        for value in (n for n in self._nodes if n in chosen):
            users = dict.fromkeys(u for n in self.names(value) for u in n.users)
            after = (u for u in users if self._order[u] > self._last_write(value))
            self.readers[value] = [u for u in after if self._is_read_by(u, chosen)]

    def names(self, value: Node) -> list[Node]:
        """Return the nodes whose result is the same tensor: an in-place op returns what it writes to."""
        return self._names[tensor_of(value)]

    def after_last_write(self, value: Node) -> Node:
        """Return the node before which an output has its last value, behind a region of no_grad that wrote it."""
        index = self._last_write(value) + 1
        while self._modes[self._nodes[index - 1]][0] is False and self._nodes[index].op != "output":
            index += 1
        return self._nodes[index]

    def _is_read_by(self, user: Node, chosen: set[Node]) -> bool:
        """Say whether gradients of an output reach what is read through a user, other than by way of a view of it."""
        if user not in self._between:
            return user in self._live
        return user not in chosen and any(self._is_read_by(u, chosen) for u in user.users)

    def _last_write(self, value: Node) -> int:
        last, find = max(self._order[n] for n in self.names(value)), self.aliases.find
        if self.aliases.is_mutated(value) or any(map(is_opaque, value.users)):
            writes = (i for n, i in self._order.items() for w in may_write(n) if find(w) is find(value))
            last = max((last, *writes))
        return last


def read_outputs(graph: Graph) -> tuple[int, ...]:
    """Return the places of the floating outputs of a graph that others are computed from, with gradients."""
    returned: Any = graph.output_node().args[0]
    made = [n for n in returned if isinstance(n, Node) and n.op.startswith("call")]
    readers = Outputs(graph, (n for n in made if is_floating(dtypes_of(n.meta.get("val"))))).readers
    return tuple(i for i, n in enumerate(returned) if readers.get(n))


def tensor_of(node: Node) -> Node:
    """Return the node that made a tensor: that of `h`, for `relu_(h)`."""
    while node.op.startswith("call") and is_in_place(node) and row_of(node).out:
        first = next((o.node for o in ops.operands(node)), None)
        if first is None:
            break
        node = first
    return node


def viewed(node: Node) -> Node | None:
    """Return what a node is a view of, or an item of such a view; None for any other node."""
    if not node.op.startswith("call") or is_opaque(node) or row_of(node).is_cast or mutated_operands(node):
        return None
    container = node.args[0] if row_of(node).asks == "item" else None
    if isinstance(container, Node) and isinstance(container.meta.get("val"), (tuple, list)):
        return container if viewed(container) is not None else None
    if not may_alias(node) or "out" in node.kwargs:
        return None
    tensors = {n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)}
    shared = {*shared_operands(node)}
    return shared.pop() if len(shared) == 1 and tensors == shared else None


def views_of(node: Node) -> list[Node]:
    """Return the tensors that a value is a view of, itself first; what views nothing is the last."""
    chain = [tensor_of(node)]
    while (base := viewed(chain[-1])) is not None:
        chain.append(tensor_of(base))
    return chain


def _live(graph: Graph) -> set[Node]:
    """Return the nodes through which gradients of outputs flow."""
    grad, live = requires_grad(graph), set[Node]()
    for node in reversed(graph.nodes):
        traced = node.meta.get("example_value")  # by Dynamo, which knows whether gradients were recorded
        if isinstance(traced, torch.Tensor) and not traced.requires_grad:
            continue
        if node in grad and any(user.op == "output" or user in live for user in node.users):
            live.add(node)
    return live
