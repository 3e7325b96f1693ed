"""Graphs that run in the arithmetic of Inductor's kernels: FP32 in registers, rounded where a value is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from fxamp.observe.fused import Fused

LOW = torch.bfloat16
cast = torch.ops.prims.convert_element_type.default
X, Y, W = (torch.randn(16, 16, generator=torch.Generator().manual_seed(at)) for at in range(3))
Fn = Callable[[Tensor, Tensor, Tensor], Tensor]


def chain(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return torch.ops.aten.mul(torch.ops.aten.mul(x, y), w)  # in 16 bits


def moved(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return torch.ops.aten.mul(torch.ops.aten.permute(torch.ops.aten.mul(x, y), [1, 0]), w)


def reduced(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return torch.ops.aten.sum(torch.ops.aten.mul(torch.ops.aten.mul(x, y), w), [1])


def product(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return torch.ops.aten.mm(torch.ops.aten.mul(torch.ops.aten.mul(x, y), w), w)


def stored(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    low = cast(torch.ops.aten.mul(cast(x, torch.float32), y), LOW)
    return torch.ops.aten.mul(cast(low, torch.float32), w)


def fused(function: Fn, values: Sequence[Tensor], stores: bool = False) -> Tensor:
    graph = make_fx(function, tracing_mode="fake")(*values)

    def is_low(node: Node) -> bool:
        return stores and node.target is cast and node.args[1] == LOW

    return Fused(graph, is_low).start(*values)


LOWS = X.to(LOW), Y.to(LOW), W.to(LOW)
WIDES = [value.float() for value in LOWS]


@pytest.mark.parametrize("function", [chain, moved, reduced])
def test_one_kernel_rounds_once(function: Fn) -> None:
    once = function(*WIDES).to(LOW)
    found = fused(function, LOWS)
    assert found.dtype == LOW
    assert torch.equal(found, once)
    assert not torch.equal(found, function(*LOWS))  # which is rounded node by node


def test_a_kernel_of_a_library_reads_what_was_rounded() -> None:
    factor = chain(*WIDES).to(LOW)
    assert torch.equal(fused(product, LOWS), torch.mm(factor, LOWS[2]))


def test_what_is_stored_low_is_read_so() -> None:
    wide = stored(*WIDES)
    assert torch.equal(fused(stored, WIDES, stores=True), wide)
    once = WIDES[0] * WIDES[1] * WIDES[2]
    assert not torch.equal(wide, once)
    assert torch.equal(fused(stored, WIDES), once)
