"""The end of a window, in the right order: unscale, clip, step or skip, update the scale."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..ranks.ranks import Ranks
from ..ranks.shards import is_spread, local, total_norm
from ..scale.scaler import LossScaler
from .conditional import can_be_taken_back, gradients, holds_inf_or_nan, is_fused, parameters, step_where_finite
from .on_the_way import begin
from .result import HeldBack


class Update(NamedTuple):
    """Which optimizers stepped, of those that had gradients, and the norm of the gradients if it was requested."""

    held_back: Mapping[Optimizer, HeldBack]
    grad_norm: Tensor | None


def take_step(
    scaler: LossScaler,
    optimizers: Sequence[Optimizer],
    max_grad_norm: float | None,
    ranks: Ranks,
    nothing_kept: Tensor | None = None,
    overflow: Tensor | None = None,
    *,
    followed: bool = False,
) -> Update:
    """Let optimizers step, and update the scale.

    With `max_grad_norm`, one gradient that is not finite holds every optimizer back: there is no norm to clip to.

    Args:
        scaler: Loss scaler of the window; its scale is in the gradients.
        optimizers: Those that have gradients.
        max_grad_norm: The norm to which all gradients together are clipped; None neither clips nor measures.
        ranks: The ranks that have to agree on the flags.
        nothing_kept: Not 0, on the device, if every micro-batch was left out.
        overflow: Not 0, on the device, where the scale backs off though the optimizers may step.
        followed: Whether the host will ask which optimizers stepped. The answers are then sent there before the steps.
    """
    grad_norm, found_inf = None, nothing_kept
    if max_grad_norm is not None or ranks.decide_apart:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        ranks.agree(scaler.found_infs(optimizers))
    if max_grad_norm is not None:
        if scaler.is_enabled():
            scaler.join_found_inf(optimizers)
        else:
            found_inf = holds_inf_or_nan(gradients(optimizers))
            ranks.agree([found_inf])
        grad_norm = clip([p for optimizer in optimizers for p in parameters(optimizer)], max_grad_norm)
    held_back: dict[Optimizer, HeldBack] = {}
    begun = begin(found_inf) if followed and found_inf is not None else found_inf
    for optimizer in optimizers:
        if scaler.is_enabled():
            held_back[optimizer] = _step_scaled(scaler, optimizer, followed)
        elif found_inf is not None:
            held = step_where_finite(optimizer, found_inf)
            held_back[optimizer] = begun if held is found_inf else held  # type: ignore[assignment]
        else:
            optimizer.step()
            held_back[optimizer] = False
    scaler.update_after(overflow)
    return Update(held_back, grad_norm)


def _step_scaled(scaler: LossScaler, optimizer: Optimizer, followed: bool) -> HeldBack:
    begun: list[HeldBack] = []
    with contextlib.ExitStack() as stack:
        if followed:  # when the hook runs, the flag has been computed, and no kernel of the step launched
            hook = optimizer.register_step_pre_hook(lambda *_: begun.append(begin(scaler.held_back(optimizer))))
            stack.callback(hook.remove)
        if not is_fused(optimizer) and can_be_taken_back(optimizer):
            held = step_where_finite(optimizer, scaler.unscaled_found_inf(optimizer))
        else:
            scaler.step(optimizer)
            held = scaler.held_back(optimizer)
    return begun[0] if begun else held


def clip(params: Sequence[Tensor], max_norm: float) -> Tensor:
    """Clip the gradients to `max_norm`, and return their norm before clipping."""
    found = [p.grad for p in params if p.grad is not None]
    if not math.isinf(max_norm) and not any(map(is_spread, found)):
        return nn.utils.clip_grad_norm_(params, max_norm)
    norm = total_norm(found)
    if math.isinf(max_norm):  # only measured, not clipped: inf/inf would make every gradient NaN
        return norm
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as in torch, which takes only gradients of one mesh
    with torch.no_grad():
        for gradient in found:
            local(gradient).mul_(factor.to(gradient.device))
    return norm
