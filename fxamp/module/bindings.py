"""Generated code with less Python overhead, which in a small model is a fifth of the forward pass.

`torch.ops.aten.linear.default(x, w)` finds its kernel by a schema and boxes every argument; `torch._C._nn.linear(x, w)`
is compiled for these arguments, and is what eager calls. `self.blocks.0.fc.weight` calls `nn.Module.__getattr__` once
for each name. Only the generated code changes: the graph keeps its overloads and its attributes.

Before: weight = getattr(self.blocks, "0").fc.weight
        linear = torch.ops.aten.linear.default(x, weight)
After:  weight = self._modules["blocks"]._modules["0"]._modules["fc"]._parameters.get("weight")  # if it is there
        linear = torch._C._nn.linear(x, weight)
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from passes._torch import C_NN
from passes.ops.rules import RULES

# Where torch has a function for an overload, in this order.
_OWNERS = (torch, C_NN, torch.Tensor)
# The function takes fewer arguments by position than its overload: a memory format by keyword only.
_BY_POSITION: dict[Any, int] = {torch.ops.aten.to.dtype: 4}


@functools.cache
def bindings() -> dict[Any, Callable[..., Any]]:
    """Return the function for each overload; functions that this torch lacks are left out."""
    out: dict[Any, Callable[..., Any]] = {}
    for row in RULES.values():
        for overload in row.direct:
            function = next((getattr(owner, row.name) for owner in _OWNERS if hasattr(owner, row.name)), None)
            with contextlib.suppress(AttributeError):
                found = operator.attrgetter(f"{row.name}.{overload}")(torch.ops.aten)
                if function is not None:
                    out[found] = function
    return out


@contextlib.contextmanager
def called_directly(graph: Graph) -> Iterator[None]:
    """Inside this context, generated code calls the Python functions; afterwards the graph is as it was."""
    replaced: list[tuple[Node, Any]] = []
    for node in graph.nodes:
        if node.op == "call_function" and node.target in bindings() and _takes(node):
            replaced.append((node, node.target))
            node.target = bindings()[node.target]
    try:
        yield
    finally:
        for node, overload in replaced:
            node.target = overload


def _takes(node: Node) -> bool:
    """Say whether the function of an overload accepts a call's arguments in the way in which they are passed."""
    return "self" not in node.kwargs and len(node.args) <= _BY_POSITION.get(node.target, len(node.args))


def read_directly(graph: Graph) -> contextlib.AbstractContextManager[None]:
    """Inside this context, generated code reads parameters from the tables in which modules keep them.

    A name that is not in a table is read as an attribute: it is parametrized, or not a parameter. Children are read
    from their table, since a child may have the name of an attribute.
    """
    paths = {n.name: str(n.target).split(".") for n in graph.nodes if n.op == "get_attr"}
    called = {n.name: str(n.target) for n in graph.nodes if n.op == "call_module"}

    def owner(path: list[str]) -> str:
        return "self" + "".join(f"._modules[{part!r}]" for part in path)

    def write(line: str) -> str:
        name, _, rest = line.partition(" = ")
        if name in called:
            path = called[name].split(".")
            return f"{name} = {rest.replace(_asked(path), owner(path), 1)}"
        if name not in paths:
            return line
        *path, last = paths[name]
        tables = [f"(_found := {owner(path)}.{table}.get({last!r})) is None" for table in ("_parameters", "_buffers")]
        _, end, forgotten = rest.partition(";")
        return f"{name} = getattr({owner(path)}, {last!r}) if {' and '.join(tables)} else _found{end}{forgotten}"

    return graph.on_generate_code(lambda before: lambda body: list(map(write, before(body) if before else body)))


def _asked(path: list[str]) -> str:
    """Return the code that fx generates to read a child module."""
    out = "self"
    for part in path:
        out = f"{out}.{part}" if part.isidentifier() else f'getattr({out}, "{part}")'
    return out
