"""The graphs of a view: which they are, in a fixed order; their plan; and each as a module that can be called.

Dynamo's graphs are flat: parameters, buffers and sizes are inputs. A bound graph has parameters and buffers by their
names in the model, inputs named by argument, and derives sizes from them.

Before: graph(weight, s0, x): linear(x, weight)
After:  graph(x): weight = self.fc.weight; linear(x, weight)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node, map_arg

from passes._torch import source_name

from ..dynamo.compiled import Converted
from .function import Entry
from .runner import Runner

_ARGUMENT = re.compile(r"L\['args'\]\[(\d+)\]|L\['kwargs'\]\['(\w+)'\]")
_GRAD = ("grad", "no_grad", "inference")


def entries_of(runner: Runner) -> list[Entry]:
    """Return the graphs of a view, each once, in an order that does not depend on which was captured first."""
    places = {path: i for i, (path, _) in enumerate(runner.model.named_modules())}

    def order(entry: Entry) -> tuple[Any, ...]:
        first = next((d.module_path for d in entry.converted.plan.decisions), "")
        state = (entry.method, not entry.training, _GRAD.index(entry.grad))
        return (*state, places.get(first, -1), entry.converted.broke, str(entry.converted.signature))

    found: dict[Any, Entry] = {}
    for entry in sorted(runner.entries, key=order):
        key = (entry.method, entry.training, entry.grad, str(entry.converted.signature))
        found.setdefault(key, entry)
    return list(found.values())


def bound(runner: Runner, entry: Entry) -> GraphModule:
    """Return an emitted graph as a module over the model's own parameters and buffers.

    Its attribute `state` names the state that it was captured in, and the method.
    """
    return _Binding(runner, entry).module()


class _Binding:
    """Turns the inputs of one graph into attributes, arguments and sizes."""

    def __init__(self, runner: Runner, entry: Entry) -> None:
        self.runner, self.entry = runner, entry
        self.source = entry.converted.graph
        self.graph, self.env = Graph(), dict[Node, Any]()
        model = runner.model
        self.attributes: dict[str, Any] = {
            **dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))
        }  # fmt: skip
        self.sizes: dict[str, tuple[Node, int]] = {}
        self.taken: set[str] = set()
        call = getattr(type(model), entry.method or "forward")
        self.names = [*inspect.signature(call).parameters][1:]

    def module(self) -> GraphModule:
        """Build it."""
        late = self._arguments()
        for node, what in late:
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
        made = GraphModule(held, self.graph, type(self.runner.model).__name__)
        made.state = f"{self.entry.method or 'call'}: {self.entry.state}"  # type: ignore[assignment]
        return made

    def _arguments(self) -> list[tuple[Node, Any]]:
        """Make the inputs that a caller gives; return those that the model or a size gives."""
        late: list[tuple[Node, Any]] = []
        places = [n for n in self.source.graph.nodes if n.op == "placeholder"]
        for i, node in enumerate(places):
            value = node.meta.get("example_value", node.meta.get("val"))
            constant = self.entry.constants.get(i)
            if i in self.entry.names:
                late.append((node, self.entry.names[i]))
            elif isinstance(value, torch.SymInt):
                late.append((node, value))
            elif constant is not None:
                late.append((node, constant))  # a number of the model, which dynamic=True makes an input
            else:
                self.env[node] = made = self.graph.placeholder(self._name(node))
                made.meta = dict(node.meta)
                for at, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                    self.sizes.setdefault(str(size), (made, at))
        return late

    def _attribute_or_size(self, node: Node, what: Any) -> None:
        if isinstance(what, str):
            self.env[node] = self.graph.get_attr(what)
        elif isinstance(what, torch.Tensor):
            self.env |= {user: what.item() for user in node.users if user.target == "item"}
        elif str(what) in self.sizes:
            self.env[node] = self.graph.call_method("size", self.sizes[str(what)])
        else:
            self.env[node] = self.graph.placeholder(node.name)  # a size that crosses a break
        made = self.env.get(node)
        if isinstance(made, Node):
            made.meta = dict(node.meta)

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


def converted_of(runner: Runner) -> list[Converted]:
    """Return what is kept of each graph of a view."""
    return [entry.converted for entry in entries_of(runner)]


def runners_in(module: nn.Module) -> Sequence[tuple[str, Runner]]:
    """Return what runs the views inside a module, with their paths."""
    found = ((path, getattr(type(m), "_fxamp_runner", None)) for path, m in module.named_modules())
    return [(path, runner) for path, runner in found if runner is not None]
