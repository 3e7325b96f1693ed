"""The end of a window, in the order that is right: unscale, clip the unscaled, step or hold back, update the scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..scale.scaler import LossScaler
from .conditional import can_be_taken_back, gradients, holds_inf_or_nan, is_fused, parameters, step_where_finite
from .result import HeldBack


class Update(NamedTuple):
    """What became of the optimizers that had gradients, and the norm of those where it was asked for."""

    held_back: dict[Optimizer, HeldBack]
    grad_norm: Tensor | None


def multiply(optimizers: Sequence[Optimizer], factor: float | Tensor) -> None:
    """Multiply all gradients, before they are unscaled, so that the check for inf sees the outcome."""
    with torch.no_grad():
        for gradient in gradients(optimizers):
            gradient.mul_(factor)


def take_step(
    scaler: LossScaler,
    optimizers: Sequence[Optimizer],
    max_grad_norm: float | None,
    nothing_kept: Tensor | None = None,
    overflow: Tensor | None = None,
) -> Update:
    """Let optimizers step, and update the scale.

    With `max_grad_norm`, one gradient that is not finite holds every optimizer back: there is no norm to clip to.

    Args:
        scaler: Of the window; its scale is in the gradients.
        optimizers: Those that have gradients.
        max_grad_norm: To which the gradients of all together are clipped; None does not even measure them.
        nothing_kept: Not 0, on the device, where the gradients are of nothing.
        overflow: Not 0, on the device, where the scale backs off though the optimizers may step.
    """
    grad_norm, found_inf = None, nothing_kept
    if max_grad_norm is not None:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if scaler.is_enabled():
            scaler.join_found_inf(optimizers)
        else:
            found_inf = holds_inf_or_nan(gradients(optimizers))
        grad_norm = clip([p for optimizer in optimizers for p in parameters(optimizer)], max_grad_norm)
    held_back: dict[Optimizer, HeldBack] = {}
    for optimizer in optimizers:
        if scaler.is_enabled():
            held_back[optimizer] = _step_scaled(scaler, optimizer)
        elif found_inf is not None:
            held_back[optimizer] = step_where_finite(optimizer, found_inf)
        else:
            optimizer.step()
            held_back[optimizer] = False
    scaler.update_after(overflow)
    return Update(held_back, grad_norm)


def _step_scaled(scaler: LossScaler, optimizer: Optimizer) -> HeldBack:
    if not is_fused(optimizer) and can_be_taken_back(optimizer):
        return step_where_finite(optimizer, scaler.unscaled_found_inf(optimizer))
    scaler.step(optimizer)
    return scaler.held_back(optimizer)


def clip(params: Sequence[Tensor], max_norm: float) -> Tensor:
    """Clip the gradients to `max_norm` and give the norm that they had."""
    if math.isinf(max_norm):  # measure only: inf/inf would make every gradient a NaN
        return nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    return nn.utils.clip_grad_norm_(params, max_norm)
