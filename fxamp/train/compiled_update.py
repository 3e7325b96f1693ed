"""The end of a window as one graph: gradients of 16 or 32 bits in; weights, states and low copies of weights written.

Finite checks and the norm are computed before it, since reductions would split its kernel: it gets the factors by which
gradients are unscaled and clipped, and the flag that holds an optimizer back, as tensors of shape (). Learning rates
are tensors too, so that a schedule compiles nothing anew. Other numbers are constants of the graph.

A fused optimizer keeps torch's own kernel, unless a compiled update is asked for. Optimizers with hooks on their step,
which a graph would not show, are not compiled, nor is the first step, which makes an optimizer's state.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._torch import add_together, global_optimizer_hooks
from ..view.leaves import Leaves, stepped_outside
from .compiler import CompileSettings, NotTraced, Traced
from .ranks.ranks import total_norm
from .result import HeldBack
from .scaler import inverse_scale, note_step, update_scale
from .update import AtEnd, Update, clip_factor, found_infs, has_state, is_fused, step_or_restore, take_step
from .window import holds_inf_or_nan, parameters

Compiled = Literal["compiled"]


class CompiledUpdate:
    """Steps optimizers with compiled code, which reads gradients of low copies of weights, and writes the copies."""

    def __init__(self, settings: CompileSettings, leaves: Leaves, asked: Compiled | None = None) -> None:
        if settings.backend == "inductor":  # whose scheduler fails on some foreach kernels that it reorders for a GPU
            settings = replace(settings, options={"loop_ordering_after_fusion": False, **settings.options})
        self.region, self.asked = Traced("unscale, clip and step", settings), asked
        self.eager = ""  # why the last window ran uncompiled
        self._leaves = leaves
        self._rates: dict[tuple[int, int], tuple[Any, Tensor]] = {}  # by optimizer and group: a number, and its tensor
        self._constants: list[dict[str, Any]] = []  # the numbers of each group that are constants of the graph
        self._changes = 0  # of these numbers

    def _why_not(self, end: AtEnd, ran: bool) -> str:
        region = self.region
        if end.on_gradients is not None:
            return "on_gradients looks at the gradients between unscaling and clipping"
        if global_optimizer_hooks(besides=stepped_outside):
            return "there are hooks on the steps of all optimizers"
        if end.ranks.spread or end.ranks.decide_apart:
            return "ranks agree on whether to step, between unscaling and stepping"
        if not region.settings.fuses:
            return f"'{region.settings.name}' makes no kernels, so nothing would be gained"
        if region.fallbacks:
            return region.fallbacks[-1]
        if not ran:
            return "torch.compile was disabled where the step was called"
        if reason := next(filter(None, (_unfit(o, self.asked) for o in end.optimizers)), ""):
            return reason
        if name := self._changing(end.optimizers):
            region.fallbacks.append(f"'{name}' changes from step to step, so that every step would compile again")
            return region.fallbacks[-1]
        return "" if all(has_state(o, self.stepped(o)) for o in end.optimizers) else _NO_STATE

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

    def stepped(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the weights of an optimizer that have gradients, or whose low copies have."""
        params = parameters(optimizer)
        low = self._leaves.of_masters(params)
        return [
            p for p, copies in zip(params, low, strict=True)
            if p.grad is not None or any(copy.grad is not None for copy in copies)
        ]  # fmt: skip

    def __call__(self, end: AtEnd, ran: bool) -> Update:
        """Let optimizers step, and update the scale; uncompiled for a reason, such as that no graph `ran` before."""
        self.eager = self._why_not(end, ran)
        if self.eager:
            return self._eagerly(end)
        if end.max_grad_norm is not None:
            self._leaves.arrive(where_both=True)  # the norm is that of sums
        work = [_Work.of(o, self.stepped(o), self._leaves) for o in end.optimizers]
        founds, norm, factors = _look(end, work)
        stepping = [(each, found) for each, found in zip(work, founds, strict=True) if found is not True]
        try:
            steps = [self._step(i, each, factors, found) for i, (each, found) in enumerate(stepping)]
        except NotTraced as reason:
            self.eager = str(reason)
            return self._eagerly(end)
        end.begins()
        for step, (each, _) in zip(steps, stepping, strict=True):
            step()
            self._leaves.note_written(each.params)
        held_back: dict[Optimizer, HeldBack] = {
            each.optimizer: False if found is None else found for each, found in zip(work, founds, strict=True)
        }
        if any(held is True for held in held_back.values()):
            self._leaves.arrive()  # for who names the gradient
        for optimizer, held in held_back.items():
            note_step(end.scaler, optimizer, held)  # type: ignore[arg-type]
            optimizer._opt_called = True  # type: ignore[attr-defined]  # which a scheduler asks for
        update_scale(end.scaler)
        return Update(held_back, norm)

    def _eagerly(self, end: AtEnd) -> Update:
        """Move gradients to the weights and step; where nothing changes them, they are looked at in 16 bits before."""
        flags, changed = None, end.max_grad_norm is not None or end.on_gradients is not None
        if end.check_finite and not (changed or end.scaler.is_enabled() or end.ranks.decide_apart):
            self._leaves.arrive(where_both=True)
            flags = found_infs(end, [self._gradients(optimizer) for optimizer in end.optimizers])
        self._leaves.arrive()
        return take_step(end, flags)

    def _gradients(self, optimizer: Optimizer) -> list[Tensor]:
        params = parameters(optimizer)
        places = [*params, *(copy for copies in self._leaves.of_masters(params) for copy in copies)]
        return [p.grad for p in places if p.grad is not None]

    def add(self, to: list[Tensor], gradients: list[Tensor]) -> None:
        """Add gradients of 16 bits to others, in one kernel where the backend makes kernels."""

        def added(*tensors: Tensor) -> tuple[()]:
            for total, gradient in zip(tensors[: len(to)], tensors[len(to) :], strict=True):
                total.add_(gradient)
            return ()

        form = ("add", *((*_kind(total)[1:], gradient.dtype) for total, gradient in zip(to, gradients, strict=True)))
        try:
            if not self.region.settings.fuses or self.region.fallbacks:
                raise NotTraced
            self.region.graph_of(form, [added], [*to, *gradients])()
        except NotTraced:
            add_together(to, gradients)

    def _step(
        self, index: int, work: _Work, factors: Sequence[Tensor], held: bool | Tensor | None
    ) -> Callable[[], object]:
        rates = [self._rate(index, group, g) for group, g in enumerate(work.optimizer.param_groups) if "lr" in g]
        inputs = _Inputs(
            work.params, work.full, work.low, work.copies, work.states(), rates, list(factors),
            [held] if isinstance(held, Tensor) else [],
        )  # fmt: skip
        form = (index, work.form, tuple(map(len, inputs)), _constants_of(work.optimizer))
        lengths = [len(each) for each in inputs]
        ways = [_Step(work, lengths, together) for together in (False, True)]
        return self.region.graph_of(form, ways, [t for each in inputs for t in each])

    def _rate(self, optimizer: int, index: int, group: dict[str, Any]) -> Tensor:
        rate = group["lr"]
        if isinstance(rate, Tensor):
            return rate
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        known = self._rates.get((optimizer, index))
        if known is None or known[0] != rate or known[1].device != device:
            tensor = torch.empty((), device=device) if known is None or known[1].device != device else known[1]
            known = self._rates[optimizer, index] = rate, tensor.fill_(rate)
        return known[1]


_NO_STATE = "the optimizer has no state before its first step"


class _Inputs(NamedTuple):
    """What the graph of an update takes, in order. What it writes are weights, copies and states."""

    params: list[Tensor]
    full: list[Tensor]
    low: list[Tensor]
    copies: list[Tensor]
    states: list[Tensor]
    rates: list[Tensor]
    factors: list[Tensor]
    held: list[Tensor]


@dataclass(frozen=True)
class _Work:
    """The step of one optimizer: the weights that have gradients, with these."""

    optimizer: Optimizer
    params: list[Tensor]
    full: list[Tensor]  # the gradients at the weights
    low: list[Tensor]  # those of their low copies
    copies: list[Tensor]  # the low copies of these weights
    has_full: tuple[bool, ...]  # which weights have a gradient of their own,
    lows: tuple[int, ...]  # how many each has of low copies,
    copied: tuple[int, ...]  # and how many of these

    @classmethod
    def of(cls, optimizer: Optimizer, params: list[Tensor], leaves: Leaves) -> _Work:
        copies = leaves.of_masters(params)
        low = [[copy.grad for copy in each if copy.grad is not None] for each in copies]
        return cls(
            optimizer, params, [p.grad for p in params if p.grad is not None], [g for each in low for g in each],
            [copy for each in copies for copy in each], tuple(p.grad is not None for p in params),
            tuple(map(len, low)), tuple(map(len, copies)),
        )  # fmt: skip

    @property
    def form(self) -> tuple[Any, ...]:
        """What a graph of it depends on, but for the numbers of its groups."""
        return (
            *map(_kind, self.params), self.has_full, self.lows, self.copied,
            *(t.dtype for t in (*self.low, *self.copies)),
        )  # fmt: skip

    def states(self) -> list[Tensor]:
        """Return the tensors of its state; those that count steps are moved to the device of their weights."""
        found = []
        for p in self.params:
            state = self.optimizer.state.get(p, {})
            for name, value in state.items():
                if isinstance(value, Tensor):
                    if value.device != p.device:  # as torch.compile does
                        state[name] = value.to(p.device)
                    found.append(state[name])
        return found


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return id(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _constants_of(optimizer: Optimizer) -> tuple[Any, ...]:
    kinds = (int, float, tuple, type(None))
    return tuple(
        (*map(id, g["params"]), *((k, v) for k, v in g.items() if isinstance(v, kinds) and k != "lr"))
        for g in optimizer.param_groups
    )


class _Step:
    """The function that is traced: one optimizer's step, over tensors in the place of its weights and states."""

    # It takes all weights `together`, or as the optimizer does; some of these take the rate as a number then.

    def __init__(self, work: _Work, lengths: Sequence[int], together: bool) -> None:
        self._work, self._lengths, self._together = work, lengths, together

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        work, rest = self._work, iter(tensors)
        t = _Inputs(*([next(rest) for _ in range(length)] for length in self._lengths))
        for p, gradient in zip(t.params, self._gradients(t), strict=True):
            p.grad = gradient
        step = functools.partial(inspect.unwrap(type(work.optimizer).step), work.optimizer)
        with _swapped(work, t, self._together):
            if t.held:
                step_or_restore(step, [*t.params, *t.states], t.held[0])
            else:
                step()
        copies = iter(t.copies)
        for p, count in zip(t.params, work.copied, strict=True):
            for _ in range(count):
                next(copies).copy_(p)
        return ()

    def _gradients(self, t: _Inputs) -> Iterator[Tensor]:
        full, low = iter(t.full), iter(t.low)
        for p, has_full, count in zip(t.params, self._work.has_full, self._work.lows, strict=True):
            parts = [next(full) for _ in range(has_full)] + [next(low).to(p.dtype) for _ in range(count)]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            for factor in t.factors:
                total = total * factor.to(total.device)
            yield total.clone() if total is parts[0] and has_full else total


@contextlib.contextmanager
def _swapped(work: _Work, t: _Inputs, together: bool) -> Iterator[None]:
    """Inside, an optimizer has other tensors in the place of weights, states and learning rates."""
    optimizer: Any = work.optimizer
    place = {id(p): i for i, p in enumerate(work.params)}
    rates, states = iter(t.rates), iter(t.states)
    groups = [
        {
            **group, **({"lr": next(rates)} if "lr" in group else {}), **_how(group, together),
            "params": [t.params[place[id(p)]] for p in group["params"] if id(p) in place],
        }
        for group in optimizer.param_groups
    ]  # fmt: skip
    state: dict[Tensor, Any] = defaultdict(dict)
    for p, traced in zip(work.params, t.params, strict=True):
        known = optimizer.state.get(p, {})
        state[traced] = {k: next(states) if isinstance(v, Tensor) else v for k, v in known.items()}
    numbers = {p: _numbers(of_p) for p, of_p in state.items()}
    before = optimizer.param_groups, optimizer.state
    optimizer.param_groups, optimizer.state = groups, state
    try:
        yield
    finally:
        optimizer.param_groups, optimizer.state = before
    if any(_numbers(of_p) != numbers.get(p) for p, of_p in state.items()):
        name = type(optimizer).__name__
        raise NotTraced(f"{name} counts in Python numbers, which a graph would keep as they are")


def _how(group: dict[str, Any], together: bool) -> dict[str, Any]:
    """Return the settings of a group under which a step can be traced: as on an accelerator, whatever the device."""
    foreach = group.get("foreach")
    if foreach is None:
        foreach = all(p.device.type != "cpu" for p in group["params"])  # as torch's default is
    how = {"capturable": True, "fused": False, "foreach": foreach or together or bool(group.get("fused"))}
    return {key: value for key, value in how.items() if key in group}


def _numbers(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not isinstance(value, Tensor)}


def _look(end: AtEnd, work: Sequence[_Work]) -> tuple[list[bool | Tensor | None], Tensor | None, list[Tensor]]:
    """Return for each optimizer whether it is held back, the norm of all gradients, and the factors of gradients."""
    inverse = inverse_scale(end.scaler) if end.scaler.is_enabled() else None
    factors, norm = [] if inverse is None else [inverse], None
    founds: list[Any] = [None] * len(work)
    if end.max_grad_norm is not None:
        gradients = [g for each in work for g in (*each.full, *each.low)]
        founds = [holds_inf_or_nan(gradients)] * len(work)
        norm = total_norm(gradients)
        norm = norm if inverse is None else norm * inverse.to(norm.device)
        if (factor := clip_factor(end.max_grad_norm, norm)) is not None:
            factors.append(factor)
    elif inverse is not None or end.check_finite:
        founds = [holds_inf_or_nan(each.full + each.low) for each in work]
    if (nothing := end.nothing_kept) is not None:
        founds = [nothing if found is None else torch.maximum(found, nothing.to(found)) for found in founds]
    return [bool(f) if isinstance(f, Tensor) and f.device.type == "cpu" else f for f in founds], norm, factors


def _unfit(optimizer: Optimizer, asked: Compiled | None) -> str:
    """Return why the step of an optimizer is not compiled: what a graph would leave out, for example; "" if it may."""
    name, own = type(optimizer).__name__, vars(optimizer).get("step")
    if is_fused(optimizer) and asked is None:
        return f"{name} is fused"
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    reasons: dict[str, Callable[[], Any]] = {
        "is not an optimizer of torch.optim": lambda: not type(optimizer).step.__module__.startswith("torch.optim."),
        "has a step() of its own": lambda: own is not None and not hasattr(own, "_wrapped_by_lr_sched"),
        "has hooks on its step": lambda: any(getattr(optimizer, hook, None) for hook in hooks),
        "is differentiable": lambda: any(group.get("differentiable") for group in optimizer.param_groups),
        "has sparse gradients": lambda: any(p.grad is not None and p.grad.is_sparse for p in parameters(optimizer)),
    }
    return next((f"{name} {reason}" for reason, holds in reasons.items() if holds()), "")
