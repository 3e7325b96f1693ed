"""Kernels that torch does not know: attention for 16 bits only, and one that writes to its operand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import library as operators

import fxamp


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    """Register the kernels, and a rule for attention."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not q.dtype == k.dtype == v.dtype or q.dtype == torch.float32:
            raise TypeError(f"FlashAttention only supports fp16 and bf16, not {q.dtype}, {k.dtype}, {v.dtype}")
        return torch.softmax(q @ k.mT, -1) @ v

    def count(into: Tensor, x: Tensor) -> Tensor:
        into += x.sum()
        return x.clone()

    with operators._scoped_library("fxamp_kernels", "FRAGMENT") as library:
        library.define("attention(Tensor q, Tensor k, Tensor v) -> Tensor")
        library.define("count(Tensor(a!) into, Tensor x) -> Tensor")
        library.impl("attention", attention, "CompositeExplicitAutograd")
        library.impl("count", count, "CompositeExplicitAutograd")
        operators.register_fake("fxamp_kernels::attention", lambda q, k, v: torch.empty_like(q), lib=library)
        operators.register_fake("fxamp_kernels::count", lambda into, x: torch.empty_like(x), lib=library)
        fxamp.register_rule("fxamp_kernels::attention", "low")
        yield torch.ops.fxamp_kernels
