"""Run a graph of forward or backward, as Inductor gets it, in the arithmetic of its kernels, without generating code.

Before: mul: bf16 = x * y; add: bf16 = mul + z; mm(add, w)       node by node: mul and add are rounded
After:  mul, in FP32; add, in FP32, and rounded for mm; mm       a kernel computes in FP32, and rounds what it stores

Pointwise ops and reductions read low values as they were before they were rounded, and so do views on the way to them;
what a library computes, what is saved and what is returned reads them rounded. Inductor may store one of the former
too, where many read it, which is not known here: an error found so is an estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from passes._torch import OpOverload
from passes.graph.values import LOW_DTYPES

from .interpret import Run

CAST = torch.ops.prims.convert_element_type.default
# What Inductor computes where it is read, beside pointwise ops and reductions.
MOVES = {
    "_unsafe_view", "alias", "broadcast_in_dim", "clone", "expand", "full", "getitem", "iota", "permute", "reshape",
    "select", "slice", "squeeze", "unsqueeze", "view",
}  # fmt: skip
_VIEWS = MOVES | {"cat", "constant_pad_nd", "split", "split_with_sizes", "t", "transpose"}


class Fused(Run):
    """Runs a graph whose values have examples; what casts to a low dtype and `stores` it, all read from there."""

    def __init__(self, graph: GraphModule, stores: Callable[[Node], bool]) -> None:
        super().__init__(graph)
        self._stores = stores
        self._wide: dict[Node, Any] = {}  # low values as they are in registers

    def run_node(self, n: Node) -> Any:
        """Run a node."""
        value = self._fused(n) if n.op == "call_function" else super().run_node(n)
        for last in self.user_to_last_uses.get(n, []):
            self._wide.pop(last, None)
        return value

    def _fused(self, n: Node) -> Any:
        if n.target is CAST:
            return self._cast(n)
        if op_name(n) in _VIEWS:
            if any(i in self._wide for i in n.all_input_nodes):
                args, kwargs = map_arg((n.args, n.kwargs), self._in_registers)
                self._wide[n] = self.call(n, args, kwargs)
            return super().run_node(n)
        if not _computes(n):
            return super().run_node(n)
        args, kwargs = map_arg((n.args, n.kwargs), self._in_registers)
        return self._rounded(n, self.call(n, args, kwargs))

    def _cast(self, n: Node) -> Any:
        source, dtype = n.args[0], n.args[1]
        assert isinstance(source, Node)
        wide = self._in_registers(source)
        if dtype not in LOW_DTYPES:
            return wide.to(dtype)
        if not self._stores(n):
            self._wide[n] = wide
        return wide.to(dtype)

    def _in_registers(self, n: Node) -> Any:
        value = self._wide.get(n, self.env[n])
        return value.float() if isinstance(value, Tensor) and value.dtype in LOW_DTYPES else value

    def _rounded(self, n: Node, value: Any) -> Any:
        """Return a result in the dtypes that a node gives, and keep it as it is in registers."""
        example = n.meta.get("val")
        if isinstance(value, (tuple, list)):
            examples = example if isinstance(example, (tuple, list)) else (None,) * len(value)
            return tuple(_in_dtype_of(v, e) for v, e in zip(value, examples, strict=True))
        rounded = _in_dtype_of(value, example)
        if rounded is not value:
            self._wide[n] = value
        return rounded


def _in_dtype_of(value: Any, example: Any) -> Any:
    both = isinstance(value, Tensor) and isinstance(example, Tensor)
    return value.to(example.dtype) if both and value.dtype != example.dtype else value


def op_name(n: Node) -> str:
    """Return the name of an op without its overload."""
    return str(getattr(n.target, "__name__", "")).partition(".")[0]


def is_pointwise(n: Node) -> bool:
    """Say whether each element of a result is computed of the elements at its place."""
    return isinstance(n.target, OpOverload) and torch.Tag.pointwise in n.target.tags


def is_reduction(n: Node) -> bool:
    """Say whether an op reduces, as a sum does."""
    return isinstance(n.target, OpOverload) and torch.Tag.reduction in n.target.tags


def _computes(n: Node) -> bool:
    return is_pointwise(n) or is_reduction(n) or op_name(n) == "gather"
