"""Step an optimizer if its gradients are finite, where possible without waiting for the device to say so.

A fused optimizer reads the flag on the device. An optimizer whose step can be undone on the device (a capturable one,
or SGD) steps first; then the old values are restored on the device if gradients were not finite. That costs a copy of
its parameters and state, and is done only on an accelerator, where reading the flag would make the host wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..ranks.shards import agree, groups_of, local


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def gradients(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the gradients that there are."""
    return [p.grad for optimizer in optimizers for p in parameters(optimizer) if p.grad is not None]


def holds_inf_or_nan(tensors: list[Tensor]) -> Tensor:
    """Return 1.0 on the device if any number is not finite, on any rank that has a part of them, else 0.0."""
    parts = [part for part in map(local, tensors) if part.numel()]
    found = (~nn.utils.get_total_norm(parts, float("inf")).isfinite()).float()
    return agree(found, groups_of(tensors))


def is_fused(optimizer: Optimizer) -> bool:
    """Say whether an optimizer takes the loss scale and found_inf itself, on the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def has_state(optimizer: Optimizer) -> bool:
    """Say whether a step creates no state, because the state exists or the optimizer has none."""
    if type(optimizer) is SGD and not any(group["momentum"] for group in optimizer.param_groups):
        return True
    return all(bool(optimizer.state.get(p)) for p in parameters(optimizer) if p.grad is not None)


def can_be_taken_back(optimizer: Optimizer) -> bool:
    """Say whether a step can be undone: everything that it changes exists before and is on an accelerator."""
    if not _changes_the_device_alone(optimizer) or not has_state(optimizer):
        return False
    return not any(gradient.is_sparse for gradient in gradients([optimizer]))


def waits(optimizer: Optimizer) -> bool:
    """Say whether, from its second step on, this optimizer needs the host to know whether gradients are finite."""
    return not is_fused(optimizer) and not _changes_the_device_alone(optimizer)


def _changes_the_device_alone(optimizer: Optimizer) -> bool:
    """Say whether neither parameters nor state are on the host, where a counter of steps is by default."""
    if type(optimizer) is not SGD and not all(group.get("capturable") for group in optimizer.param_groups):
        return False
    return all(p.device.type != "cpu" for p in parameters(optimizer))


def step_where_finite(optimizer: Optimizer, found_inf: Tensor) -> bool | Tensor:
    """Step an optimizer whose gradients are unscaled.

    Args:
        optimizer: What to step.
        found_inf: A tensor of one element, not 0 where a gradient is not finite.

    Returns:
        Whether the optimizer was held back; `found_inf` itself if it was not read.
    """
    if is_fused(optimizer):
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
        return found_inf
    if can_be_taken_back(optimizer):
        step_and_take_back(optimizer, found_inf)
        return found_inf
    if found_inf.item():
        return True
    optimizer.step()
    return False


@torch.no_grad()
def step_and_take_back(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Step, and undo the step if `found_inf` is not 0. The optimizer's whole state must exist already."""
    live = [p for p in parameters(optimizer) if p.grad is not None]
    before = {p: p.clone() for p in live}
    states = {p: {k: v.clone() for k, v in optimizer.state[p].items() if isinstance(v, Tensor)} for p in live}
    optimizer.step()
    for p in live:
        _put_back(p, before[p], found_inf)
        state: dict[str, Any] = optimizer.state[p]
        for key, old in states[p].items():
            _put_back(state[key], old, found_inf)


def _put_back(now: Tensor, before: Tensor, found_inf: Tensor) -> None:
    now.copy_(torch.where(found_inf.to(now.device) != 0, before, now))
