"""The graphs of a view: which they are, in a fixed order; their plan; and each as a module that can be called.

Dynamo's graphs are flat: parameters, buffers and sizes are inputs. A bound graph has parameters and buffers by their
names in the model, inputs named by argument, and derives sizes from them.

Before: graph(weight, s0, x): linear(x, weight)
After:  graph(x): weight = self.fc.weight; linear(x, weight)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node, map_arg

from passes._torch import enter_autocast, exit_autocast
from passes.contract.errors import CaptureError
from passes.contract.plan import Plan, joined
from passes.contract.policy import Policy
from passes.contract.reasons import Code
from passes.graph.aliases import Aliases
from passes.graph.notes import is_inserted
from passes.runtime.tracing import RuntimeTracer

from .._torch import is_number_input, source_name
from ..capture.emitted import Emitted, is_writable, with_record
from ..capture.graph import Graph
from ..capture.graphs import coverage, runner_of, together
from ..capture.outputs import leaving
from ..capture.state import State
from ..observe.tensors import plain
from .replay import OR
from .runner import Runner

_OTHER = re.compile(r"\W")
_ARGUMENT = re.compile(r"L\['args'\]\[(\d+)\]|L\['kwargs'\]\['(\w+)'\]")


def ordered(runner: Runner) -> list[Graph]:
    """Return the graphs of a view, each once, in an order that does not depend on which was captured first."""
    places = {path: i for i, (path, _) in enumerate(runner.model.named_modules())}

    def order(graph: Graph) -> tuple[Any, ...]:
        first = next((d.module_path for d in graph.plan.decisions), "")
        return graph.state.order, places.get(first, -1), graph.broke, str((graph.code, graph.colours))

    held, found = _attributes(runner.model), runner.graphs.distinct()
    live = [graph for graph in found if all(name in held for name in graph.names.values())]
    return sorted(live or found, key=order)


def _attributes(model: nn.Module) -> dict[str, Any]:
    held = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {**plain(model), **dict(held)}


class Placed(NamedTuple):
    """A graph of a view, or of one inside its model, whose paths in the outermost model begin with a prefix."""

    runner: Runner
    prefix: str
    graph: Graph


def views_in(runner: Runner) -> list[tuple[str, Runner]]:
    """Return a view, and the views inside its model, each with the prefix of its paths."""
    found = {runner: ""}
    for path, module in runner.model.named_modules():
        if path and (inner := runner_of(module)) is not None:
            found.setdefault(inner, f"{path}.")
    return [(prefix, each) for each, prefix in found.items()]


class Part(NamedTuple):
    """What is decided on the graphs of one state of a view, or of several in which the same is decided."""

    plan: Plan
    graphs: dict[State, list[Placed]]

    @property
    def name(self) -> str:
        """The states in words."""
        return OR.join(map(str, self.graphs))


def parts_of(runner: Runner, decided: Callable[[Graph], Plan] = lambda graph: graph.plan) -> list[Part]:
    """Return the graphs of a view by state; states in which the same is decided are one part."""
    by_state: dict[State, list[Placed]] = {}
    for prefix, each in views_in(runner):
        for graph in ordered(each):
            by_state.setdefault(graph.state, []).append(Placed(each, prefix, graph))
    parts: list[Part] = []
    for state, graphs in by_state.items():
        plan = together([(placed.prefix, decided(placed.graph)) for placed in graphs])
        same = next((p for p in parts if (p.plan.decisions, p.plan.casts) == (plan.decisions, plan.casts)), None)
        if same is None:
            parts.append(same := Part(plan, {}))
        same.graphs[state] = graphs
    return parts


def plan_of(runner: Runner, decided: Callable[[Graph], Plan] = lambda graph: graph.plan) -> Plan:
    """Return the plan of a view and of those inside its model, by what is `decided` on each graph that was captured."""
    parts = parts_of(runner, decided)
    if not parts:
        raise CaptureError(
            f"nothing was captured yet: {type(runner.model).__name__} is captured at its first call, or when it is "
            "converted with example inputs. If that was done, Dynamo left its code to Python; fullgraph=True says why."
        )
    plan = joined([part.plan for part in parts], [part.name for part in parts])
    first = [placed for part in parts for placed in next(iter(part.graphs.values()))]
    covered = coverage(runner.model, [placed.graph for placed in first])
    views = [each for _, each in views_in(runner)]
    refused = tuple(dict.fromkeys(text for each in views for text in each.refused))
    notes = (
        *plan.notes,
        *(f"left to Python: {text}" for text in refused),
        *(n for v in views for n in v.graphs.notes),
        *_read_across(runner.graphs.policy, first),
        *covered,
    )
    replayed = runner.graphs.replayed
    return replace(
        plan,
        notes=tuple(dict.fromkeys(notes)),
        certificate={} if replayed is None else replayed.certificate,
        stored=() if replayed is None else replayed.stored,
        complete=not refused and all(each.graphs.complete and not each.graphs.as_written for each in views),
    )


def _read_across(policy: Policy, graphs: Sequence[Placed]) -> list[str]:
    """Name the weights of which graphs on both sides of a break read casts of their own; autocast's cache has one."""
    if not policy.level.is_autocasts:
        return []
    breaks: dict[str, set[str]] = {}
    apart: set[str] = set()
    for _, prefix, graph in (placed for placed in graphs if placed.graph.state.grad == "grad"):
        inputs = graph.emitted.graph.find_nodes(op="placeholder")
        written = Aliases(graph.emitted.graph)
        for at, name in graph.names.items():
            if graph.kept is not None or written.is_mutated(inputs[at]):  # the graph is compiled, or writes the weight
                apart.add(prefix + name)
            if any(map(is_inserted, inputs[at].users)):
                breaks.setdefault(prefix + name, set()).add(graph.broke)
    several = [name for name, ends in breaks.items() if len(ends) > 1 and name in apart]
    return [
        f"{Code.SUM_ORDER.value}: graphs on both sides of a break read {name}, and each casts its own copy: their "
        "gradients are summed in FP32, where torch.autocast sums them in 16 bits"
        for name in several
    ]


def graphs_of(runner: Runner) -> tuple[GraphModule, ...]:
    """Return the emitted graphs of a view as modules over the model's own parameters and buffers.

    `meta["fxamp"]` of each holds its `state`, its `plan`, where Dynamo broke it (`break`), the `number` of its first
    graph in the plan of the view, the `part` of that plan by name (states that decide the same share both), and what is
    `kept` for backward by the compiler behind it, if there is one.
    """
    made = []
    for placed, number, name in numbered(runner):
        gm, graph = bound(placed.runner, placed.graph), placed.graph
        more = {"state": str(graph.state), "break": graph.broke, "kept": graph.kept}
        made.append(with_record(gm, graph.plan, number=number, part=name, **more))
    return tuple(made)


def numbered(runner: Runner) -> list[tuple[Placed, int, str]]:
    """Return each graph of a view, state by state, with its number in the plan and the name of its part of the plan."""
    found, first = list[tuple[Placed, int, str]](), 0
    for part in parts_of(runner):
        for graphs in part.graphs.values():
            number = first
            for placed in graphs:
                found.append((placed, number, part.name))
                number += placed.graph.plan.graphs
        first = number
    return sorted(found, key=lambda one: one[0].graph.state.order)


def bound(runner: Runner, graph: Graph) -> GraphModule:
    """Return an emitted graph as a module over the model's own parameters and buffers."""
    return _Binding(runner.model, graph, graph.emitted).module()


def captured_of(runner: Runner, graph: Graph) -> GraphModule:
    """Return a graph as captured, without the marks of the view's own region and outputs."""
    gm = _Binding(runner.model, graph, graph.captured).module()
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    for node in reversed(calls):
        if node.target is leaving:
            node.replace_all_uses_with(node.args[0])
        if node.target in (leaving, exit_autocast, enter_autocast) and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


class _Binding:
    """Turns the inputs of one graph into attributes, arguments and sizes."""

    def __init__(self, model: nn.Module, known: Graph, source: GraphModule) -> None:
        self.model, self.known, self.source = model, known, source
        self.graph, self.env = FxGraph(tracer_cls=RuntimeTracer), dict[Node, Any]()
        self.attributes = _attributes(model)
        self.sizes: dict[str, tuple[Node, int]] = {}
        self.taken: set[str] = set()
        call = getattr(type(model), known.state.method or "forward")
        self.names = [*inspect.signature(call).parameters][1:]

    def module(self) -> GraphModule:
        """Build it."""
        for node, what in self._arguments():
            self._attribute_or_size(node, what)
        for node in self.source.graph.nodes:
            if node.op == "output":
                self.graph.output(map_arg(node.args[0], self.env.__getitem__))
            elif node not in self.env and node.op != "placeholder":
                self.env[node] = self.graph.node_copy(node, self.env.__getitem__)
        for node in self.graph.nodes:
            if node.op == "get_attr" and node.target not in self.attributes:
                self.attributes[node.target] = getattr(self.source, node.target)
            node.meta = {k: v for k, v in node.meta.items() if k in _KEPT}
        used = {str(n.target) for n in self.graph.nodes if n.op == "get_attr"}
        held = {name: value for name, value in self.attributes.items() if name in used}
        made = Emitted(held, self.graph, type(self.model).__name__)
        made.training = self.known.state.training
        return made

    def _arguments(self) -> list[tuple[Node, Any]]:
        """Make the inputs that a caller gives; return those that the model or a size gives."""
        late: list[tuple[Node, Any]] = []
        places = [n for n in self.source.graph.nodes if n.op == "placeholder"]
        for node, given in zip(places, self.known.inputs, strict=True):
            value = node.meta.get("example_value", node.meta.get("val"))
            if given.path:
                late.append((node, given.path))
            elif isinstance(value, torch.SymInt):
                late.append((node, value))
            elif given.value is not None:
                late.append((node, given.value))  # a number of the model, which Dynamo makes an input where it varies
            else:
                self.env[node] = made = self.graph.placeholder(self._name(node))
                made.meta = dict(node.meta)
                if is_number_input(node):  # a caller gives the number itself
                    items = [user for user in node.users if user.target == "item"]
                    self.env |= dict.fromkeys(items, made)
                    made.meta |= {k: v for n in items for k, v in n.meta.items() if k in ("val", "example_value")}
                for at, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                    self.sizes.setdefault(str(size), (made, at))
        return late

    def _attribute_or_size(self, node: Node, what: Any) -> None:
        if isinstance(what, str):
            self.env[node] = self.graph.get_attr(self._writable(what))
        elif isinstance(what, torch.Tensor):
            self.env |= {user: what.item() for user in node.users if user.target == "item"}
        elif str(what) in self.sizes:
            self.env[node] = self.graph.call_method("size", self.sizes[str(what)])
        else:
            self.env[node] = self.graph.placeholder(node.name)  # a size that crosses a break
        made = self.env.get(node)
        if isinstance(made, Node):  # no module makes a size of an input
            made.meta = {k: v for k, v in node.meta.items() if made.op != "call_method" or k != "nn_module_stack"}

    def _writable(self, path: str) -> str:
        """Return the path of an attribute, under another name where torch.fx writes its own wrongly into code."""
        if path not in self.attributes:
            raise CaptureError(
                f"graph {self.known.number} reads '{path}', which {type(self.model).__name__} has no more: "
                "convert the model again."
            )
        name = ".".join(p if is_writable(p) else f"_{_OTHER.sub('_', p)}" for p in path.split("."))
        while name != path and self.attributes.get(name, self.attributes[path]) is not self.attributes[path]:
            name += "_"
        self.attributes[name] = self.attributes[path]
        return name

    def _name(self, node: Node) -> str:
        """Return the name of the argument that an input is, or a name with its number for a part of one."""
        found = _ARGUMENT.match(where := source_name(node))
        if found is None:
            return node.name
        at, keyword = found.groups()
        name = keyword or (self.names[int(at)] if int(at) < len(self.names) else node.name)
        name = name if found.end() == len(where) else f"{name}_{len(self.taken)}"
        if name in self.taken or not name.isidentifier():
            return node.name
        self.taken.add(name)
        return name


_KEPT = ("val", "example_value", "stack_trace", "nn_module_stack", "fxamp")
