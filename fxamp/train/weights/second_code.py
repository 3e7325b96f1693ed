"""Generate a second version of a converted module's code, in which casts of weights are kept for a window.

All that the training step knows about the inside of a converted module is here: its graphs, and how their code is
called. The module, its graphs and its parameters stay as they are.

Before: to = w.to(torch.bfloat16)
After:  to = kept_to(w, torch.bfloat16)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from passes.graph.aliases import mutated_operands
from passes.graph.notes import is_inserted
from passes.runtime.casts import CAST, cast_weight

from ...module.bindings import called_directly, read_directly
from ...module.in_place import called_by_name
from ...module.module import ConvertedModule
from ...module.serialize import graph_from_data, graph_to_data
from .kept import GraphInputs, KeptCast


def graphs_of(module: ConvertedModule) -> list[Graph]:
    """Return the graphs of a converted module, in order."""
    return [variant.graph for variant in module.variants]


@contextlib.contextmanager
def running(module: ConvertedModule, codes: Sequence[SecondCode]) -> Iterator[None]:
    """Inside this context, a converted module runs other code for each of its graphs."""
    own: dict[int, Callable[..., Any]] = module.functions
    module.functions = {at: code.run for at, code in enumerate(codes)}
    try:
        yield
    finally:
        module.functions = own


class SecondCode:
    """The code of one graph with casts that are kept.

    Args:
        module: Converted module that the graph belongs to.
        graph: The graph as the module has it.
        known: The casts that are kept already, by `same_cast`; those that are new are added.
        inputs: Where the casts find the inputs of a compiled graph.

    Attributes:
        graph: The graph as the module has it.
        run: The code, a function of the module and its flat inputs.
    """

    def __init__(
        self, module: ConvertedModule, graph: Graph, known: dict[Hashable, KeptCast], inputs: GraphInputs
    ) -> None:
        self.graph = graph
        keys = {c.name: same_cast(module, c) for c in weight_casts(module, graph) if not why_not(module, c)}
        copied = graph_from_data(graph_to_data(graph))
        self._casts: list[tuple[KeptCast, nn.Module, str, torch.dtype]] = []
        for node in copied.nodes:
            if node.name in keys:
                key = keys[node.name]
                if key not in known:
                    known[key] = KeptCast(node.target, f"kept_{node.name}", inputs, len(known))
                cast = known[key]
                self._casts.append((cast, *_owner(module, str(node.args[0].target)), node.args[1]))
                node.target = cast
        with called_directly(copied), called_by_name(copied), read_directly(copied):
            self.run: Callable[..., Any] = _code(copied)

    def reads(self) -> Iterator[tuple[KeptCast, nn.Parameter, torch.dtype]]:
        """Yield each cast that is kept, with what it casts."""
        for cast, owner, name, dtype in self._casts:
            weight = owner._parameters.get(name)
            if weight is not None:
                yield cast, weight, dtype


def _code(graph: Graph) -> Callable[..., Any]:
    made = GraphModule(nn.Module(), Graph())  # empty, since the code is called on another module
    made.graph = graph
    return type(made).forward


def weight_casts(module: ConvertedModule, graph: Graph) -> Iterator[Node]:
    """Yield the casts that fxamp inserted for parameters, also for values that are no longer parameters."""
    for node in graph.nodes:
        if is_inserted(node) and node.op == "call_function" and node.args[0].op == "get_attr":
            owner, name = _owner(module, str(node.args[0].target))
            if name not in owner._buffers:
                yield node


def same_cast(module: ConvertedModule, cast: Node) -> Hashable:
    """Return a key that is equal for casts that make the same tensor of the same weight.

    It is for the module's present weights. If a shared weight becomes two later, the cast is made for each in turn.
    """
    return id(_weight(module, cast)), cast.args[1], CAST if cast.target is cast_weight else cast.target


def why_not(module: ConvertedModule, cast: Node) -> str:
    """Return why a cast is not kept, "" if it is."""
    weight = _weight(module, cast)
    if weight is None:
        return "is not a parameter of its module any more"
    if type(weight) is not nn.Parameter:
        return f"is a {type(weight).__name__}, which is gathered or exchanged again at each call"
    if any(user.op == "output" or cast in mutated_operands(user) for user in cast.users):
        return "leaves the graph, or is written to in it"
    return ""


def _weight(module: ConvertedModule, cast: Node) -> nn.Parameter | None:
    """Return the parameter that is cast; None if it is no longer a parameter."""
    source: Any = cast.args[0]
    owner, name = _owner(module, str(source.target))
    return owner._parameters.get(name)


def _owner(module: ConvertedModule, path: str) -> tuple[nn.Module, str]:
    """Return the module that has what is at a path, and the name by which it has it."""
    owner, _, name = path.rpartition(".")
    return module.get_submodule(owner), name
