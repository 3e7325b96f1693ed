"""Graphs inside a graph: the bodies of higher-order ops, the dtypes at their border, and a copy where a call stood.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .._torch import pytree
from ..ops.rules import Rule, row_of
from .aliases import mutated_operands
from .notes import note, note_of
from .values import Dtypes, ValueDtype


@dataclass(frozen=True)
class Body:
    """One graph inside a higher-order op.

    Attributes:
        module: holds the graph and what its get_attr nodes refer to.
        first: where in the call's arguments its operands begin; None when the border keeps the original dtypes.
    """

    module: GraphModule
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
    """The dtypes at the edges of a graph.

    Attributes:
        inputs: the dtypes of its placeholders, where they are not the original ones.
        restore_outputs: its outputs have their original dtypes.
        autocast_outputs: its outputs have the dtypes that autocast gives them, or wider ones: what reads them runs
            under autocast, outside this graph. What the model makes low by itself keeps the dtype that is noted on it.
        bodies: the graphs inside it.
    """

    inputs: Dtypes = field(default_factory=dict)
    restore_outputs: bool = True
    autocast_outputs: bool = False
    bodies: dict[Node, list[Body]] = field(default_factory=dict)


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
        if not any(_writes_or_returns_input(m.graph) for m in modules.values()):
            note(node, pure=True)  # neither an alias nor a write: see `aliases.is_opaque`
        bodies[node] = [Body(modules[a], first) for a in read if a in modules]
    return bodies


def all_graphs(graph: Graph, bodies: dict[Node, list[Body]]) -> list[Graph]:
    """Return a graph and all graphs inside it, at any depth."""
    return [graph, *(g for inside in bodies.values() for b in inside for g in all_graphs(b.graph, b.bodies()))]


def _is_entered(node: Node, row: Rule, modules: dict[Node, GraphModule]) -> bool:
    """Say whether a body can be entered: it is the call's only body, used only here, and gets every input."""
    (body, module), *others = modules.items()
    if row.bodies != "entered" or others or node.args[0] is not body:
        return False
    readers = sum(len(n.users) for n in node.graph.find_nodes(op="get_attr") if n.target == body.target)
    return readers == 1 and len(module.graph.find_nodes(op="placeholder")) == len(node.args) - row.operands_at


def _writes_or_returns_input(graph: Graph) -> bool:
    outputs: Any = graph.output_node().all_input_nodes
    return any(mutated_operands(n) for n in graph.nodes) or any(n.op == "placeholder" for n in outputs)


def copy_body(graph: Graph, body: Graph, operands: list[Any]) -> tuple[list[Node], Any]:
    """Copy a body to the insertion point of a graph, with these operands; return the new nodes and the results."""
    copied: dict[Any, Any] = dict(zip((n for n in body.nodes if n.op == "placeholder"), operands, strict=True))
    new = []
    for inner in body.nodes:
        if inner.op not in ("placeholder", "output"):
            copied[inner] = graph.node_copy(inner, copied.__getitem__)
            new.append(copied[inner])
    return new, torch.fx.map_arg(body.output_node().args[0], copied.__getitem__)


def put_in_place(graph: Graph, node: Node, result: Any) -> None:
    """Replace a node by new values for all its readers, item by item if there are several."""
    if isinstance(result, Node):
        before = note_of(node)
        if before.leaves or before.low_of_its_own:
            note(result, leaves=before.leaves, leaves_as=before.leaves_as, low_of_its_own=before.low_of_its_own)
        node.replace_all_uses_with(result)
    elif isinstance(result, (tuple, list)):
        for item in list(node.users):
            put_in_place(graph, item, result[item.args[1]])  # type: ignore[index]
    graph.erase_node(node)
