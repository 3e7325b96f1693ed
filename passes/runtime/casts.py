"""Casts of values whose dtype is known only at run time, and of weights whose `requires_grad` chooses a kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import FakeTensor, FunctionContext, in_transform, pytree

ELIGIBLE = (torch.float32, torch.float16, torch.bfloat16)  # what autocast casts: floating point, and not float64
CAST = torch.ops.aten.to.dtype


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast a value, or the items of a container, if it turns out at run time to be FP32, FP16 or BF16."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype in ELIGIBLE else leaf

    return pytree.tree_map(cast, value)


def again(value: Tensor, dtype: torch.dtype, first: Tensor) -> Tensor:
    """Return a cast of a value as a node of autograd of its own, over the storage of an earlier cast of it.

    Gradients of its readers arrive at the value one by one, as from a second copy. A tracer merges equal casts itself.
    """
    plain = type(value) in (Tensor, torch.nn.Parameter, FakeTensor)
    if not plain or torch.compiler.is_compiling() or in_transform():
        return value.to(dtype)
    if not (value.requires_grad and torch.is_grad_enabled()):
        return first
    return _Again.apply(value, first.detach())  # type: ignore[no-any-return, no-untyped-call]


class _Again(torch.autograd.Function):
    """The identity of the second operand, whose gradient goes to the first; the engine casts it to that one's dtype."""

    @staticmethod
    def forward(ctx: FunctionContext, value: Tensor, first: Tensor) -> Tensor:
        return first.detach()

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a weight with its history, under no_grad too: what reads the cast may run with gradients on or off.

    That suits products: for a non-contiguous input of three dimensions or more, `requires_grad` of the weight decides
    whether torch folds a matrix product into one of two dimensions, which rounds differently.
    """
    with torch.enable_grad():
        return weight.to(dtype)
