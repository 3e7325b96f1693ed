"""A watch under which each emitted graph runs node by node, whatever compiles it, and so do the bodies inside it.

Before: watch.run(graph, args)                              one call of what Inductor has compiled
After:  watch.node(nodes, linear); watch.node(nodes, relu)  a subclass chooses how each node runs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Interpreter, Node

from passes.contract.plan import Plan
from passes.graph.bodies import Body
from passes.graph.notes import is_inserted

from ..census.graphs import Given
from ..census.rows import Ledger, ledgers_of
from ..watch import Compile, Place, Ran, Watch


class NodeWatch(Watch):
    """A watch that runs graphs by `node`.

    Attributes:
        keeps: values are kept until their graph has run, for `before_casts`.
    """

    keeps = False
    _ledgers: tuple[Ledger, ...] = ()

    def node(self, nodes: Nodes, n: Node) -> Any:
        """Run one node of a graph, and return its value."""
        return nodes.value_of(n)

    def ledger(self, at: int) -> Ledger:
        """Return a graph that ran, beside its decisions."""
        if len(self._ledgers) <= at:
            self._ledgers = ledgers_of(self)
        return self._ledgers[at]

    def run(
        self, converted: Any, graph: GraphModule, by: str, run: Callable[..., Any], args: tuple[Any, ...],
        compile: Compile | None = None,
    ) -> Any:  # fmt: skip
        """Run a graph as it was emitted, even if a compiler has made something else of it."""
        before = self._place
        try:
            return Nodes(self, self._enter(converted.graph, converted.plan)).run(*args, enable_io_processing=False)
        finally:
            self._place = before

    def _enter(self, graph: GraphModule, plan: Plan) -> int:
        """Return the number of a graph here; the graphs inside it follow, in the order of the plan."""
        known = next((at for at, ran in enumerate(self.graphs) if ran.graph is graph), None)
        if known is not None:
            return known
        first, inside = len(self.graphs), _all_graphs(graph)
        self.graphs += [Ran(Given(g, plan.from_graph(i)), g, "") for i, g in enumerate(inside)]
        return first


def _all_graphs(graph: GraphModule) -> list[GraphModule]:
    """Return a graph and those inside it, each once, in the order in which the compiler decides on them."""
    found, waiting = list[GraphModule](), [graph]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.append(one)
            waiting += reversed([b.module for held in Body(one, None).bodies().values() for b in held])
    return found


class Nodes(Interpreter):
    """Runs the graph of a number in a watch, which chooses how each node runs."""

    def __init__(self, watch: NodeWatch, at: int) -> None:
        super().__init__(watch.graphs[at].graph, garbage_collect_values=not watch.keeps)
        self.watch, self.at = watch, at
        inside = Body(watch.graphs[at].graph, None).bodies()
        self._entered = {n: held[0] for n, held in inside.items() if held[0].first is not None}

    def run_node(self, n: Node) -> Any:
        """Run a call by the watch, and anything else as it is."""
        if not n.op.startswith("call"):
            return super().run_node(n)
        if n in self._entered:  # a checkpoint: its body runs here, once
            body = self._entered[n]
            inside = next(at for at, ran in enumerate(self.watch.graphs) if ran.graph is body.module)
            args, _ = self.fetch_args_kwargs_from_env(n)
            return Nodes(self.watch, inside).run(*args[body.first :], enable_io_processing=False)
        self.watch._place = Place("node", n.name, self.at)
        return self.watch.node(self, n)

    def before_casts(self, n: Node) -> Any:
        """Return a value that has been computed, as it was before casts of fxamp."""
        while is_inserted(n):
            n = n.all_input_nodes[0]
        return self.env[n]

    def call(self, n: Node, args: Any, kwargs: Any) -> Any:
        """Run a call on other operands."""
        return getattr(self, n.op)(n.target, args, kwargs)

    def value_of(self, n: Node) -> Any:
        """Run a call, and return its value."""
        return super().run_node(n)
