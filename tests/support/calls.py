"""Calls as nodes of a graph, with the values of what they are given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from passes._torch import pytree
from passes.graph.values import dtypes_of


def call(target: Any, *args: Any, **kwargs: Any) -> Node:
    """Return a call whose tensors are inputs of a graph, each with its value."""
    graph = Graph()

    def operand(arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        node = graph.placeholder("x")
        node.meta["val"] = arg
        return node

    args, kwargs = pytree.tree_map(operand, (args, kwargs))
    make = graph.call_method if isinstance(target, str) else graph.call_function
    return make(target, args, kwargs)


def held(node: Node) -> Any:
    return dtypes_of(node.meta["val"])


def x(dtype: torch.dtype = torch.float32, *shape: int) -> Tensor:
    return torch.ones(shape or (2, 4), dtype=dtype)
