"""Higher-order ops: the graphs inside them, and which dtypes hold at their border.

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

from torch.fx import Graph, GraphModule, Node

from .._torch import pytree
from ..ops.rules import Rule, row_of
from .aliases import mutated_operands
from .notes import note
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
        made: Any = self.graph.output_node().args[0]
        if isinstance(made, Node):
            return dtypes.get(made)
        return tuple(dtypes.get(o) if isinstance(o, Node) else None for o in made)

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
    found: dict[Node, list[Body]] = {}
    for node in graph.nodes:
        row = row_of(node)
        if not row.bodies:
            continue
        held = [a for a in pytree.tree_leaves((node.args, node.kwargs)) if _is_body(a, attribute)]
        modules = [attribute(str(a.target)) for a in held]
        if not modules:
            continue
        first = row.operands_at if _is_entered(node, row, held, modules) else None
        if not any(_writes(m.graph) for m in modules):
            note(node, pure=True)  # neither an alias nor a write: see `aliases.is_opaque`
        found[node] = [Body(m, first) for m in modules]
    return found


def all_graphs(graph: Graph, bodies: dict[Node, list[Body]]) -> list[Graph]:
    """Return a graph and all graphs inside it, at any depth."""
    inside = [b for held in bodies.values() for b in held]
    return [graph, *(g for b in inside for g in all_graphs(b.graph, b.bodies()))]


def _is_body(arg: Any, attribute: Callable[[str], Any]) -> bool:
    return isinstance(arg, Node) and arg.op == "get_attr" and isinstance(attribute(str(arg.target)), GraphModule)


def _is_entered(node: Node, row: Rule, held: list[Node], modules: list[GraphModule]) -> bool:
    """Say whether a body can be entered: it is the call's only body, used only here, and gets every input."""
    if row.bodies != "entered" or len(held) != 1 or node.args[0] is not held[0]:
        return False
    readers = sum(len(n.users) for n in node.graph.nodes if n.op == "get_attr" and n.target == held[0].target)
    placeholders = sum(n.op == "placeholder" for n in modules[0].graph.nodes)
    return readers == 1 and placeholders == len(node.args) - row.operands_at


def _writes(graph: Graph) -> bool:
    """Say whether a body writes to a value, or returns one of its inputs."""
    outputs: Any = graph.output_node().all_input_nodes
    return any(mutated_operands(n) for n in graph.nodes) or any(n.op == "placeholder" for n in outputs)
