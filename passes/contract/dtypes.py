"""How a dtype is written in plans, policies and reports."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch.": "bfloat16"."""
    return str(dtype).removeprefix("torch.")
