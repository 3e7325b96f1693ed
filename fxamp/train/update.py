"""The end of a window, in the right order: unscale, look at gradients, clip, step or skip, update the scale.

An optimizer steps if its gradients are finite, where possible without waiting for the device to say so. A fused
optimizer reads the flag on the device. One whose step can be undone there (a capturable one, or SGD) steps first; then
the old values are restored on the device if gradients were not finite. That costs a copy of its parameters and state,
and is done only on an accelerator, where reading the flag would make the host wait.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from .._torch import is_spread
from .ranks.ranks import Ranks, local, total_norm
from .result import HeldBack, HostFlag, to_host
from .scaler import (
    LossScaler,
    forget_step,
    found_infs_of,
    is_held_back,
    join_found_infs,
    note_step,
    unscaled_found_inf,
    update_scale,
)
from .window import gradients, holds_inf_or_nan, live, parameters


class Update(NamedTuple):
    """Which optimizers stepped, of those that had gradients, and the norm of the gradients if it was requested."""

    held_back: Mapping[Optimizer, HeldBack]
    grad_norm: Tensor | None = None


Flags = list[bool | Tensor | None]  # for each optimizer whether it is held back, on the device or known here


class AtEnd(NamedTuple):
    """What the end of a window needs; options are those of the step."""

    scaler: LossScaler
    optimizers: Sequence[Optimizer]  # those that have gradients, with the scaler's scale in them
    max_grad_norm: float | None
    ranks: Ranks
    nothing_kept: Tensor | None  # a flag on the device, nonzero if every weight of a micro-batch was 0
    on_gradients: Callable[[list[Tensor]], Any] | None
    followed: bool  # the host will ask which steps were taken: the answers are sent there before the steps
    check_finite: bool
    begins: Callable[[], object]  # called when nothing but the steps themselves is left to do


def take_step(end: AtEnd, flags: Flags | None = None) -> Update:
    """Let optimizers step, and update the scale; `flags` are what `found_infs` gave, where it was called before."""
    scaler, ranks, followed, grad_norm = end.scaler, end.ranks, end.followed, None
    founds: Flags = [end.nothing_kept] * len(end.optimizers)
    if end.max_grad_norm is not None or end.on_gradients is not None or ranks.decide_apart:
        for optimizer in end.optimizers:
            scaler.unscale_(optimizer)
        ranks.agree(found_infs_of(scaler, end.optimizers))
    if end.on_gradients is not None:
        end.on_gradients(live(end.optimizers))
    if end.max_grad_norm is not None:  # one gradient that is not finite holds every optimizer back
        grad_norm = total_norm(gradients(end.optimizers))
        if scaler.is_enabled():
            # The scaler looked at gradients before they could be changed.
            changed = [] if end.on_gradients is None else [holds_inf_or_nan(gradients(end.optimizers))]
            ranks.agree(changed)
            join_found_infs(scaler, end.optimizers, changed)
        else:
            founds = [_found_inf(end, grad_norm)] * len(founds)
        clip(live(end.optimizers), end.max_grad_norm, grad_norm)
    elif end.check_finite and not scaler.is_enabled():
        founds = found_infs(end, [gradients([o]) for o in end.optimizers]) if flags is None else flags
    held_back: dict[Optimizer, HeldBack] = {}
    begun = [to_host(found) if followed and isinstance(found, Tensor) else found for found in founds]
    end.begins()
    for optimizer, found, sent in zip(end.optimizers, founds, begun, strict=True):
        if scaler.is_enabled():
            held_back[optimizer] = _step_scaled(scaler, optimizer, followed)
        elif found is not None:
            held = step_where_finite(optimizer, found)
            held_back[optimizer] = sent if held is found else held  # type: ignore[assignment]
        else:
            optimizer.step()
            held_back[optimizer] = False
    update_scale(scaler)
    return Update(held_back, grad_norm)


def _found_inf(end: AtEnd, norm: Tensor) -> bool | Tensor:
    """Say whether a gradient is not finite: on the device, or where Python decides from their norm, with one read."""
    read = _is_on_host(norm) or any(waits(o) or _begins_undefined(o) for o in end.optimizers)
    if read and end.nothing_kept is None and not end.ranks.decide_apart:
        return not bool(norm.isfinite()) and bool(holds_inf_or_nan(gradients(end.optimizers)))
    found = holds_inf_or_nan(gradients(end.optimizers))
    end.ranks.agree([found])
    return found if end.nothing_kept is None else torch.maximum(found, end.nothing_kept.to(found))


def found_infs(end: AtEnd, tensors: Sequence[list[Tensor]]) -> Flags:
    """Say for each optimizer whether gradients are not finite: on the device, or on a CPU, where a read is no wait."""
    founds = list(map(holds_inf_or_nan, tensors))
    end.ranks.agree(founds)
    if (nothing := end.nothing_kept) is not None:
        founds = [torch.maximum(found, nothing.to(found)) for found in founds]
    return [bool(found) if _is_on_host(found) else found for found in founds]


def clip_factor(max_norm: float, norm: Tensor) -> Tensor | None:
    """Return by what gradients of a norm are multiplied to clip them, as in torch; None where it is only measured."""
    return None if math.isinf(max_norm) else (max_norm / (norm + 1e-6)).clamp(max=1.0)  # inf/inf would be NaN


def clip(params: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Clip the gradients of parameters, whose norm together is given, to `max_norm`; infinity only measures."""
    if (factor := clip_factor(max_norm, norm)) is None:
        return
    found = [p.grad for p in params if p.grad is not None]
    if not any(map(is_spread, found)):
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return
    with torch.no_grad():  # torch takes only gradients of one mesh
        for gradient in found:
            local(gradient).mul_(factor.to(gradient.device))


def is_fused(optimizer: Optimizer) -> bool:
    """Say whether an optimizer takes the loss scale and found_inf itself, on the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def has_state(optimizer: Optimizer, stepped: Sequence[Tensor] | None = None) -> bool:
    """Say whether a step creates no state, because the state exists or the optimizer has none."""
    if type(optimizer) is SGD and not any(group["momentum"] for group in optimizer.param_groups):
        return True
    return all(bool(optimizer.state.get(p)) for p in (live([optimizer]) if stepped is None else stepped))


def _begins_undefined(optimizer: Optimizer) -> bool:
    # A first step that is skipped on the device leaves a state that nobody wrote: SGD's momentum.
    return is_fused(optimizer) and isinstance(optimizer, SGD) and not has_state(optimizer)


def is_undoable(optimizer: Optimizer) -> bool:
    """Say whether a step can be undone: everything that it changes exists before and is on an accelerator."""
    there = _keeps_state_on_device(optimizer) and has_state(optimizer)
    return there and not any(gradient.is_sparse for gradient in gradients([optimizer]))


def waits(optimizer: Optimizer) -> bool:
    """Say whether, from its second step on, this optimizer needs the host to know whether gradients are finite."""
    return not is_fused(optimizer) and not _keeps_state_on_device(optimizer)


def _keeps_state_on_device(optimizer: Optimizer) -> bool:
    counts_there = type(optimizer) is SGD or all(group.get("capturable") for group in optimizer.param_groups)
    return counts_there and not any(map(_is_on_host, parameters(optimizer)))


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _step_scaled(scaler: LossScaler, optimizer: Optimizer, followed: bool) -> HeldBack:
    begun: list[bool | Tensor | HostFlag] = []
    with contextlib.ExitStack() as stack:
        if followed:  # when the hook runs, the flag has been computed, and no kernel of the step launched
            hook = optimizer.register_step_pre_hook(lambda *_: begun.append(to_host(is_held_back(scaler, optimizer))))
            stack.callback(hook.remove)
        if is_undoable(optimizer) and not is_fused(optimizer):
            held: HeldBack = step_where_finite(optimizer, unscaled_found_inf(scaler, optimizer))
        elif _begins_undefined(optimizer) and bool(unscaled_found_inf(scaler, optimizer)):
            held = True  # its first step would make a state that holds nothing
            note_step(scaler, optimizer, held_back=True)
        else:
            scaler.step(optimizer)
            held = is_held_back(scaler, optimizer)
    return begun[0] if begun else held


def step_where_finite(optimizer: Optimizer, found_inf: bool | Tensor) -> bool | Tensor:
    """Step an optimizer unless an unscaled gradient is not finite; return whether, or the flag itself if not read."""
    if isinstance(found_inf, Tensor):
        if is_fused(optimizer) and not _begins_undefined(optimizer):
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
            return found_inf
        if is_undoable(optimizer):
            step_or_restore(optimizer.step, [*live([optimizer]), *state_of(optimizer)], found_inf)
            return found_inf
        found_inf = bool(found_inf)
    if not found_inf:
        optimizer.step()
    return found_inf


def state_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the state of the parameters that have gradients, as far as it is tensors."""
    values = (value for p in live([optimizer]) for value in optimizer.state.get(p, {}).values())
    return [value for value in values if isinstance(value, Tensor)]


@torch.no_grad()
def step_or_restore(step: Callable[[], object], changes: Sequence[Tensor], found_inf: Tensor) -> None:
    """Step, and undo what it `changes` if `found_inf` is not 0. An optimizer's whole state must exist already."""
    before = [tensor.clone() for tensor in changes]
    step()
    for now, then in zip(changes, before, strict=True):
        now.copy_(torch.where(found_inf.to(now.device) != 0, then, now))


def needs_closure(optimizer: Optimizer) -> bool:
    """Say whether the step() of an optimizer requires a closure, since it evaluates the loss itself, as LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def step_by_closure(
    optimizer: Optimizer, scaler: LossScaler, run: Callable[[], Tensor], ranks: Ranks, check_finite: bool,
    begins: Callable[[], object],
) -> bool:  # fmt: skip
    """Let an optimizer step that evaluates the loss itself, by `run`; return whether it was held back."""
    # With loss scaling, a gradient that is not finite takes back the whole step, whichever evaluation it comes from.
    # Without, only the first evaluation is looked at, when there is nothing to take back yet.
    undoes, evaluated = scaler.is_enabled(), False
    before = [p.detach().clone() for p in parameters(optimizer)] if undoes else []
    state = copy.deepcopy(optimizer.state_dict()) if undoes else {}

    def evaluate() -> Tensor:
        nonlocal evaluated
        optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = run()
        if undoes:
            forget_step(scaler)  # what another evaluation unscaled
            found = unscaled_found_inf(scaler, optimizer)
        else:
            looks = check_finite and not evaluated
            found = holds_inf_or_nan(gradients([optimizer])) if looks else torch.zeros(())
        ranks.agree([found])
        if found.item():
            raise _NotFinite
        if not evaluated:
            evaluated = True
            begins()
        return loss

    held_back = False
    try:
        optimizer.step(evaluate)  # type: ignore[arg-type]
    except _NotFinite:
        held_back = True
        if undoes:
            with torch.no_grad():
                for p, old in zip(parameters(optimizer), before, strict=True):
                    p.copy_(old)
            optimizer.load_state_dict(state)
    note_step(scaler, optimizer, held_back)
    return held_back


class _NotFinite(Exception):  # noqa: N818 - no error: it aborts a step, and nobody but `step_by_closure` sees it
    pass
