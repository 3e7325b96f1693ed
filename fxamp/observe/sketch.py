"""What is kept of a tensor to compare another with it: of a large one sums, at a hundredth of its memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from passes.graph.values import LOW_DTYPES

from .tensors import same

ROWS, COLUMNS = 256, 256  # a part of a tensor, of which COLUMNS sums are kept
LARGE = 2**14  # elements from which a tensor is not kept whole


class Sketch:
    """Sums of a large tensor, over rows of 256 elements, in parts of 256 rows.

    Low values count as FP32.

    Attributes:
        dtype, shape: those of the tensor.
        bits: sums of the elements' bits times random odd factors, modulo 2^64, [parts, 256], int64. Tensors that
            differ have equal ones with a chance below 2^-32.
        sums: sums of the elements with random signs, [parts, 256], float64: a count sketch (Charikar, Chen and
            Farach-Colton 2002). The norm of a difference of two is that of the tensors' difference, to some 9 %, and
            exactly that of a difference within one row.
    """

    def __init__(self, value: Tensor) -> None:
        draw = torch.Generator().manual_seed(0)
        factors, signs = (torch.randint(-(2**62), 2**62, (ROWS, 1), generator=draw) for _ in range(2))
        factors, signs = (2 * factors + 1).to(value.device), (signs.sign() | 1).to(value.device, torch.float64)
        self.shape, self.dtype = value.shape, torch.float32 if value.dtype in LOW_DTYPES else value.dtype
        bits, sums = [], []
        value = torch.view_as_real(value) if value.is_complex() else value
        for rows in value.split(max(1, ROWS * COLUMNS * len(value) // value.numel())):  # a copy is small, if it is one
            for part in rows.reshape(-1).split(ROWS * COLUMNS):
                part = torch.nn.functional.pad(part, (0, -len(part) % COLUMNS)).view(-1, COLUMNS)
                bits.append((_bits(part) * factors[: len(part)]).sum(0))
                sums.append((part.double() * signs[: len(part)]).sum(0))
        self.bits, self.sums = torch.stack(bits), torch.stack(sums)


def _bits(value: Tensor) -> Tensor:
    """Return the bits of elements as integers: equal ones of equal elements, of zeros and of NaN too."""
    if not value.is_floating_point():
        return value.long()
    wide = value.double() if value.dtype == torch.float64 else value.float()
    alike = torch.where(wide.isnan(), torch.nan, wide + 0.0)
    return alike.view(torch.int64 if wide.dtype == torch.float64 else torch.int32).long()


def sketch(value: Tensor) -> Tensor | Sketch:
    """Return what is kept of a tensor: a large one's sums, or its values in memory of their own, low ones in FP32."""
    value = value.detach()
    plain = type(value) is Tensor and value.layout is torch.strided and not value.is_quantized and not value.is_meta
    if plain and value.numel() > LARGE:
        return Sketch(value)
    return value.float() if value.dtype in LOW_DTYPES else value.clone()


def equal(a: Any, b: Any) -> bool:
    """Say whether two tensors of which this was kept are the same, bit for bit, NaN where NaN is."""
    if isinstance(a, Sketch) and isinstance(b, Sketch):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.bits, b.bits)
    return isinstance(a, Tensor) and isinstance(b, Tensor) and same(a, b)


def norm(kept: Tensor | Sketch) -> float:
    """Return the Euclidean norm of a tensor of which this was kept."""
    return float((kept.sums if isinstance(kept, Sketch) else _wide(kept)).norm())


def distance(a: Any, b: Any) -> float:
    """Return the norm of the difference of two tensors of which this was kept; inf if their shapes differ."""
    if getattr(a, "shape", None) != getattr(b, "shape", None) or type(a) is not type(b):
        return float("inf")
    if isinstance(a, Sketch):
        return float((a.sums - b.sums).norm())
    return float((_wide(a) - _wide(b)).norm())


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)
