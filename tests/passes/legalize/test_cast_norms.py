"""What a program reads of dtypes stands where an op takes it, whatever dtype the op's operand comes to have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from passes.legalize.legalize import cast_before_norms
from tests.support.front_ends import FRESH, at_levels
from tests.support.graphs import parse, render
from tests.support.helpers import Two, example

pytestmark = FRESH
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
    x, cast, *_ = gm.graph.nodes
    assert (cast.target, cast.args) == ("to", (x, torch.bfloat16))
    assert render(gm.graph).splitlines()[2] == "told: bf16[4] = linalg_vector_norm(to, 2, [1])"


def norms(self: Two, x: Tensor) -> Any:
    h, k = self.l(x), self.m(x)
    low, half = h.bfloat16().sin(), h.half().exp()
    return (
        torch.linalg.vector_norm(h.exp(), dim=-1, dtype=h.dtype) * 2,  # at O2 the operand is FP32
        torch.linalg.norm(h.prod(-1, keepdim=True), dim=-1, dtype=k.dtype),
        torch.linalg.vector_norm(h.float().exp().to(h.dtype), dim=-1, dtype=h.dtype),
        torch.norm(low, dim=-1, dtype=torch.bfloat16),  # of the other low dtype
        torch.linalg.matrix_norm(half, dtype=half.dtype),
    )


def test_a_norm_that_is_told_a_dtype_runs_at_every_level() -> None:
    model, x = Two(norms), example()
    for converted in at_levels(model, (x,), "graph", *POLICIES):
        for got, expected in zip(converted()(x), model(x), strict=True):
            assert got.float().sub(expected.float()).norm() <= 0.02 * expected.float().norm()
