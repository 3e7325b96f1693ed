"""Layer norm whose gradients of gain and bias are summed in FP32, where the kernel of a device sums them in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .._torch import in_transform


def layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalise x, and apply gain and bias by a kernel that takes them in FP32 beside 16 bits, and sums so.

    Batch norm does, given a mean of 0 and a variance of 1: it is the only op that neither widens x nor casts the gain.

    Args:
        x: shape [*, *normalized_shape], in 16 bits; in FP32 this is `layer_norm` itself.
        normalized_shape: the trailing sizes to normalise over.
        weight: the gain, of that shape, in FP32; None for 1.
        bias: of that shape, in FP32; None for 0.
        eps: what is added to the variance.
    """
    # An FP32 norm sums in FP32 by itself; in a transform batch norm takes operands of one dtype alone.
    if x.dtype == torch.float32 or in_transform():
        return F.layer_norm(x, normalized_shape, weight, bias, eps)
    normal = F.layer_norm(x, normalized_shape, None, None, eps)
    gain, shift = (None if p is None else p.flatten() for p in (weight, bias))
    given = gain if gain is not None else shift
    assert given is not None  # or there is nothing to apply
    zeros, ones = torch.zeros_like(given), torch.ones_like(given)
    rows = normal.reshape(-1, given.numel())
    return torch.batch_norm(rows, gain, shift, zeros, ones, False, 0.0, 0.0, False).view(normal.shape)
