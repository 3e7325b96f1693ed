"""LossScaler: `torch.amp.GradScaler` with floor, ceiling, hysteresis, an error after many skipped steps, and a history.

With every extension off, which is the default, it is GradScaler bit for bit: the same scales, the same skipped steps
and the same number of host synchronisations. Only two checks are stricter: those of the settings, and that of
parameters, where trainable BF16 is refused as FP16 is.

What only the device knows stays there until it is asked for: counts, the history, and whose gradients were not finite.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from passes.contract.errors import PolicyError, public
from passes.graph.values import LOW_DTYPES

from .._torch import is_spread
from ..capture.parameters import require_fp32
from ..errors import ScaleCollapseError
from .ranks.ranks import agree, groups_of, local

HISTORY_LENGTH = 128
# Between these a scale and its reciprocal are both finite FP32 numbers.
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-127, torch.finfo(torch.float32).max
_LARGEST_COUNT = 2**31 - 1  # what `torch._amp_update_scale_` counts with


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


def _require_factor(name: str, value: object) -> None:
    grows, kept = name == "growth_factor", "(dynamic=False keeps the scale as it is)"
    legal = f"{'a finite number greater than 1' if grows else 'a number between 0 and 1, both excluded'} {kept}"
    require_number(name, value, legal, lambda x: 1 < x < float("inf") if grows else 0 < x < 1)


class _Extensions(NamedTuple):
    """The settings that GradScaler does not have."""

    dynamic: bool
    min_scale: float | None
    max_scale: float | None
    hysteresis: int
    max_skips: int | None

    def check(self) -> _Extensions:
        """Return self, or raise a PolicyError that names an invalid setting."""
        if not isinstance(self.dynamic, bool):
            raise PolicyError(f"dynamic must be True or False, got {self.dynamic!r}")
        for name in ("min_scale", "max_scale"):
            if getattr(self, name) is not None:
                require_scale(name, getattr(self, name))
        if self.min_scale is not None and self.max_scale is not None and self.min_scale > self.max_scale:
            raise PolicyError(f"min_scale must be at most max_scale={self.max_scale!r}, got {self.min_scale!r}")
        require_count("hysteresis", self.hysteresis)
        if self.max_skips is not None:
            require_count("max_skips", self.max_skips)
        return self

    def clamp(self, scale: float) -> float:
        """Bring a scale within the bounds."""
        scale = scale if self.min_scale is None else max(scale, self.min_scale)
        return scale if self.max_scale is None else min(scale, self.max_scale)


class Tally:
    """A count of updates whose flags may be on the device, where it then stays until it is read."""

    def __init__(self, known: int = 0, *, in_a_row: bool = False) -> None:
        self._count: int | torch.Tensor = known
        self._in_a_row = in_a_row  # it begins anew with each flag that is not set
        self.at_most = known  # as far as the host knows

    def add(self, flag: bool | torch.Tensor) -> None:
        """Count one more update if the flag is set: a bool, or a tensor of one element, which is 0 or 1."""
        before = self._count
        self.at_most += 1
        if isinstance(flag, torch.Tensor):  # each op is a kernel of its own
            one = flag.view(()).float()
            if not isinstance(before, torch.Tensor):
                self._count = one * (before + 1) if self._in_a_row else one + before
            else:
                before = before.to(one.device)
                self._count = torch.addcmul(one, before, one) if self._in_a_row else before + one
        elif flag:
            self._count = before + 1
        elif self._in_a_row:
            self._count = self.at_most = 0

    def reaches(self, count: int) -> bool:
        """Say whether the count is that high; wait for the device only if there were so many updates."""
        return self.at_most >= count and self.read() >= count

    def read(self) -> int:
        """Return the count."""
        self._count = self.at_most = int(self._count)
        return self._count


class ScaleEvent(NamedTuple):
    """One `update()` of a loss scale.

    Attributes:
        update: Its number, from 1 on.
        scale: The loss scale that its gradients were made with.
        skipped: Whether an optimizer step was skipped.
        culprit: The first parameter whose gradient was not finite, and whether it was inf or NaN: "fc.weight (NaN)".
            "" where no step was skipped, and where a fused optimizer decided on the device.
    """

    update: int
    scale: float
    skipped: bool
    culprit: str = ""


class Culprits:
    """Flags on the device that say which gradients hold an inf or a NaN, on any rank that has a part of them."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        pairs = list(named)
        self._names, found = [name for name, _ in pairs], [gradient for _, gradient in pairs]
        parts = [gradient.coalesce().values() if gradient.is_sparse else local(gradient) for gradient in found]
        flags = [torch.stack((part.isinf().any(), part.isnan().any())).float() for part in parts]
        together = torch.stack([flag.to(flags[0].device) for flag in flags]) if flags else torch.zeros(0, 2)
        self._flags = agree(together, groups_of(found))

    def read(self) -> list[tuple[str, str]]:
        """Return (name, kind) for each gradient that is not finite; the kind is "inf", "NaN", or both."""
        kinds = {(1.0, 0.0): "inf", (0.0, 1.0): "NaN", (1.0, 1.0): "inf and NaN"}
        flags = zip(self._names, self._flags.tolist() if self._names else [], strict=True)
        return [(name, kinds[inf, nan]) for name, (inf, nan) in flags if inf or nan]

    def __str__(self) -> str:
        return next((f"{name} ({kind})" for name, kind in self.read()), "")


@public
class LossScaler(torch.amp.GradScaler):
    """Scale losses as `torch.amp.GradScaler` does, with safeguards that GradScaler lacks.

    Args:
        device: Device type of the losses. None takes that of the first loss scaled.
        init_scale: This one and the next four are as in GradScaler.
        dynamic: False keeps the scale at `init_scale`. Steps with gradients that are not finite are still skipped,
            and `update(new_scale)` still sets the scale by hand.
        min_scale: The scale never falls below it.
        max_scale: The scale never rises above it.
        hysteresis: The number of overflows in a row at which the scale backs off; it also backs off at every further
            overflow while the run lasts. A step without overflow restarts the count, and every overflow restarts the
            growth tracker. This is the rule of Apex (`update_scale_hysteresis`), and of DeepSpeed with
            `consecutive_hysteresis: true`. By DeepSpeed's default and in Megatron the count restarts only when the
            scale grows.
        max_skips: The number of updates in a row with a skipped step at which `ScaleCollapseError` is raised; it is
            also raised at every further such update while the run lasts. It leaves the scaler in a consistent state.

    With `hysteresis` the host has to know whether a step was skipped. For ordinary optimizers GradScaler reads that
    anyway. Fused optimizers decide on the device, so with them each update costs one synchronisation. `max_skips=n`
    costs one synchronisation in every n updates.

    Raises:
        PolicyError: A setting has an invalid value; the message says which values are valid.

    Example:
        >>> scaler = fxamp.LossScaler(init_scale=1024.0, min_scale=1.0, max_skips=20)
        >>> scaler.scale(nn.functional.cross_entropy(converted(x), y)).backward()
        >>> _ = scaler.step(optimizer)
        >>> scaler.update()
        >>> optimizer.zero_grad()
        >>> scaler.get_scale(), scaler.kind, scaler.max_skips
        (1024.0, 'dynamic', 20)
        >>> scaler.history
        (ScaleEvent(update=1, scale=1024.0, skipped=False, culprit=''),)
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
        _require_factor("growth_factor", growth_factor)
        _require_factor("backoff_factor", backoff_factor)
        require_count("growth_interval", growth_interval)
        extensions = _Extensions(dynamic, min_scale, max_scale, hysteresis, max_skips).check()
        if extensions.clamp(init_scale) != init_scale:
            raise PolicyError(
                f"init_scale must lie between min_scale={min_scale} and max_scale={max_scale}, got {init_scale!r}"
            )
        try:
            # None stays None until the first loss is seen; GradScaler only compares the name.
            kind = cast(str, None if device is None else torch.device(device).type)
        except (RuntimeError, TypeError) as error:
            raise PolicyError(
                f'device must be a device type such as "cuda" or "cpu", or None, got {device!r}'
            ) from error
        super().__init__(kind, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._extensions = extensions
        self._in_a_row = Tally(in_a_row=True)
        self._updates = 0
        # Number, scale, flags of optimizers and culprits of updates, as far as need be on the device.
        self._events: deque[tuple[int, float | torch.Tensor, Sequence[bool | torch.Tensor], str | Culprits]]
        self._events = deque(maxlen=HISTORY_LENGTH)
        self._names: Any = WeakIdKeyDictionary()

    def __repr__(self) -> str:
        how = {"none": "disabled", "static": "static"}.get(self.kind) or f"grows every {self._growth_interval} steps"
        return f"<fxamp LossScaler: {how}>"

    @property
    def kind(self) -> str:
        """How the scale moves: "none" (no loss scaling), "static" or "dynamic"."""
        return "none" if not self._enabled else "dynamic" if self._extensions.dynamic else "static"

    @property
    def max_skips(self) -> int | None:
        """The number of skipped updates in a row at which `ScaleCollapseError` is raised, None if it never is."""
        return self._extensions.max_skips if self._enabled else None

    @property
    def history(self) -> tuple[ScaleEvent, ...]:
        """The last updates, oldest first. Reading this list waits for the device; recording it does not."""
        return tuple(
            ScaleEvent(update, float(scale), any(map(bool, flags)), str(culprits))
            for update, scale, flags, culprits in self._events
        )

    def name_parameters(self, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Set the names that errors give to parameters, as pairs such as those of `model.named_parameters()`.

        Parameters have any shape. You need not call this for an optimizer that was built from named parameters.

        Example:
            >>> fxamp.LossScaler().name_parameters(model.named_parameters())
        """
        self._names.update((param, name) for name, param in named_parameters)

    def grad(
        self, loss: torch.Tensor, inputs: torch.Tensor | Sequence[torch.Tensor], *, create_graph: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Scale a loss, differentiate it, and return unscaled gradients, for example for a gradient penalty.

        Args:
            loss: A tensor of one element, not scaled.
            inputs: The tensors to differentiate with respect to, of any shape.
            create_graph: True if the gradients are to be differentiated again, as in `torch.autograd.grad`.

        Returns:
            The unscaled gradients, of the inputs' shapes, as `torch.autograd.grad` gives them. Gradients in 16 bits are
            returned in FP32, since without the scale they may be too small for FP16.

        Example:
            >>> scaler = fxamp.LossScaler()
            >>> loss = nn.functional.cross_entropy(converted(x), y)
            >>> gradients = scaler.grad(loss, list(model.parameters()), create_graph=True)
            >>> penalty = sum(g.square().sum() for g in gradients)
            >>> scaler.scale(loss + 0.1 * penalty).backward()
            >>> optimizer.zero_grad()
        """
        found = torch.autograd.grad(self.scale(loss), inputs, create_graph=create_graph)
        if not self._enabled or self._scale is None:
            return found
        inverse = inverse_scale(self)
        return tuple(g.to(torch.promote_types(g.dtype, torch.float32)) * inverse.to(g.device) for g in found)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale, once, as GradScaler does.

        Raises:
            PolicyError: A trainable parameter is float16 or bfloat16.

        Example:
            >>> scaler = fxamp.LossScaler()
            >>> scaler.scale(nn.functional.cross_entropy(converted(x), y)).backward()
            >>> scaler.unscale_(optimizer)  # so that they can be clipped
            >>> norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            >>> optimizer.zero_grad()
        """
        if self._enabled and not {p.dtype for g in optimizer.param_groups for p in g["params"]}.isdisjoint(LOW_DTYPES):
            # GradScaler's own words come first: people search for them.
            require_fp32(self._describe(optimizer), "Attempting to unscale {kind} gradients: ")
        super().unscale_(optimizer)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale as GradScaler does, within the bounds that were set.

        Args:
            new_scale: The scale from now on: a number, or an FP32 tensor of one element that needs no gradient.

        Raises:
            ScaleCollapseError: This was the `max_skips`-th update in a row in which a step was skipped.

        Example:
            >>> scaler = fxamp.LossScaler(max_scale=256.0, init_scale=256.0)
            >>> _ = scaler.scale(torch.ones(()))
            >>> scaler.update(512.0)
            >>> scaler.get_scale()
            256.0
        """
        looked_at = update_scale(self, new_scale)
        if self.max_skips is not None and self._in_a_row.reaches(self.max_skips):
            raise collapsed(
                self._in_a_row, named_gradients(self, looked_at), f"; the loss scale is now {self.get_scale()}"
            )

    def set_growth_factor(self, new_factor: float) -> None:
        """Set a new growth factor.

        Raises:
            PolicyError: It is not a finite number greater than 1.

        Example:
            >>> fxamp.LossScaler().set_growth_factor(1.5)
        """
        _require_factor("growth_factor", new_factor)
        super().set_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set a new backoff factor.

        Raises:
            PolicyError: It is not a number between 0 and 1.

        Example:
            >>> fxamp.LossScaler().set_backoff_factor(0.25)
        """
        _require_factor("backoff_factor", new_factor)
        super().set_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set a new growth interval, in updates.

        Raises:
            PolicyError: It is not a positive int.

        Example:
            >>> fxamp.LossScaler().set_growth_interval(100)
        """
        require_count("growth_interval", new_interval)
        super().set_growth_interval(new_interval)

    def state_dict(self) -> dict[str, Any]:
        """Return GradScaler's state, with the extensions under the key "fxamp". A GradScaler can load it.

        Example:
            >>> torch.amp.GradScaler("cpu").load_state_dict(fxamp.LossScaler().state_dict())
        """
        state = super().state_dict()
        if self._enabled:
            skipped = {"overflows_in_a_row": self._in_a_row.read(), "updates": self._updates}
            state["fxamp"] = {**self._extensions._asdict(), **skipped}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a LossScaler or of a GradScaler.

        Saved extensions replace the present ones, as saved settings of a GradScaler do. The state of a GradScaler has
        no extensions, so the present ones stay. The scale is clamped to `min_scale` and `max_scale`.

        Raises:
            PolicyError: A saved extension cannot be used.

        Example:
            >>> scaler = fxamp.LossScaler(max_scale=1024.0, init_scale=1.0)
            >>> scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
            >>> scaler.get_scale()
            1024.0
        """
        if not self._enabled:
            return
        saved = state_dict.get("fxamp", {})
        extensions = self._extensions._replace(**{k: saved[k] for k in _Extensions._fields if k in saved}).check()
        super().load_state_dict(state_dict)
        self._extensions = extensions
        self._in_a_row = Tally(saved.get("overflows_in_a_row", 0), in_a_row=True)
        self._updates = saved.get("updates", self._updates)
        known = [event for event in self._events if event[0] <= self._updates]
        self._events = deque(known, maxlen=HISTORY_LENGTH)
        self._init_scale = extensions.clamp(self._init_scale)
        if self._scale is not None:
            self._scale.fill_(self._init_scale)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # Tensors become plain numbers. Names are left out: they belong to parameters, which a copy does not have.
        state["_events"] = deque(((e.update, e.scale, [e.skipped], e.culprit) for e in self.history), HISTORY_LENGTH)
        state["_in_a_row"] = Tally(self._in_a_row.read(), in_a_row=True)
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
        # GradScaler keeps only the id of an optimizer. Every optimizer passes through here, so it is noted here.
        self._per_optimizer_states[id(optimizer)]["optimizer"] = optimizer
        kinds = {type(p): p for group in optimizer.param_groups for p in group["params"]}
        if not any(map(is_spread, kinds.values())):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # torch handles gradients of one mesh only, and asks other ranks only if the first gradient is sharded. It looks
        # at nothing but the gradients of parameters, so that their parts on this rank may stand in for these.
        gradients = [gradient for _, gradient in named_gradients(self, [optimizer])]
        parts = list(map(local, gradients))
        stand_ins = [part.detach() for part in parts]
        for stand_in, part in zip(stand_ins, parts, strict=True):
            stand_in.grad = part
        group: Any = SimpleNamespace(param_groups=[{"params": stand_ins}])
        found = super()._unscale_grads_(group, inv_scale, found_inf, allow_fp16)
        return {device: agree(flag, groups_of(gradients)) for device, flag in found.items()}

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        # As GradScaler does it, but the flag is read once and remembered.
        return None if _overflowed(optimizer_state) else optimizer.step(*args, **kwargs)

    def _describe(self, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        for group_index, group in enumerate(optimizer.param_groups):
            names = group.get("param_names")
            for index, param in enumerate(group["params"]):
                if not (name := self._names.get(param) or (names[index] if names else "")):
                    name = f"parameter {index} of group {group_index} (shape {tuple(param.shape)})"
                yield name, param


# What a TrainStep asks of a scaler between unscaling and update.


def is_held_back(scaler: LossScaler, optimizer: Optimizer) -> bool | torch.Tensor:
    """Say whether a gradient was not finite, after `unscale_` or `step`: if only the device knows, by a tensor."""
    state = scaler._per_optimizer_states.get(id(optimizer)) if scaler._enabled else None
    if state is None or "overflowed" in state:
        return state is not None and _overflowed(state)
    return _together(_found_infs([state]))


def unscaled_found_inf(scaler: LossScaler, optimizer: Optimizer) -> torch.Tensor:
    """Unscale the gradients of `optimizer`, once; return a tensor of shape () that is 0 where all are finite."""
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    return torch.as_tensor(is_held_back(scaler, optimizer))


def inverse_scale(scaler: LossScaler) -> torch.Tensor:
    """Return the factor that unscales gradients, as GradScaler computes it: an FP32 tensor of shape ()."""
    if scaler._scale is None:
        raise PolicyError("no loss was scaled yet: call scaler.scale(loss) first")
    return scaler._scale.double().reciprocal().float()


def note_step(scaler: LossScaler, optimizer: Optimizer, held_back: bool | torch.Tensor) -> None:
    """Record whether the step of an optimizer was skipped that was not made by `step`: a bool, or one element."""
    if scaler._enabled:
        state = scaler._per_optimizer_states[id(optimizer)]
        if isinstance(held_back, bool):
            state["overflowed"] = held_back
        device = None if scaler._scale is None else scaler._scale.device
        found = torch.as_tensor(held_back, dtype=torch.float32, device=device).view(())
        state.update(optimizer=optimizer, found_inf_per_device={found.device: found})


def found_infs_of(scaler: LossScaler, optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """Return a flag of one element for each optimizer and device: 1 if an unscaled gradient is not finite."""
    return _found_infs([scaler._per_optimizer_states[id(o)] for o in optimizers]) if scaler._enabled else []


def join_found_infs(scaler: LossScaler, optimizers: Sequence[Optimizer], also: Sequence[torch.Tensor] = ()) -> None:
    """Make all of these optimizers, whose gradients are unscaled, skip their step if one has to, or a flag says."""
    founds = found_infs_of(scaler, optimizers)
    together = _together([*founds, *also])
    for found in founds:
        found.copy_(together)


def update_scale(scaler: LossScaler, new_scale: float | torch.Tensor | None = None) -> list[Optimizer]:
    """Update the scale, leave the limit of skipped steps to the caller, and return the optimizers looked at."""
    if not scaler._enabled:
        return []
    scale, _ = scaler._check_scale_growth_tracker("update")
    before, limits, states = scale.clone(), scaler._extensions, list(scaler._per_optimizer_states.values())
    found_infs = [found.clone() for found in _found_infs(states)]  # torch accumulates the flags in the first tensor
    # Skips are counted where a setting needs their number, or where the flags were read already.
    if limits.hysteresis > 1 or all("overflowed" in state for state in states):
        scaler._in_a_row.add(any(_overflowed(state) for state in states))
    elif limits.max_skips is not None and found_infs:
        scaler._in_a_row.add(_together(found_infs))

    torch.amp.GradScaler.update(scaler, new_scale)

    waits = limits.hysteresis > 1 and 0 < scaler._in_a_row.read() < limits.hysteresis
    if new_scale is None and (waits or not limits.dynamic):
        scale.copy_(before)
    if limits.min_scale is not None or limits.max_scale is not None:
        scale.clamp_(limits.min_scale, limits.max_scale)
    scaler._updates += 1
    bad = [state["optimizer"] for state in states if state.get("overflowed")]
    culprits = Culprits(named_gradients(scaler, bad)) if bad else ""
    scaler._events.append((scaler._updates, before, found_infs, culprits))
    return [state["optimizer"] for state in states if _found_infs([state])]


def forget_step(scaler: LossScaler) -> None:
    """Forget what was unscaled and stepped since the last update, after a step that failed halfway."""
    if scaler._enabled:
        scaler._per_optimizer_states.clear()


def named_gradients(scaler: LossScaler, optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the gradients that there are, each with the name of its parameter."""
    return ((name, p.grad) for o in optimizers for name, p in scaler._describe(o) if p.grad is not None)


def scale_of(scaler: LossScaler) -> float | torch.Tensor:
    """Return the loss scale, where it is: on the device a copy, which no update changes."""
    scale = scaler._scale if scaler.is_enabled() else None
    return scaler.get_scale() if scale is None else scale.clone()


def collapsed(skips: Tally, named: Iterable[tuple[str, torch.Tensor]], more: str = "") -> ScaleCollapseError:
    """Return the error of so many skipped steps in a row, with the first gradients that are not finite, and a hint."""
    bad = Culprits(named).read()
    shown = ", ".join(f"{name} ({kind})" for name, kind in bad[:3]) or "unknown: their gradients are gone already"
    shown += f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    if any("NaN" in kind for _, kind in bad):
        hint = "A NaN seldom comes from the loss scale: look for bad data, 0/0 or log(0) in the model and the loss."
    else:
        hint = "An inf that stays while the scale falls is an overflow in the model: keep that part of it in FP32."
    return ScaleCollapseError(
        f"{skips.read()} steps in a row were skipped, because gradients were not finite{more}. First bad parameters: "
        f"{shown}. {hint}"
    )


def _found_infs(states: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    return [found for state in states for found in state["found_inf_per_device"].values()]


def _together(found_infs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a new tensor that is 1 where one of these flags is: fused optimizers compare with 1."""
    together = found_infs[0].clone()
    for found in found_infs[1:]:
        together = torch.maximum(together, found.to(together.device))
    return together


def _overflowed(state: dict[str, Any]) -> bool:
    found = state["found_inf_per_device"]
    if found and "overflowed" not in state:  # read from its devices the first time only
        state["overflowed"] = bool(sum(value.item() for value in found.values()))
    return cast(bool, state.get("overflowed", False))
