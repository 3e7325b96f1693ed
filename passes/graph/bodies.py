"""Graphs inside a graph: the bodies of higher-order ops, and the dtypes at their border.

A body that is called in one place, like that of `checkpoint`, is *entered*: its inputs have the dtypes of the operands
of the call, and its outputs whatever dtypes result. The bodies of `cond`, `while_loop`, `scan` and `map`, and one that
is called in several places, are rewritten inside, but their inputs and outputs keep the original dtypes, so that
branches agree and loop-carried values do not change dtype. Anything else (`autograd_function_apply`, `flex_attention`)
is kept whole.

Before: y = tag_activation_checkpoint(body, x, w)       body: linear(x, w)
After:  the same call                                   body: linear(to(x, bfloat16), to(w, bfloat16))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, GraphModule, Node

from .._torch import pytree
from ..ops.rules import Rule, row_of
from .aliases import mutated_operands
from .notes import Origin, note_of
from .values import Dtypes, ValueDtype


@dataclass(frozen=True)
class Body:
    """One graph inside a higher-order op."""

    module: GraphModule  # holds the graph and what its get_attr nodes refer to
    # Where in the call's arguments its operands begin; None when the border keeps the original dtypes.
    first: int | None

    @property
    def graph(self) -> Graph:
        """Return the body's graph."""
        return self.module.graph

    def operands(self, node: Node) -> dict[Node, Node]:
        """Return the value that each placeholder of an entered body is given, if it is a node."""
        at = [n for n in self.graph.nodes if n.op == "placeholder"]
        return {p: v for p, v in zip(at, node.args[self.first :], strict=True) if isinstance(v, Node)}

    def dtypes(self, dtypes: Dtypes) -> ValueDtype:
        """Return the dtypes of what the body returns, in the form of the call's results."""
        results: Any = self.graph.output_node().args[0]
        if isinstance(results, Node):
            return dtypes.get(results)
        return tuple(dtypes.get(o) if isinstance(o, Node) else None for o in results)

    def bodies(self) -> dict[Node, list[Body]]:
        """Return the bodies inside this one."""
        return bodies_of(self.graph, self.attribute)

    def attribute(self, path: str) -> Any:
        """Return what the target of a get_attr of the body refers to."""
        return functools.reduce(getattr, path.split("."), self.module)


@dataclass(frozen=True)
class Border:
    """The dtypes at the edges of a graph."""

    inputs: Dtypes = field(default_factory=dict)  # the dtypes of its placeholders, where they are not the original ones
    restore_outputs: bool = True  # its outputs have their original dtypes
    # Its outputs have the dtypes that autocast gives them, or wider ones: what reads them runs under autocast, outside
    # this graph. What the model makes low by itself keeps the dtype that is noted on it.
    autocast_outputs: bool = False
    bodies: dict[Node, list[Body]] = field(default_factory=dict)  # the graphs inside it


def bodies_of(graph: Graph, attribute: Callable[[str], Any]) -> dict[Node, list[Body]]:
    """Return the bodies of the higher-order ops of a graph that the compiler rewrites."""
    bodies: dict[Node, list[Body]] = {}
    for node in graph.nodes:
        row = row_of(node)
        leaves = pytree.tree_leaves((node.args, node.kwargs)) if row.bodies else []
        read = [a for a in leaves if isinstance(a, Node) and a.op == "get_attr"]
        modules = {a: m for a in read if isinstance(m := attribute(str(a.target)), GraphModule)}
        if not modules or note_of(node).under_autocast:
            continue
        first = row.operands_at if _is_entered(node, row, modules) else None
        bodies[node] = [Body(modules[a], first) for a in read if a in modules]
    return bodies


def all_graphs(graph: Graph, bodies: dict[Node, list[Body]]) -> list[Graph]:
    """Return a graph and all graphs inside it, at any depth."""
    return [graph, *(g for inside in bodies.values() for b in inside for g in all_graphs(b.graph, b.bodies()))]


def origins_of(graph: Graph, attribute: Callable[[str], Any]) -> dict[Node, Origin]:
    """Return the origins in a graph and those inside it, of which only what is noted on the nodes already is known."""
    return {node: note_of(node) for part in all_graphs(graph, bodies_of(graph, attribute)) for node in part.nodes}


def _is_entered(node: Node, row: Rule, modules: dict[Node, GraphModule]) -> bool:
    """Say whether a body can be entered: it is the call's only body, used only here, and gets every input."""
    (body, module), *others = modules.items()
    if row.bodies != "entered" or others or node.args[0] is not body:
        return False
    readers = sum(len(n.users) for n in node.graph.find_nodes(op="get_attr") if n.target == body.target)
    return readers == 1 and len(module.graph.find_nodes(op="placeholder")) == len(node.args) - row.operands_at


def is_pure(bodies: Iterable[Body]) -> bool:
    """Say whether none of these graphs writes to its inputs or returns one; its call then aliases no operand."""
    nodes = [n for body in bodies for n in body.graph.nodes]
    returned = any(n.op == "placeholder" and any(u.op == "output" for u in n.users) for n in nodes)
    return not returned and not any(map(mutated_operands, nodes))
