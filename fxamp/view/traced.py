"""Views that are traced as a part of a larger graph, with their own autocast regions, and converted there.

Before: a = enter_autocast(..., cache_enabled=False); linear(x, w); exit_autocast(a); cross_entropy(linear, y)
After:  to = w.to(bfloat16); ...; linear(...); float; cross_entropy(float, y)

What is inside the region of a view is converted as the graph that the view would capture itself. What is outside, as
the loss, stays as it was traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from passes._torch import enter_autocast, exit_autocast
from passes.contract.policy import Level
from passes.graph.values import LOW_DTYPES, dtypes_of, no_autocast
from passes.ops.ops import NOTE

from ..capture.backend import leave_sharing_to_the_compiler, recompute_as_written, rewrite
from ..capture.call import Call, begin
from ..capture.graph import Graph
from ..capture.outputs import leaving
from ..observe.watch import Part
from .function import function_of
from .replay import Replaying
from .runner import Runner

_MARK = {"cache_enabled": False}  # by which the region of a view is told from those of the author


def traced(runner: Runner, reads: Callable[[Any], Any] | None = None) -> Callable[..., Any]:
    """Return what a view calls while it is traced: the model in a marked region, which casts the outputs it `reads`."""
    forward = function_of(runner.model, runner.graphs, "", in_original_dtype, reads, **_MARK)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(runner.model, *args, **kwargs)
        return runner(args, kwargs)

    return call


def in_original_dtype(value: Tensor) -> Tensor:
    """Return an output of a view as the code around it reads it; in a graph this marks it."""
    return value.float() if value.dtype in LOW_DTYPES else value


def convert_views(
    gm: GraphModule, inputs: Sequence[Any], runners: Sequence[Runner], made: list[Graph], *, eager: bool,
    level: Level | None = None,
) -> list[Part]:  # fmt: skip
    """Convert the regions of views in a graph from Dynamo, in place; return which of the nodes are of which plan.

    A view that has no graph yet keeps this one, and it is added to those `made` in earlier calls. In a graph that runs
    as it is, `eager`, casts may share a storage. With a `level` the policies of views are followed at that one.
    """
    if eager:
        recompute_as_written(gm)
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    given = dict(zip(places, inputs, strict=False))
    entered = _marked(gm.graph)
    parts = [_Region(gm, enter, given, runners).convert(made, eager, level) for enter in entered]
    if not entered and torch.is_autocast_enabled(runners[0].graphs.device) and not torch.is_autocast_cache_enabled():
        runner = _runner_of(runners, inputs)  # after a break inside the region of a view
        graph = _convert(gm, inputs, runner, made, eager, level)
        parts = [Part(graph, runner, {n.name: n.name for n in gm.graph.nodes})]  # casts among them
    gm.recompile()
    return parts


def _marked(graph: FxGraph) -> list[Node]:
    """Return where the regions of views begin; what is marked in the same way inside one is the author's."""
    found, inside = list[Node](), None
    for node in graph.nodes:
        if inside is None and node.target is enter_autocast and node.args[3] is False:
            found.append(inside := node)
        elif inside is not None and node.target is exit_autocast and node.args[0] is inside:
            inside = None
    return found


def _convert(
    gm: GraphModule, inputs: Sequence[Any], runner: Runner, made: list[Graph], eager: bool, level: Level | None
) -> Graph:
    graph = _rewritten(runner, gm, list(inputs), level)
    if not eager:
        leave_sharing_to_the_compiler(gm)
    own = any(known.state == graph.state for known in runner.graphs if not any(known is m for m in made))
    if not own and graph.plan.decisions:
        made.append(runner.graphs.add(graph))
    return graph


def _runner_of(runners: Sequence[Runner], inputs: Sequence[Any]) -> Runner:
    given = {id(value) for value in inputs}
    reads = (r for r in runners if any(id(t) in given for t in (*r.model.parameters(), *r.model.buffers())))
    return next(reads, runners[0])


class _Region:
    """One region: what is in it, and what goes in and out."""

    def __init__(self, gm: GraphModule, enter: Node, given: dict[Node, Any], runners: Sequence[Runner]) -> None:
        self.gm = gm
        nodes = list(gm.graph.nodes)
        leave = next(n for n in nodes if n.target is exit_autocast and n.args[0] is enter)
        between = nodes[nodes.index(enter) : nodes.index(leave) + 1]
        self.nodes = [n for n in between if n.op != "placeholder"]  # of which torch may make some after the switch
        self.leave = leave
        inside = set(self.nodes)
        self.nodes += [n for n in nodes if n.target is in_original_dtype and n.args[0] in inside]
        inside.update(self.nodes)
        self.inputs = list(dict.fromkeys(i for n in self.nodes for i in n.all_input_nodes if i not in inside))
        self.outputs = [n for n in self.nodes if any(user not in inside for user in n.users)]
        self.examples = [given.get(n, n.meta.get("example_value")) for n in self.inputs]
        self.runner = _runner_of(runners, self.examples)

    def convert(self, made: list[Graph], eager: bool, level: Level | None) -> Part:
        """Convert it in a graph of its own, and put that in its place."""
        part = self._cut_out()
        graph = _convert(part, self.examples, self.runner, made, eager, level)
        return Part(graph, self.runner, self._put_in_place(part))

    def _cut_out(self) -> GraphModule:
        graph, env = FxGraph(), dict[Node, Node]()
        for node in self.inputs:
            env[node] = graph.placeholder(node.name)
            env[node].meta = {k: v for k, v in node.meta.items() if k != NOTE}  # as of a cast behind another view
        for node in self.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
            if node.target is in_original_dtype:
                env[node].target = leaving
                env[node].meta["example_value"] = node.args[0].meta["example_value"]
        graph.output(tuple(env[node] for node in self.outputs))
        return GraphModule(self.gm, graph)

    def _put_in_place(self, part: GraphModule) -> dict[str, str]:
        """Copy the nodes of a part here; return their names there, by their names here."""
        graph, env = self.gm.graph, dict[Node, Any]()
        places = [n for n in part.graph.nodes if n.op == "placeholder"]
        env.update(zip(places, self.inputs, strict=True))
        with graph.inserting_before(self.leave):
            for node in part.graph.nodes:
                if node.op == "output":
                    made = [env[n] for n in node.args[0]]
                elif node.op != "placeholder":
                    env[node] = graph.node_copy(node, env.__getitem__)
                    if node.op == "get_attr" and not hasattr(self.gm, str(node.target)):
                        setattr(self.gm, str(node.target), getattr(part, str(node.target)))
        for old, new in zip(self.outputs, made, strict=True):
            if old.target is in_original_dtype and dtypes_of(new.meta.get("val")) in LOW_DTYPES:
                with graph.inserting_before(self.leave):  # low in the model itself; the code around it is traced
                    new = graph.call_method("float", (new,))
            old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in self.nodes)
        for node in reversed(self.nodes):
            graph.erase_node(node)
        return {env[n].name: n.name for n in part.graph.nodes if n.op.startswith("call")}


def _rewritten(runner: Runner, part: GraphModule, examples: list[Any], level: Level | None) -> Graph:
    """Convert a graph, with the model of a view for the one that is called: whoever asks finds this frame."""
    outer = begin(Call(runner.model, (), {}, _CODE))
    try:
        # A region in the graph is the view's. Without one a break lies in the region, which is on round the graph.
        with no_autocast() if _marked(part.graph) else contextlib.nullcontext():
            policy = runner.graphs.policy
            policy = policy if level is None else replace(policy, level=level)
            plan, model = runner.graphs.replayed, runner.model
            replaying = None if plan is None else Replaying(plan, runner.graphs, model, "", whole=False)
            graph = rewrite(part, examples, policy, runs_on=runner.graphs.device, replayed=replaying)
            if replaying is not None:
                runner.graphs.note(*replaying.notes(graph.plan))
            return graph
    finally:
        begin(outer)


_CODE = _rewritten.__code__
