"""Casts of values whose dtype is known only at run time, and of weights whose `requires_grad` chooses a kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import pytree

ELIGIBLE = (torch.float32, torch.float16, torch.bfloat16)  # what autocast casts: floating point, and not float64
CAST = torch.ops.aten.to.dtype


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast a value, or the items of a container, if it turns out at run time to be FP32, FP16 or BF16."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype in ELIGIBLE else leaf

    return pytree.tree_map(cast, value)


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a weight that keeps `requires_grad` under no_grad, as autocast's cached casts do.

    For a non-contiguous input of three dimensions or more, `requires_grad` of the weight decides whether torch folds a
    matrix product into one of two dimensions, which rounds differently.
    """
    cast = weight.to(dtype)
    if weight.requires_grad and not cast.requires_grad and not torch.is_inference_mode_enabled():
        cast.requires_grad_()
    return cast
