"""One captured graph of a model: as captured, as emitted, what was decided on it, and what its inputs are.

Dynamo's graphs are flat: parameters, buffers and sizes are inputs. The parameters among them tell which model it is;
if a graph also serves another module of the same code, the first call of that module reveals it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from passes import Origin, compile_graph
from passes._torch import NUMBERS, FakeTensor, pytree
from passes.contract.costs import CostModel
from passes.contract.errors import PolicyError
from passes.contract.plan import Decision, Plan
from passes.contract.policy import Policy, module_override
from passes.graph.notes import is_inserted
from passes.graph.values import dtypes_of
from passes.ops import ops
from passes.ops.numbers import value_of
from passes.runtime.tracing import RuntimeTracer

from .._torch import codegen_of, is_number_input, source_name, without_modes
from .state import TRAINED, State

_OF_OBJECT = re.compile(r"^G\[|[\])]\.")
_ATOM = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.([A-Za-z]\w*)")  # skips `_modules` and `_parameters`
# An "attribute" is a tensor that the model holds otherwise; what crossed a graph break is an "argument" too; and of a
# "number" Dynamo made a tensor.
Kind = Literal["parameter", "buffer", "attribute", "argument", "size", "number"]


@dataclass(frozen=True)
class Input:
    """One input of a graph."""

    kind: Kind
    path: str = ""  # of what the model holds: from the compiled module, else from the one whose code was captured
    value: Tensor | None = None  # a number of the model
    parameter: int | None = None  # its identity, since torch swaps none with a weak reference; None for a stand-in


@dataclass(frozen=True)
class Described:
    """A captured graph as the compiler takes it, before any pass: plans under other costs are made of it."""

    graph: GraphModule  # a copy, which no pass changes
    policy: Policy  # with dtype and device filled in
    origins: tuple[Origin, ...]  # of each node, and of those of the graphs inside, in order
    notes: tuple[str, ...]  # what capture has to say, for the plan
    under_autocast: bool  # the graph is called so

    @staticmethod
    def of(
        gm: GraphModule, origins: Mapping[Node, Origin], policy: Policy, notes: tuple[str, ...], under_autocast: bool
    ) -> Described:
        """Keep a copy of a graph, and the origins of its nodes."""
        known = tuple(origins.get(node, Origin()) for node in _nodes(gm))
        return Described(copied(gm), policy, known, notes, under_autocast)

    def compile(self, gm: GraphModule, **how: Any) -> Plan:
        """Run the passes over the graph itself or a copy, in place; `how` is for `compile_graph`."""
        origins = dict(zip(_nodes(gm), self.origins, strict=True))
        return compile_graph(
            gm.graph, self.policy, functools.partial(attribute_of, gm), origins, capture="dynamo", notes=self.notes,
            under_autocast=self.under_autocast, **how,
        )  # fmt: skip


@dataclass(frozen=True)
class Graph:
    """One graph."""

    emitted: GraphModule  # as the compiler emitted it; a copy, since inner backends change their graphs
    plan: Plan  # with module paths from the compiled module if that is known
    captured: GraphModule  # as Dynamo captured it
    described: Described | None = None  # as the compiler took it
    inputs: tuple[Input, ...] = ()
    state: State = TRAINED  # what the model was in; this one where something other than a module was compiled
    broke: str = ""  # where and why Dynamo ended the graph early
    autocast: bool = False  # it was captured under autocast
    read: tuple[int, ...] = ()  # the places of the outputs from which others are computed
    own: Mapping[int, bool] = field(default_factory=dict)  # places of low outputs: are they low without autocast too?
    number: int = 0  # its place among the graphs of its model, in the order of capture
    seconds: float = 0.0  # that the inner backend took
    kept: Any = None  # what its compiler keeps for backward; None if it runs as it was emitted
    written: tuple[int, ...] = ()  # the places of the parameters that it writes, where it is one of several of a call

    def decided(self, policy: Policy | None, costs: CostModel | None) -> tuple[GraphModule, Plan]:
        """Return the graph and the plan of another policy, of the same dtype and device, under other costs."""
        if self.described is None:
            return self.emitted, self.plan
        settled, gm = self.described.policy, copied(self.described.graph)
        asked = settled if policy is None else replace(policy, dtype=settled.dtype, device=settled.device)
        with without_modes():  # those of a diagnostic, which asks for it in the middle of a step
            plan = replace(self.described, policy=asked).compile(gm, costs=costs)
        gm.recompile()
        return gm, plan

    @property
    def places(self) -> tuple[int, ...]:
        """The places of the parameters among the inputs."""
        return tuple(i for i, given in enumerate(self.inputs) if given.kind == "parameter")

    @property
    def names(self) -> dict[int, str]:
        """The paths of parameters and buffers among the inputs, by place."""
        return {i: given.path for i, given in enumerate(self.inputs) if given.path}

    @property
    def paths(self) -> dict[int, str]:
        """The paths of the parameters, by identity."""
        return {given.parameter: given.path for given in self.inputs if given.parameter is not None}

    @functools.cached_property
    def code(self) -> Any:
        """A key that is equal for graphs of the same calls at the same places, whatever their sizes and numbers."""
        return self._calls, tuple(d.source for d in self.plan.decisions)

    @property
    def colours(self) -> tuple[str, ...]:
        """What was decided, node by node."""
        return tuple(d.colour for d in self.plan.decisions)

    def computes(self, other: Graph) -> bool:
        """Say whether another graph of this state computes the same, wherever its code stands."""
        return (self.state, self._calls, self.colours) == (other.state, other._calls, other.colours)

    @functools.cached_property
    def _calls(self) -> Any:
        """A key that is equal for graphs of the same calls, wherever their code stands."""
        nodes = self.emitted.graph.nodes
        inputs = [n for n in nodes if n.op == "placeholder" and _is_tensor(n) and not is_number_input(n)]
        given = tuple(str(dtypes_of(n.meta.get("val"))) for n in inputs)
        calls = [n for n in nodes if n.op.startswith("call") and not is_inserted(n)]
        made = [(n, n.target if n.op == "call_method" else ops.name(n)) for n in calls if _is_tensor(n)]
        written = tuple((name, str(map_aggregate((n.args, dict(n.kwargs)), _unsized))) for n, name in made)
        return self.broke, given, tuple((d.graph, d.key, d.op) for d in self.plan.decisions), written

    def of(self, model: nn.Module) -> Graph:
        """Return the graph, which was captured on a copy of a model, for the model."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        known = (parameters.get(one.path) if one.parameter is not None else None for one in self.inputs)
        pairs = zip(self.inputs, known, strict=True)
        return replace(self, inputs=tuple(one if p is None else replace(one, parameter=id(p)) for one, p in pairs))

    def at(self, values: Sequence[Any], names: Mapping[int, str]) -> Graph:
        """Return the graph for the parameters that another call reads by it; PolicyError if overrides differ there."""
        known = any(given.parameter is not None for given in self.inputs)
        moved = [
            replace(one, path=names.get(id(v), one.path if known or one.kind != "parameter" else ""),
                    parameter=id(v) if one.kind == "parameter" else None)
            for one, v in zip(self.inputs, values, strict=True)
        ]  # fmt: skip
        if not known:
            return replace(self, inputs=tuple(moved))
        old, new = _prefixes(*(inputs[self.places[0]].path for inputs in (self.inputs, moved)))
        decisions = [moved_to(d, new, 0, old) for d in self.plan.decisions]
        pairs = zip(self.plan.decisions, decisions, strict=True)
        for path, other in dict.fromkeys((a.module_path, b.module_path) for a, b in pairs):
            here, there = (module_override(self.plan.policy, [(p, ())]) for p in (path, other))
            if (here and here.colour) != (there and there.colour):
                raise PolicyError(
                    f"'{path}' and '{other}' share one graph, since Dynamo captures their code once, so "
                    f"{here or there} cannot hold for only one of them. Convert ahead of time, override both, or "
                    "override a type or an op."
                )
        return replace(self, plan=replace(self.plan, decisions=tuple(decisions)), inputs=tuple(moved))


def inputs_of(gm: GraphModule, values: Sequence[Any], names: Mapping[int, str]) -> tuple[Input, ...]:
    """Return what each input of a graph from Dynamo is; `names` are the paths of what the model holds, by identity."""
    places = gm.graph.find_nodes(op="placeholder")
    return tuple(_input_of(node, value, names) for node, value in zip(places, values, strict=True))


def _input_of(node: Node, value: Any, names: Mapping[int, str]) -> Input:
    if isinstance(value, nn.Parameter):
        atoms = list(map("".join, _ATOM.findall(source_name(node))))
        path = names.get(id(value)) or ".".join(atoms[1:])  # the first is the local variable that the module is in
        return Input("parameter", path, parameter=None if isinstance(value, FakeTensor) else id(value))
    if not isinstance(value, Tensor):
        return Input("size")
    if is_number_input(node):
        return Input("number", value=value.detach().clone() if source_name(node).startswith("L['model']") else None)
    if is_attribute(node):
        return Input("buffer", names.get(id(value), ""))
    return Input("attribute" if is_held(node) else "argument", names.get(id(value), ""))


def copied(gm: GraphModule, kind: type[GraphModule] = GraphModule) -> GraphModule:
    """Return a copy of a graph and of the bodies of its higher-order ops, over the same tensors."""
    graph = FxGraph(tracer_cls=RuntimeTracer)
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.set_codegen(copy.copy(codegen_of(gm.graph)))
    for node in graph.find_nodes(op="placeholder"):
        if (given := node.meta.get("grapharg")) is not None:  # has a weak reference to what Dynamo was given
            node.meta["grapharg"] = copy.copy(given)
            node.meta["grapharg"].erase()
    made = kind(gm, graph, type(gm).__name__)
    made.meta = dict(gm.meta)
    for node in made.graph.find_nodes(op="get_attr"):
        body = attribute_of(made, str(node.target))
        if isinstance(body, GraphModule):
            node.target = str(node.target).replace(".", "_")
            setattr(made, node.target, copied(body))
    return made


def attribute_of(gm: GraphModule, path: str) -> Any:
    """Return what the target of a get_attr refers to."""
    return functools.reduce(getattr, path.split("."), gm)


def graphs_in(gm: GraphModule) -> list[GraphModule]:
    """Return a graph and those inside it."""
    return [part for part in gm.modules() if isinstance(part, GraphModule)]


def break_of(gm: GraphModule) -> str:
    """Return where and why Dynamo ended a graph early, "" where it did not."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return ""
    stack = getattr(reason, "user_stack", None)
    where = f"{os.path.basename(stack[-1].filename)}:{stack[-1].lineno}" if stack else "an unknown place"
    return f"{where} ({str(reason.reason).splitlines()[0]})"


def is_attribute(placeholder: Node) -> bool:
    """Say whether Dynamo took an input of a graph from a module, as it does buffers, and not from the call."""
    return "._buffers[" in source_name(placeholder)


def is_held(placeholder: Node) -> bool:
    """Say whether Dynamo took an input of a graph from an object, such as the model, or a global: it is no argument."""
    return _OF_OBJECT.search(source_name(placeholder)) is not None


def moved_to(decision: Decision, prefix: str = "", first: int = 0, before: str = "") -> Decision:
    """Return a decision with a prefix on its module path, in the place of another, and an offset on its number."""

    def path_at(path: str) -> str:
        return f"{prefix}{f'{path}.'.removeprefix(before) if path else ''}".removesuffix(".")

    keys = (key.partition("/") for key in (decision.key, *decision.causes))
    key, *causes = (f"{path_at(path)}/{rest}" for path, _, rest in keys)
    return replace(
        decision, graph=decision.graph + first, key=key, module_path=path_at(decision.module_path), causes=tuple(causes)
    )


def _prefixes(before: str, after: str) -> tuple[str, str]:
    ends = zip(reversed(before), reversed(after), strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
    return before[: len(before) - same], after[: len(after) - same]


def _nodes(gm: GraphModule) -> Iterator[Node]:
    for node in gm.graph.nodes:
        yield node
        inside = attribute_of(gm, str(node.target)) if node.op == "get_attr" else None
        if isinstance(inside, GraphModule):
            yield from _nodes(inside)


def _is_tensor(node: Node) -> bool:
    return any(isinstance(v, Tensor) for v in pytree.tree_leaves(node.meta.get("val")))


def _unsized(argument: Any) -> Any:
    """Return an argument without values, sizes and numbers: a number in one graph may be a node in another."""
    if argument is None or isinstance(argument, (bool, str, torch.dtype)):
        return argument
    if isinstance(value_of(argument), NUMBERS):
        return "number"
    return "tensor" if isinstance(argument, Node) else str(argument)
