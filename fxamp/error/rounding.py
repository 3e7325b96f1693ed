"""What rounding to a 16-bit dtype does to FP32 values, computed on their bits.

Rounding to nearest moves a value by at most half an ulp, with a mean square of ulp^2 / 12; stochastic rounding, up or
down with probabilities that make it right on average, by up to one ulp, with a mean square of ulp^2 / 6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_BLOCK = 1 << 18  # elements
_EXPONENT = 0x7F800000  # of an FP32 number
_LEAST = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-14}  # normal number; below it the spacing is the same
BITS = {torch.bfloat16: 7, torch.float16: 10}  # of the mantissa


def power(values: Tensor, low: torch.dtype) -> Tensor:
    """Return the power of two at or below FP32 values, within the range of a low dtype; finite for infinity too.

    The spacing of the dtype there, the ulp, is this times 2 ** -BITS.

    Args:
        values: FP32, of any shape.
        low: torch.bfloat16 or torch.float16.
    """
    found = (values.view(torch.int32) & _EXPONENT).view(torch.float32)
    return found.clamp_(_LEAST[low], 2.0**127)


def ulp(values: Tensor, low: torch.dtype) -> Tensor:
    """Return the spacing of a low dtype at FP32 values."""
    return power(values, low).mul_(2.0 ** -BITS[low])


def nearest(values: Tensor, low: torch.dtype) -> Tensor:
    """Return FP32 values as a low dtype holds them, in FP32."""
    return values.to(low).float()


def error(values: Tensor, low: torch.dtype) -> Tensor:
    """Return by how much a low dtype moves FP32 values: not at all the largest one, for which masks have its own."""
    return nearest(values, low).sub_(values).masked_fill_(values.abs() >= torch.finfo(torch.float32).max, 0.0)


def variance(weights: Tensor, unit: Tensor, low: torch.dtype) -> Tensor:
    """Return the variance of the sum of values that are rounded, each times a weight: weights^2 ulp^2 / 12 (Widrow).

    Args:
        weights: FP32, such as the gradient of the loss by each value.
        unit: the power of two of each value, of the same shape; 0 for one that is not rounded.
        low: torch.bfloat16 or torch.float16.
    """
    norm: Tensor = torch.linalg.vector_norm(unit.mul_(weights))
    return norm.square() * (4.0 ** -BITS[low] / 12)


def stochastic(values: Tensor, low: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return FP32 values rounded at random to their neighbours in a low dtype; those that it holds stay as they are.

    Args:
        values: FP32, of any shape.
        low: torch.bfloat16 or torch.float16.
        generator: of the values' device.
    """
    dropped = 23 - BITS[low]
    noise = torch.randint(0, 1 << dropped, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    if low == torch.bfloat16:  # infinity stays what it is, and so do strides, on which graphs after a break are guarded
        bits = values.view(torch.int32)
        sums = noise.add_(bits) if noise.stride() == bits.stride() else bits.add(noise)
        rounded = sums.bitwise_and_(-(1 << dropped)).view(torch.float32)
        return rounded.masked_fill_(values.isnan(), math.nan)  # of some NaN the sum is -0.0, others drop to infinity
    share = noise.float() / (1 << dropped)
    step = ulp(values, low)  # a power of two, so that nothing but floor rounds
    rounded = (values / step + share).floor_() * step
    rounded = torch.where(rounded.abs() > torch.finfo(low).max, rounded * float("inf"), rounded)
    return torch.where(values.isfinite(), rounded, values)


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of tensors of one shape, block by block, so that what is computed of them takes little memory."""
    first = tensors[0]
    if first.numel() <= _BLOCK or first.layout is not torch.strided:
        yield tensors
    else:
        rows = max(_BLOCK * len(first) // first.numel(), 1)
        yield from zip(*(t.split(rows) for t in tensors), strict=True)


class Curvature:
    """e.He, from one step: e are roundings, one of each value, and H is the second derivative of the loss by them.

    They move the loss by g.e + e.He / 2, where g are the gradients without them; those with them are g + He. So e.He is
    twice what the product of e with the latter is above what the loss is moved by.
    """

    def __init__(self) -> None:
        self._products: list[Tensor] = []

    def add(self, moved: Tensor, grad: Tensor) -> None:
        """Add what one value is moved by, and its gradient."""
        self._products.append((moved * grad).sum(dtype=torch.float64))

    def of(self, moved: float, scale: float) -> float:
        """Return e.He of a loss that was moved so far, and whose gradients are scaled."""
        return 2 * (float(sum(p.cpu() for p in self._products)) / scale - moved)


class Rounded(torch.autograd.Function):
    """A value rounded at random in forward, unless that is left out, and its gradient in backward."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, low: torch.dtype, draws: torch.Generator, forward: bool, into: Curvature | None
    ) -> Tensor:
        """Round the value, or return a view of it."""
        ctx.low, ctx.draws, ctx.into = low, draws, into
        if not forward:
            return value.view_as(value)
        made = stochastic(value, low, draws)
        if into is not None:
            ctx.save_for_backward((made - value).nan_to_num_(0.0, 0.0, 0.0))  # infinity of a mask moves nothing
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Round the gradient."""
        for moved in ctx.saved_tensors:
            ctx.into.add(moved, grad)
        return stochastic(grad, ctx.low, ctx.draws), None, None, None, None


def rounded(
    value: Tensor, low: torch.dtype, generator: torch.Generator, *, forward: bool = True, into: Curvature | None = None
) -> Tensor:
    """Return a value rounded at random, whose gradient is rounded at random in backward, and adds to a curvature."""
    if into is not None and forward and not value.requires_grad:
        value = value.detach().requires_grad_()
    made: Tensor = Rounded.apply(value, low, generator, forward, into)  # type: ignore[no-untyped-call]
    return made
