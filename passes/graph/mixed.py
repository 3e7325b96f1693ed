"""Reject the mixes of float dtypes that a real kernel rejects, since not every fake kernel does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..ops import ops
from ..ops.rules import row_of
from .values import ELIGIBLE, LOW_DTYPES


def refuse_mixed(node: Node, dtype_of: Callable[[Node], Any]) -> None:
    """Raise TypeError where a kernel rejects the float dtypes of its operands.

    The kernel of a norm takes weights of its input's dtype; if the input is low, it also takes FP32 weights.
    """
    row = row_of(node)
    held = [(o.name in row.uncast, dtype_of(o.node)) for o in ops.operands(node)]
    first = {d for affine, d in held if not affine and d in ELIGIBLE}
    affine = {d for affine, d in held if affine and d in ELIGIBLE}
    if row.same_dtype and len(first | affine) > 1:
        raise TypeError("the kernel takes operands of one floating dtype")
    fits = not affine or affine == first or (affine == {torch.float32} and first <= {*LOW_DTYPES})
    if "bias" in row.uncast and not fits:
        raise TypeError("the kernel takes weights of its input's dtype, or FP32 ones beside a low input")
