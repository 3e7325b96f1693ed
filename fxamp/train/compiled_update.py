"""The end of a window as one compiled graph: unscale, look for inf and NaN, clip, step, put back what overflowed.

Fused optimizers do most of that in kernels of their own, and are not compiled. Neither are optimizers with hooks on
their step, which a graph would not show, and optimizers without state yet, whose first step makes it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._torch import dynamo_errors, global_optimizer_hooks
from .compiler import CompileSettings, Region
from .ranks.ranks import total_norm
from .result import HeldBack
from .scaler import inverse_scale, note_step, update_scale
from .update import AtEnd, Update, clip, has_state, is_fused, state_of, step_or_restore, take_step
from .window import gradients, live


class CompiledUpdate:
    """Steps optimizers with compiled code; `eager` says why the last window ran uncompiled, "" if it did not."""

    def __init__(self, settings: CompileSettings) -> None:
        if settings.backend == "inductor":  # whose scheduler fails on some foreach kernels that it reorders for a GPU
            settings = replace(settings, options={"loop_ordering_after_fusion": False, **settings.options})
        self.region = Region("unscale, clip and step", update_region, settings, fullgraph=True)
        self.eager = ""
        self._rates: dict[int, Tensor] = {}  # by group
        self._constants: list[dict[str, Any]] = []  # the numbers of each group that are constants of the graph
        self._changes = 0  # of these numbers

    def _why_not(self, end: AtEnd) -> str:
        region = self.region
        if end.on_gradients is not None:
            return "on_gradients looks at the gradients between unscaling and clipping"
        if global_optimizer_hooks():
            return "there are hooks on the steps of all optimizers"
        if end.ranks.spread or end.ranks.decide_apart:
            return "ranks agree on whether to step, between unscaling and stepping"
        if not region.settings.fuses:
            return f"'{region.settings.name}' makes no kernels, so nothing would be gained"
        if region.fallbacks:
            return region.fallbacks[-1]
        if reason := next(filter(None, map(_unfit, end.optimizers)), ""):
            return reason
        if name := self._changing(end.optimizers):
            region.fallbacks.append(f"'{name}' changes from step to step, so that every step would compile again")
            return region.fallbacks[-1]
        return "" if all(map(has_state, end.optimizers)) else "the optimizer has no state before its first step"

    def _changing(self, optimizers: Sequence[Optimizer]) -> str:
        """Return which number that is a constant of the graph has changed for the second time, "" where none has."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        now = [{k: v for k, v in group.items() if k != "lr" and isinstance(v, (float, tuple))} for group in groups]
        before, self._constants = self._constants, now
        if len(before) != len(now):
            return ""
        changed = [key for old, new in zip(before, now, strict=True) for key in new if old.get(key) != new[key]]
        self._changes += bool(changed)
        return changed[0] if changed and self._changes > 1 else ""

    @contextlib.contextmanager
    def _rates_as_tensors(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Inside, each group's learning rate is a tensor: a new rate from a scheduler causes no recompilation.

        Together with `foreach`, which compiles to few kernels, only `capturable` optimizers accept a tensor.
        """
        groups = [group for optimizer in optimizers for group in optimizer.param_groups if group["params"]]
        before: list[dict[str, Any]] = [{k: group[k] for k in ("lr", "capturable") if k in group} for group in groups]
        for index, (group, own) in enumerate(zip(groups, before, strict=True)):
            rate, device = own.get("lr"), group["params"][0].device
            if isinstance(rate, (int, float)):
                if index not in self._rates or self._rates[index].device != device:
                    self._rates[index] = torch.empty((), dtype=torch.float32, device=device)
                made = self._rates[index].fill_(rate)
                group.update({key: made if key == "lr" else True for key in own})
        try:
            yield
        finally:
            for group, own in zip(groups, before, strict=True):
                group.update(own)

    def __call__(self, end: AtEnd) -> Update:
        """Let optimizers step, and update the scale: uncompiled, as `take_step` does, where `eager` then says why."""
        self.eager = self._why_not(end)
        if self.eager:
            return take_step(end)
        optimizers, scaler = end.optimizers, end.scaler
        stepped = [live([o]) for o in optimizers]
        states = [state_of(o) for o in optimizers]
        inverse = inverse_scale(scaler) if scaler.is_enabled() else None
        end.begins()
        try:
            with self._rates_as_tensors(optimizers), torch.no_grad():
                founds, norm = self.region(
                    optimizers, stepped, states, inverse, end.nothing_kept, end.max_grad_norm, end.check_finite
                )
        except _NotCompiled:
            self.eager = "torch.compile was disabled where the step was called"
            return take_step(end)
        except (dynamo_errors().TorchDynamoException, dynamo_errors().FailOnRecompileLimitHit) as error:
            if self.region.failed:
                raise
            # The region is one graph (fullgraph=True): when compiling fails, nothing of it has run.
            self.eager = str(error).strip().partition("\n")[0]
            self.region.fallbacks.append(self.eager)
            return take_step(end)
        if self.region.settings.captures:  # the next replay of the CUDA graph overwrites them
            founds = [None if found is None else found.clone() for found in founds]
            norm = None if norm is None else norm.clone()
        held_back: dict[Optimizer, HeldBack] = {}
        for optimizer, found in zip(optimizers, founds, strict=True):
            # On a CPU the flag is read at once, so that the scaler can name the parameter.
            held = False if found is None else bool(found) if found.device.type == "cpu" else found
            held_back[optimizer] = held
            note_step(scaler, optimizer, held)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # which a scheduler asks for
        update_scale(scaler)
        return Update(held_back, norm)


def update_region(
    optimizers: Sequence[Optimizer],
    stepped: Sequence[Sequence[Tensor]],
    states: Sequence[Sequence[Tensor]],
    inverse: Tensor | None,
    nothing_kept: Tensor | None,
    max_grad_norm: float | None,
    check_finite: bool,
) -> tuple[list[Tensor | None], Tensor | None]:
    """Unscale, clip and step the optimizers that have gradients; `torch.compile` compiles this.

    `stepped` and `states` are the parameters and the tensors of state of each, `inverse` is 1 / loss scale. Return a
    flag for each, not 0 if it is held back, or None without a check; and the norm before clipping.
    """
    if not torch.compiler.is_compiling():
        raise _NotCompiled
    founds: list[Tensor | None] = [nothing_kept for _ in optimizers]
    norm = None
    for index, params in enumerate(stepped):
        found = [p.grad for p in params if p.grad is not None]
        if inverse is not None or (check_finite and max_grad_norm is None):
            bad = _not_finite(found)
            founds[index] = bad if inverse is not None or nothing_kept is None else torch.maximum(bad, nothing_kept)
        if inverse is not None:
            for gradient in found:
                gradient.mul_(inverse.to(gradient.device))
    if max_grad_norm is not None:
        together = [p for params in stepped for p in params]
        founds = [_not_finite([p.grad for p in together if p.grad is not None])] * len(optimizers)
        norm = total_norm([p.grad for p in together if p.grad is not None])
        clip(together, max_grad_norm, norm)
    for optimizer, params, state, held in zip(optimizers, stepped, states, founds, strict=True):
        # Without torch's wrappers: hooks, a profiler mark, and a graph break.
        step = functools.partial(inspect.unwrap(type(optimizer).step), optimizer)
        if held is None:
            step()
        else:
            step_or_restore(step, [*params, *state], held)
    return founds, norm


class _NotCompiled(Exception):  # noqa: N818 - no error: nobody but CompiledUpdate sees it
    """Raised where torch would run the function uncompiled (`set_stance`, or a mode), before anything has run."""


def _not_finite(found: list[Tensor]) -> Tensor:
    # Compiled, this takes a twentieth of the time of the inf-norm on a CPU.
    return (~torch.stack([gradient.isfinite().all().to(found[0].device) for gradient in found]).all()).float()


def _unfit(optimizer: Optimizer) -> str:
    """Return why the step of an optimizer is not compiled: what a graph would leave out, for example; "" if it may."""
    name, own = type(optimizer).__name__, vars(optimizer).get("step")
    if is_fused(optimizer):
        return f"{name} is fused"
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    reasons = {
        "is not an optimizer of torch.optim": not type(optimizer).step.__module__.startswith("torch.optim."),
        "has a step() of its own": own is not None and not hasattr(own, "_wrapped_by_lr_sched"),
        "has hooks on its step": any(getattr(optimizer, hook, None) for hook in hooks),
        "is differentiable": any(group.get("differentiable") for group in optimizer.param_groups),
        "has sparse gradients": any(gradient.is_sparse for gradient in gradients([optimizer])),
    }
    return next((f"{name} {reason}" for reason, holds in reasons.items() if holds), "")
