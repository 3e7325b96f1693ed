"""Casts of values whose dtype is known only at run time, and of weights whose `requires_grad` chooses a kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import pytree

ELIGIBLE = (torch.float32, torch.float16, torch.bfloat16)  # what autocast casts: floating point, and not float64
CAST = torch.ops.aten.to.dtype


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast a value known only when the graph runs, or the members of a container: only floats below 64 bits."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype in ELIGIBLE else leaf

    return pytree.tree_map(cast, value)


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a weight that keeps `requires_grad` under no_grad, as autocast's cached casts do.

    A matrix product over a non-contiguous input of three dimensions or more is folded into one by `requires_grad` of
    the weight, and the folded product rounds differently.
    """
    cast = weight.to(dtype)
    if weight.requires_grad and not cast.requires_grad and not torch.is_inference_mode_enabled():
        cast.requires_grad_()
    return cast
