"""What a placement costs, in bytes moved: the unit in which the cut compares casts with running an op in FP32.

A launch counts as a number of bytes, from a small table per kind of device. A value of unknown size counts as one byte.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from . import ops
from .values import SET_GRAD

# Bytes that move in the time of one launch; assumed, not measured: 5 us at 10 GB/s on a CPU core, 2 us at 500 GB/s
# on a GPU.
LAUNCH = {"cpu": 50_000, "cuda": 1_000_000}


def numel(value: Any) -> int:
    """Return the number of floating elements of a value; symbolic sizes count as in the example inputs."""
    if isinstance(value, torch.Tensor):
        out = 1
        for size in value.shape:
            out *= size if isinstance(size, int) else (getattr(size.node, "hint", None) or 4)
        return out if value.is_floating_point() else 0
    if isinstance(value, (tuple, list)):
        return sum(numel(v) for v in value)
    return 0


class Costs:
    """Bytes moved by casts and by ops of one graph, forward and backward."""

    def __init__(self, graph: Graph, device: str) -> None:
        self.launch = LAUNCH[device]
        self.grad = requires_grad(graph)

    def cast(self, node: Node) -> int:
        """Return the cost of one cast of a value: read it, write it, and its gradient the other way."""
        if "val" not in node.meta:
            return 1
        return (self.launch + 6 * numel(node.meta["val"])) * (2 if node in self.grad else 1)

    def run(self, node: Node, size: int) -> int:
        """Return the cost of running an op on elements of `size` bytes; a view moves nothing."""
        if "val" not in node.meta or is_view(node):
            return 0
        moved = numel(node.meta["val"]) + sum(numel(o.node.meta.get("val")) for o in ops.operands(node))
        backward = 2 if node in self.grad and ops.name(node) not in _FREE_BACKWARD else 0
        return size * moved * (1 + backward)


def is_view(node: Node) -> bool:
    """Say whether an op only makes a new view of its operand."""
    schema = ops.schema_of(node)
    return ops.name(node) in _VIEWS or (schema is not None and any(r.alias_info is not None for r in schema.returns))


# The gradient of each operand is the gradient itself, or a view of it.
_FREE_BACKWARD = frozenset(["add", "sub", "cat"])
_VIEWS = frozenset(
    ["getitem", "reshape", "flatten", "unflatten", "contiguous", "dropout", "chunk", "expand_as", "view_as"]
)


def requires_grad(graph: Graph) -> frozenset[Node]:
    """Return the values that gradients flow through: made from a trainable parameter outside no_grad regions."""
    out: set[Node] = set()
    enabled = [True]
    for node in graph.nodes:
        if node.op == "call_function" and node.target is SET_GRAD:
            state = node.args[0]
            enabled = [*enabled[:-1]] if isinstance(state, Node) and len(enabled) > 1 else [*enabled, bool(state)]
        elif node.op == "get_attr":
            value = node.meta.get("val")
            if getattr(value, "requires_grad", False):
                out.add(node)
        elif node.op.startswith("call") and enabled[-1] and any(n in out for n in node.all_input_nodes):
            out.add(node)
    return frozenset(out)
