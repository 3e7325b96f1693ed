"""LossScaler: `torch.amp.GradScaler` with floor, ceiling, hysteresis, an abort that names its culprit, and a history.

With every extension off, which is the default, it is GradScaler bit for bit: the same scales, the same skipped steps,
the same errors and the same number of host synchronisations. Only the settings are checked more strictly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from numbers import Integral, Real
from typing import Any, NamedTuple, cast

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from passes.errors import PolicyError, ScaleCollapseError

LOW_DTYPES = (torch.float16, torch.bfloat16)
HISTORY_LENGTH = 128

# Between these a scale and its reciprocal are both finite FP32 numbers.
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-127, torch.finfo(torch.float32).max
_LARGEST_COUNT = 2**31 - 1  # what `torch._amp_update_scale_` counts with


class ScaleEvent(NamedTuple):
    """One `update()`: the loss scale its gradients were made with, and whether an optimizer step was skipped."""

    update: int
    scale: float
    skipped: bool


class LossScaler(torch.amp.GradScaler):
    """Scale losses as `torch.amp.GradScaler` does, with guards that it lacks.

    Args:
        device: Device type of the losses. None takes that of the first loss scaled.
        init_scale: As in GradScaler.
        growth_factor: As in GradScaler.
        backoff_factor: As in GradScaler.
        growth_interval: As in GradScaler.
        enabled: As in GradScaler.
        dynamic: False keeps the scale at `init_scale`. Steps with gradients that are not finite are still skipped,
            and `update(new_scale)` still sets the scale by hand.
        min_scale: The scale never falls below it.
        max_scale: The scale never rises above it.
        hysteresis: The scale backs off at the k-th overflow in a row and at every further one of the same row; one
            step without overflow starts the count anew. This is Apex's `update_scale_hysteresis`, and DeepSpeed's
            `hysteresis` with `consecutive_hysteresis: true` (its default, and Megatron's rule, refill the count only
            when the scale grows). The growth tracker restarts at every overflow, as there.
        max_skips: Raise `ScaleCollapseError` at the K-th update in a row in which a step was skipped, and at every
            further one of the same row. The scaler is in a consistent state when it does.

    `hysteresis` and `max_skips` need to know on the host whether a step was skipped. GradScaler reads that for ordinary
    optimizers anyway; for fused ones, which decide on the device, each update then costs one synchronisation.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        dynamic: bool = True,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        max_skips: int | None = None,
    ) -> None:
        require_scale("init_scale", init_scale)
        _require_growth_factor(growth_factor)
        _require_backoff_factor(backoff_factor)
        require_count("growth_interval", growth_interval)
        extensions = _Extensions(dynamic, min_scale, max_scale, hysteresis, max_skips).check()
        if extensions.clamp(init_scale) != init_scale:
            raise PolicyError(
                f"init_scale must lie between min_scale={min_scale} and max_scale={max_scale}, got {init_scale!r}"
            )
        # None stays None until the first loss is seen; GradScaler only compares the name.
        super().__init__(
            cast(str, _device_type(device)), init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._extensions = extensions
        self._overflows_in_a_row = 0
        self._updates = 0
        self._events: deque[_Event] = deque(maxlen=HISTORY_LENGTH)
        self._names: Any = WeakIdKeyDictionary()

    @property
    def history(self) -> tuple[ScaleEvent, ...]:
        """The last updates, oldest first. Reading it synchronises with the device, recording does not."""
        return tuple(event.read() for event in self._events)

    def name_parameters(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Give parameters the names that errors call them by, as `model.named_parameters()` lists them.

        Not needed for an optimizer that was itself given named parameters.
        """
        self._names.update((param, name) for name, param in named_parameters)

    def found_inf(self, optimizer: Optimizer) -> bool:
        """Tell whether `optimizer`'s gradients were not finite, between `unscale_` or `step` and `update`.

        After `step` of an ordinary optimizer the answer is known; otherwise it is read from the device, once.
        """
        state = self._per_optimizer_states.get(id(optimizer)) if self._enabled else None
        return state is not None and _overflowed(state)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale, once, as GradScaler does.

        Raises:
            PolicyError: A trainable parameter is float16 or bfloat16.
        """
        if self._enabled:
            # GradScaler's own words come first: people search for them.
            refuse_low_parameters(self._describe(optimizer), "Attempting to unscale {kind} gradients: ")
        super().unscale_(optimizer)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale as GradScaler does, within the bounds that were set.

        Raises:
            ScaleCollapseError: This was the `max_skips`-th update in a row in which a step was skipped.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("update")
        before = scale.clone()
        states = list(self._per_optimizer_states.values())
        limits = self._extensions
        counted = limits.hysteresis > 1 or limits.max_skips is not None
        skipped = counted and any(_overflowed(state) for state in states)

        super().update(new_scale)

        self._overflows_in_a_row = self._overflows_in_a_row + 1 if skipped else 0
        if new_scale is None and (not limits.dynamic or 0 < self._overflows_in_a_row < limits.hysteresis):
            scale.copy_(before)
        if limits.min_scale is not None or limits.max_scale is not None:
            scale.clamp_(limits.min_scale, limits.max_scale)
        self._updates += 1
        self._events.append(_Event(self._updates, before, _found_infs(states)))
        if skipped and limits.max_skips is not None and self._overflows_in_a_row >= limits.max_skips:
            raise ScaleCollapseError(self._collapse_message(states))

    def set_growth_factor(self, new_factor: float) -> None:
        """Set a new growth factor, checked as at construction."""
        _require_growth_factor(new_factor)
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set a new backoff factor, checked as at construction."""
        _require_backoff_factor(new_factor)
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set a new growth interval, checked as at construction."""
        require_count("growth_interval", new_interval)
        super().set_growth_interval(new_interval)

    def state_dict(self) -> dict[str, Any]:
        """Return GradScaler's state, with the extensions under the key "fxamp". A GradScaler can load it."""
        state = super().state_dict()
        if self._enabled:
            state["fxamp"] = {**self._extensions._asdict(), "overflows_in_a_row": self._overflows_in_a_row}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a LossScaler or of a GradScaler.

        As GradScaler's settings do, the saved extensions replace the present ones; a GradScaler's state, which has
        none, leaves them. The scale is brought within the bounds.
        """
        if not self._enabled:
            return
        saved = state_dict.get("fxamp", {})
        extensions = self._extensions._replace(**{k: saved[k] for k in _Extensions._fields if k in saved}).check()
        super().load_state_dict(state_dict)
        self._extensions = extensions
        self._overflows_in_a_row = saved.get("overflows_in_a_row", 0)
        self._init_scale = extensions.clamp(self._init_scale)
        if self._scale is not None:
            self._scale.fill_(self._init_scale)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # Plain numbers in place of tensors; and names go by the identity of objects that a copy does not have.
        state["_events"] = deque((_Event(*event) for event in self.history), maxlen=HISTORY_LENGTH)
        del state["_names"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._names = WeakIdKeyDictionary()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if cast("str | None", self._device) is None:
            self._device = dev.type
        super()._lazy_init_scale_growth_tracker(dev)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        # GradScaler knows its optimizers by id only. This is the one place all of them pass.
        self._per_optimizer_states[id(optimizer)]["optimizer"] = optimizer
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        # GradScaler's own, but it remembers what it read.
        return None if _overflowed(optimizer_state) else optimizer.step(*args, **kwargs)

    def _forget_step(self) -> None:
        """Forget what was unscaled and stepped since the last update, for a step that failed half way."""
        if self._enabled:
            self._per_optimizer_states.clear()

    def _describe(self, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        """List the parameters of `optimizer`, each with the best name there is."""
        for group_index, group in enumerate(optimizer.param_groups):
            names = group.get("param_names")
            for index, param in enumerate(group["params"]):
                place = f"parameter {index} of group {group_index} (shape {tuple(param.shape)})"
                yield self._names.get(param) or (names[index] if names else place), param

    def _collapse_message(self, states: Sequence[dict[str, Any]]) -> str:
        optimizers = [state["optimizer"] for state in states if _found_infs([state])]
        gradients = ((name, p.grad) for o in optimizers for name, p in self._describe(o) if p.grad is not None)
        bad = [(name, kind) for name, grad in gradients if (kind := not_finite(grad))]
        shown = ", ".join(f"{name} ({kind})" for name, kind in bad[:3]) or "unknown, their gradients are gone already"
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        if any("NaN" in kind for _, kind in bad):
            hint = "A NaN seldom comes from the loss scale: look for bad data, 0/0 or log(0) in the model and the loss."
        else:
            hint = "An inf that stays while the scale falls is an overflow in the model: keep that part of it in FP32."
        return (
            f"{self._overflows_in_a_row} steps in a row were skipped, because gradients were not finite; "
            f"the loss scale is now {self.get_scale()}. First bad parameters: {shown}{more}. {hint}"
        )


class _Extensions(NamedTuple):
    """The settings that GradScaler does not have."""

    dynamic: bool
    min_scale: float | None
    max_scale: float | None
    hysteresis: int
    max_skips: int | None

    def check(self) -> _Extensions:
        if not isinstance(self.dynamic, bool):
            raise PolicyError(f"dynamic must be True or False, got {self.dynamic!r}")
        if self.min_scale is not None:
            require_scale("min_scale", self.min_scale)
        if self.max_scale is not None:
            require_scale("max_scale", self.max_scale)
        if self.min_scale is not None and self.max_scale is not None and self.min_scale > self.max_scale:
            raise PolicyError(f"min_scale must be at most max_scale={self.max_scale!r}, got {self.min_scale!r}")
        require_count("hysteresis", self.hysteresis)
        if self.max_skips is not None:
            require_count("max_skips", self.max_skips)
        return self

    def clamp(self, scale: float) -> float:
        if self.min_scale is not None and scale < self.min_scale:
            return self.min_scale
        if self.max_scale is not None and scale > self.max_scale:
            return self.max_scale
        return scale


class _Event(NamedTuple):
    """A `ScaleEvent` whose numbers may still be on the device, so that recording it does not wait for them."""

    update: int
    scale: float | torch.Tensor
    found_infs: bool | list[torch.Tensor]

    def read(self) -> ScaleEvent:
        found = self.found_infs
        skipped = found if isinstance(found, bool) else any(t.item() for t in found)
        return ScaleEvent(self.update, float(self.scale), skipped)


def refuse_low_parameters(named_parameters: Iterable[tuple[str, torch.Tensor]], opening: str = "") -> None:
    """Refuse trainable float16 and bfloat16 parameters, in which small updates vanish.

    Raises:
        PolicyError: There is one. The first three are named; `opening` begins the message, with {kind} filled in.
    """
    trainable_low = ((name, p) for name, p in named_parameters if p.requires_grad and p.dtype in LOW_DTYPES)
    found = list(islice(trainable_low, 3))
    if not found:
        return
    kind = "FP16" if found[0][1].dtype == torch.float16 else "BF16"
    listing = ", ".join(f"{name} ({str(param.dtype).removeprefix('torch.')})" for name, param in found)
    raise PolicyError(
        f"{opening.format(kind=kind)}trainable parameters have a low dtype, first {listing}. Updates below its "
        "resolution vanish. Keep them in float32 (model.float(), before the optimizer is built), "
        "or freeze them with requires_grad_(False)."
    )


def not_finite(grad: torch.Tensor) -> str:
    """Say what is wrong with a gradient: "inf", "NaN", both, or nothing."""
    values = grad.coalesce().values() if grad.is_sparse else grad
    kinds = {"inf": torch.isinf(values), "NaN": torch.isnan(values)}
    return " and ".join(kind for kind, where in kinds.items() if bool(where.any()))


def require_number(name: str, value: object, legal: str, test: Callable[[float], bool]) -> None:
    """Raise a PolicyError unless `value` is a real number, not a bool, that passes `test`; NaN passes no comparison."""
    if isinstance(value, bool) or not isinstance(value, Real) or not test(float(value)):
        raise PolicyError(f"{name} must be {legal}, got {value!r}")


def require_scale(name: str, value: object) -> None:
    """Raise a PolicyError unless `value` can be a loss scale."""
    legal = "a number from 2**-127 to 3.4e38, so that it and its reciprocal are finite in float32"
    require_number(name, value, legal, lambda x: _SMALLEST_SCALE <= x <= _LARGEST_SCALE)


def require_count(name: str, value: object) -> None:
    """Raise a PolicyError unless `value` is a positive int."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= _LARGEST_COUNT:
        raise PolicyError(f"{name} must be an int from 1 to {_LARGEST_COUNT}, got {value!r}")


def _require_growth_factor(value: object) -> None:
    legal = "a finite number greater than 1 (dynamic=False keeps the scale as it is)"
    require_number("growth_factor", value, legal, lambda x: 1 < x < float("inf"))


def _require_backoff_factor(value: object) -> None:
    legal = "a number between 0 and 1, both excluded (dynamic=False keeps the scale as it is)"
    require_number("backoff_factor", value, legal, lambda x: 0 < x < 1)


def _device_type(device: str | torch.device | None) -> str | None:
    if device is None:
        return None
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise PolicyError(f'device must be a device type such as "cuda" or "cpu", or None, got {device!r}') from error


def _found_infs(states: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    return [found for state in states for found in state["found_inf_per_device"].values()]


def _overflowed(state: dict[str, Any]) -> bool:
    """Read found_inf of one optimizer from its devices, the first time only."""
    found = state["found_inf_per_device"]
    if found and "overflowed" not in state:
        state["overflowed"] = bool(sum(value.item() for value in found.values()))
    return cast(bool, state.get("overflowed", False))
