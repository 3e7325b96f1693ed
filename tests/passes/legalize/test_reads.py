"""What a program reads of dtypes stands where an op takes it, whatever dtype the op's operand comes to have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from passes.legalize.reads import cast_before_norms
from tests.support.front_ends import WARNINGS, at_levels, fresh
from tests.support.graphs import parse, render
from tests.support.helpers import Two, example

pytestmark = [*WARNINGS, pytest.mark.usefixtures("fresh")]
__all__ = ["fresh"]
BF16 = torch.bfloat16
POLICIES = ("O1,dtype=fp16", "O2,dtype=fp16", "O3,dtype=fp16")


def test_a_norm_is_cast_before_where_it_is_told_a_low_dtype() -> None:
    gm = parse("""
        x: bf16[4, 6]
        told: bf16[4] = linalg_vector_norm(x, 2, [1], dtype=bf16)
        wider: f32[4] = linalg_vector_norm(x, 2, [1], dtype=f32)
        return told, wider
        """)
    assert cast_before_norms(gm.graph) == 1
    assert cast_before_norms(gm.graph) == 0
    assert render(gm.graph).splitlines()[1:3] == [
        "to_dtype: bf16[4, 6] = to.dtype(x, bf16)",
        "told: bf16[4] = linalg_vector_norm(to_dtype, 2, [1])",
    ]


def of_a_read(self: Two, x: Tensor) -> Any:
    h = self.l(x).exp()
    return torch.linalg.vector_norm(h, dim=-1, dtype=h.dtype) * 2


def of_another_read(self: Two, x: Tensor) -> Any:
    h, k = self.l(x), self.m(x)
    return torch.linalg.norm(h.prod(-1, keepdim=True), dim=-1, dtype=k.dtype)


def of_the_other_low_dtype(self: Two, x: Tensor) -> Any:
    h = self.l(x).bfloat16().sin()
    return torch.norm(h, dim=-1, dtype=BF16)


def of_a_matrix(self: Two, x: Tensor) -> Any:
    h = self.l(x).half().exp()
    return torch.linalg.matrix_norm(h, dtype=h.dtype)


@pytest.mark.parametrize("front_end", ["fx", "export", "jit"])
@pytest.mark.parametrize("forward", [of_a_read, of_another_read, of_the_other_low_dtype, of_a_matrix])
def test_a_norm_that_is_told_a_dtype_runs_at_every_level(forward: Callable[..., Any], front_end: str) -> None:
    model, x = Two(forward), example()
    expected = model(x)
    for converted in at_levels(model, (x,) if front_end == "export" else None, front_end, *POLICIES):
        got = converted()(x)
        assert got.float().sub(expected.float()).norm() <= 0.02 * expected.float().norm()
