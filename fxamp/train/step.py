"""TrainStep: forward, scaled loss, backward, unscale, clip, step or skip, update, in the order that is right.

A *window* is the micro-batches whose gradients one optimizer step takes: `accumulate_steps` of them.

    step = TrainStep(fxamp.convert(model), F.cross_entropy, optimizer, accumulate_steps=4, max_grad_norm=1.0)
    for x, y in batches:
        result = step(x, y)
    step.flush()
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from passes.errors import CaptureError, NotAModuleError, PolicyError

from .. import compiled
from .events import not_finite
from .scaler import LossScaler
from .settings import refuse_low_parameters, require_count, require_number, require_scale
from .weights import Mode, WeightCasts

Reason = Literal["stepped", "accumulating", "overflow", "no_gradients"]


@dataclass(frozen=True, eq=False)
class StepResult:
    """What one call of a TrainStep did.

    Attributes:
        loss: The loss of this micro-batch as `loss_fn` gave it: undivided, unscaled, detached. `flush` gives that of
            the last micro-batch, NaN when there was none.
        stepped: Whether the optimizer stepped; one bool per optimizer when there are several.
        skipped: Whether gradients that were not finite held an optimizer back.
        scale: The loss scale of this window, 1.0 without loss scaling.
        grad_norm: The norm of the unscaled gradients before clipping, None where nothing is clipped.
        reason: "accumulating" within a window; at its end "overflow" if any optimizer was held back, "no_gradients" if
            none had gradients, else "stepped".
    """

    loss: torch.Tensor
    stepped: bool | tuple[bool, ...]
    skipped: bool
    scale: float
    grad_norm: torch.Tensor | None
    reason: Reason


class TrainStep:
    """Run one training step per call.

    As in a loop written by hand on `torch.amp.GradScaler`, and bit-equal to it: an optimizer whose gradients are not
    finite is skipped, the others step. Three outcomes are defined that such a loop leaves open:

    - An optimizer without gradients does not step.
    - With `max_grad_norm`, one gradient that is not finite skips every optimizer, since there is no norm to clip to.
      That holds without loss scaling too, at the cost of reading the norm from the device.
    - A call that raises abandons its window: gradients are set to None, and the next call opens a new one.

    Args:
        model: Called as it is: neither converted nor switched between train and eval.
        loss_fn: Called as `loss_fn(output, target)`, without a target as `loss_fn(output)`. None takes the output's
            own loss, `output.loss` or `output["loss"]`.
        optimizer: One or several, over distinct parameters.
        scaler: A LossScaler, which serves this TrainStep alone; a number for a static loss scale; None for no loss
            scaling; "auto" for `LossScaler(min_scale=1, max_scale=2**24, max_skips=20)` when the model was converted
            to FP16, else none; for a compiled model that is decided at its first call.
        accumulate_steps: Micro-batches in a window. The loss is divided by it.
        max_grad_norm: Clip the unscaled gradients of all optimizers to this norm, taken over all of them together.
            `float("inf")` measures the norm and clips nothing.
        scheduler: One or several, each of one of the optimizers; steps when its optimizer stepped.
        ema: Not yet supported.
        weights: "per_step" casts the weights that the graphs of a converted model read low once a window, and keeps
            those copies until its last backward. Gradients are those of "per_use", bit for bit, which casts at every
            call. A weight that is written to in a window, moved or replaced is cast anew; an edit through `.data` in a
            window is not seen before the next one. "auto" is "per_step" where a window has several micro-batches.
        on_overflow: Only "skip_window" yet.
        compile: Only False yet.

    Attributes:
        scaler: The LossScaler in use; a disabled one without loss scaling.
        weights: Which casts of weights are kept for a window.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., torch.Tensor] | None,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scaler: LossScaler | float | Literal["auto"] | None = "auto",
        accumulate_steps: int = 1,
        max_grad_norm: float | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        ema: object = None,
        weights: Mode = "auto",
        on_overflow: object = "skip_window",
        compile: object = False,
    ) -> None:
        _refuse_unsupported(
            ema=(ema, None),
            on_overflow=(on_overflow, "skip_window"),
            compile=(compile, False),
        )
        if not isinstance(model, nn.Module):
            raise NotAModuleError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if loss_fn is not None and not callable(loss_fn):
            raise PolicyError(f"loss_fn must be callable, or None for the output's .loss, got {loss_fn!r}")
        require_count("accumulate_steps", accumulate_steps)
        if max_grad_norm is not None:
            require_number("max_grad_norm", max_grad_norm, "a number greater than 0, or None", lambda x: x > 0)

        self.model = model
        self.loss_fn = loss_fn
        self.accumulate_steps = accumulate_steps
        self.max_grad_norm = max_grad_norm
        self.optimizers = _optimizers(optimizer, model)
        self.schedulers = _schedulers(scheduler, self.optimizers)
        self.weights = WeightCasts(model, weights, accumulate_steps)
        self._low_dtype = _low_dtype(model)
        self.scaler = _scaler(scaler, self._low_dtype)
        self.scaler.name_parameters(model.named_parameters())
        # A compiled model is converted at its first call; until then nobody knows to what.
        waits = any(compiled.is_compiled(module) for module in model.modules())
        self._undecided = isinstance(scaler, str) and self._low_dtype is None and waits
        self._state: Mapping[str, Any] | None = None  # loaded before that call
        self._warned = False

        self._position = 0  # micro-batches of the open window seen so far
        self._given_scale: float | None = None  # of the open window
        self._window_scaler = self.scaler
        self._window_scale: float | None = None  # read from the window's scaler, once
        self._loss: torch.Tensor | None = None  # of the last micro-batch of the open window

    def __call__(self, inputs: Any, target: Any = None, *, scale: float | None = None) -> StepResult:
        """Take one micro-batch; at the window's end, step the optimizers.

        Args:
            inputs: A tensor or a tuple for `model(*inputs)`, a mapping for `model(**inputs)`.
            target: The second argument of `loss_fn`.
            scale: The loss scale of this window, in place of the scaler's own. The scaler does not take part in such a
                window: its scale, its growth and its count of skipped steps stay as they are, whatever happens in it.
                Within a window leave it out or repeat it.

        Raises:
            PolicyError: An argument cannot be used.
            ScaleCollapseError: The scaler's `max_skips` steps in a row were skipped.
        """
        self._open_window(scale)
        try:
            with self.weights.in_use():
                loss = self._forward(inputs, target)
                if self._undecided:
                    self._decide()
                if loss.requires_grad:
                    self._window_scaler.scale(loss / self.accumulate_steps).backward()
        except BaseException:
            self._close_window()
            raise
        self._position += 1
        self._loss = loss.detach()
        if self._position < self.accumulate_steps:
            return self._result("accumulating", set())
        return self._finish_window()

    def flush(self) -> StepResult:
        """Step with the micro-batches of an unfinished window, as at the end of an epoch; without any, do nothing.

        Gradients are multiplied by `accumulate_steps / seen`, so that they are the mean over the micro-batches seen.
        """
        if self._position == 0:
            return self._result("no_gradients", set())
        return self._finish_window()

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state and the position in the window; not the model's nor the optimizers' states.

        Gradients are not in it. Save at the end of a window, or call `flush` first.
        """
        return {"scaler": self.scaler.state_dict(), "position": self._position, "given_scale": self._given_scale}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            PolicyError: It is not such a state, or was saved at a position that this window does not have.
        """
        missing = {"scaler", "position", "given_scale"} - set(state_dict)
        if missing:
            raise PolicyError(f"not the state of a TrainStep: it lacks {', '.join(sorted(missing))}")
        position = state_dict["position"]
        if not 0 <= position < self.accumulate_steps:
            raise PolicyError(
                f"the state was saved at micro-batch {position} of a window, and accumulate_steps is "
                f"{self.accumulate_steps}: use the former accumulate_steps, or save at the end of a window"
            )
        if self._undecided:
            self._state = state_dict["scaler"]
        else:
            self.scaler.load_state_dict(state_dict["scaler"])
        self._use_scale(state_dict["given_scale"])
        self._position = position

    def _open_window(self, scale: float | None) -> None:
        if scale is not None:
            require_scale("scale", scale)
        if self._position == 0:
            self._use_scale(scale)
        elif scale is not None and scale != self._given_scale:
            raise PolicyError(
                f"scale={scale!r} within a window that began with {self._given_scale or 'the scale of the scaler'}: "
                "the gradients of a window add up, so they have one scale. Change it at the start of a window."
            )
        if self._low_dtype == torch.float16 and not self._window_scaler.is_enabled() and not self._warned:
            self._warned = True
            warnings.warn(
                "training in FP16 without loss scaling: gradients below 6e-8 become zero. "
                'Leave scaler at "auto", or give a LossScaler.',
                stacklevel=3,
            )

    def _decide(self) -> None:
        """Choose the scaler that "auto" means, now that the model was converted."""
        self._undecided = False
        self._low_dtype = _low_dtype(self.model)
        self.scaler = _scaler("auto", self._low_dtype)
        self.scaler.name_parameters(self.model.named_parameters())
        if self._state:
            self.scaler.load_state_dict(dict(self._state))
        self._use_scale(self._given_scale)

    def _use_scale(self, scale: float | None) -> None:
        self._given_scale = scale
        self._window_scale = None
        self._window_scaler = self.scaler
        if scale is not None:
            self._window_scaler = LossScaler(init_scale=scale, dynamic=False)

    def _read_scale(self) -> float:
        """Read the scale of the window from the device, once, since reading waits for it."""
        if self._window_scale is None:
            self._window_scale = self._window_scaler.get_scale()
        return self._window_scale

    def _forward(self, inputs: Any, target: Any) -> torch.Tensor:
        if isinstance(inputs, Mapping):
            output = self.model(**inputs)
        elif isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence):
            output = self.model(*inputs)
        elif isinstance(inputs, (torch.Tensor, PackedSequence)):
            output = self.model(inputs)
        else:
            raise PolicyError(
                f"inputs must be a tensor, a tuple for model(*inputs) or a mapping for model(**inputs), "
                f"got {type(inputs).__name__}. To hand it to the model as it is, wrap it: (inputs,)"
            )
        loss = self._loss_of(output, target)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise PolicyError(f"the loss must be a tensor of one element, got {what}")
        if not loss.requires_grad and any(p.requires_grad for o in self.optimizers for p in _parameters(o)):
            raise PolicyError(
                "the loss does not depend on any trainable parameter: look for torch.no_grad(), .detach() or .item() "
                "in the model or in loss_fn"
            )
        return loss

    def _loss_of(self, output: Any, target: Any) -> Any:
        if self.loss_fn is not None:
            return self.loss_fn(output) if target is None else self.loss_fn(output, target)
        if target is not None:
            raise PolicyError("a target was given but loss_fn is None: give a loss_fn, or the target among the inputs")
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise PolicyError(
                f"loss_fn is None, and the output ({type(output).__name__}) has no loss: give labels among the inputs, "
                "or a loss_fn"
            )
        return loss

    def _finish_window(self) -> StepResult:
        self.weights.forget()  # before the optimizers ask for memory of their own
        try:
            live = [o for o in self.optimizers if any(p.grad is not None for p in _parameters(o))]
            return self._step(live) if live else self._result("no_gradients", set())
        finally:
            self._close_window()

    def _step(self, live: Sequence[Optimizer]) -> StepResult:
        scaler = self._window_scaler
        if self._position < self.accumulate_steps:
            # Before the gradients are unscaled, so that the check for inf sees the outcome.
            _multiply_gradients(live, self.accumulate_steps / self._position)
        grad_norm = None
        held_back: set[Optimizer] = set()
        if self.max_grad_norm is not None:
            for optimizer in live:
                scaler.unscale_(optimizer)
            grad_norm = _clip([p for optimizer in live for p in _parameters(optimizer)], self.max_grad_norm)
            if _overflowed(scaler, live, grad_norm):
                held_back.update(live)
        self._read_scale()  # before update changes it, and before the optimizers give the device more to do
        for optimizer in live:
            if optimizer not in held_back:
                _step_optimizer(scaler, optimizer)
                if scaler.found_inf(optimizer):
                    held_back.add(optimizer)
        scaler.update()
        stepped = set(live) - held_back
        for scheduler in self.schedulers:
            if scheduler.optimizer in stepped:
                scheduler.step()
        return self._result("overflow" if held_back else "stepped", stepped, grad_norm)

    def _close_window(self) -> None:
        self.weights.forget()
        self._window_scaler._forget_step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self._position = 0
        self._use_scale(None)
        self._loss = None

    def _result(self, reason: Reason, stepped: set[Optimizer], grad_norm: torch.Tensor | None = None) -> StepResult:
        flags = tuple(optimizer in stepped for optimizer in self.optimizers)
        return StepResult(
            loss=torch.tensor(math.nan) if self._loss is None else self._loss,
            stepped=flags if len(flags) > 1 else flags[0],
            skipped=reason == "overflow",
            scale=self._read_scale(),
            grad_norm=grad_norm,
            reason=reason,
        )


def _low_dtype(model: nn.Module) -> torch.dtype | None:
    """Find the low dtype that `model`, or a part of it, was converted to; FP16 where there are both."""
    plans = [getattr(module, "plan", None) for module in model.modules()]
    for module in model.modules():
        if module is model or compiled.is_compiled(module):
            with contextlib.suppress(CaptureError):
                plans.append(compiled.plan_of(module))
    policies = [getattr(plan, "policy", None) for plan in plans]
    found = {getattr(policy, "dtype", None) for policy in policies if getattr(policy, "level", "O0") != "O0"}
    return torch.float16 if torch.float16 in found else next((d for d in found if isinstance(d, torch.dtype)), None)


def _scaler(scaler: object, low_dtype: torch.dtype | None) -> LossScaler:
    if isinstance(scaler, LossScaler):
        return scaler
    if scaler is None:
        return LossScaler(enabled=False)
    if isinstance(scaler, str) and scaler == "auto":
        if low_dtype == torch.float16:
            return LossScaler(min_scale=1.0, max_scale=2.0**24, max_skips=20)
        return LossScaler(enabled=False)
    if isinstance(scaler, torch.amp.GradScaler):
        raise PolicyError("scaler must be a fxamp.LossScaler, which is a GradScaler and loads the state of one")
    if isinstance(scaler, str):
        raise PolicyError(f'scaler must be a LossScaler, a number, None or "auto", got {scaler!r}')
    require_scale("scaler", scaler)
    return LossScaler(init_scale=float(scaler), dynamic=False)  # type: ignore[arg-type]


def _optimizers(optimizer: object, model: nn.Module) -> tuple[Optimizer, ...]:
    optimizers = _several("optimizer", optimizer, Optimizer)
    if not optimizers:
        raise PolicyError("optimizer must be an optimizer or a list of them, got an empty list")
    names = {id(p): name for name, p in model.named_parameters()}
    owner: dict[int, int] = {}
    for index, one in enumerate(optimizers):
        for place, param in enumerate(_parameters(one)):
            name = names.setdefault(id(param), f"parameter {place} of optimizer {index} (shape {tuple(param.shape)})")
            if owner.setdefault(id(param), index) != index:
                raise PolicyError(f"{name} is in two optimizers: its gradient would be unscaled twice")
    refuse_low_parameters(model.named_parameters())
    refuse_low_parameters((names[id(param)], param) for one in optimizers for param in _parameters(one))
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    if trained and not trained & owner.keys():
        raise PolicyError(
            f"the optimizer holds none of the trainable parameters of {type(model).__name__}, and would train nothing. "
            "Build it from model.parameters(), after what replaces them: fully_shard, load_state_dict(assign=True)."
        )
    return optimizers


def _schedulers(scheduler: object, optimizers: Sequence[Optimizer]) -> tuple[LRScheduler, ...]:
    schedulers = () if scheduler is None else _several("scheduler", scheduler, LRScheduler)
    for one in schedulers:
        if isinstance(one, ReduceLROnPlateau):
            raise PolicyError(
                "ReduceLROnPlateau needs a metric, which TrainStep does not have: "
                "leave it out and call scheduler.step(metric) yourself, after validation"
            )
        if not any(one.optimizer is optimizer for optimizer in optimizers):
            raise PolicyError(f"scheduler {type(one).__name__} belongs to none of the optimizers given")
    return schedulers


def _several(name: str, value: object, kind: type[Any]) -> tuple[Any, ...]:
    """Make a tuple of one or a list, and check what is in it."""
    several = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for one in several:
        if not isinstance(one, kind):
            raise PolicyError(f"{name} must be a torch {kind.__name__} or a list of them, got {type(one).__name__}")
    return several


def _refuse_unsupported(**settings: tuple[object, object]) -> None:
    for name, (value, supported) in settings.items():
        if value is not supported and value != supported:
            raise PolicyError(f"{name}={value!r} is not yet supported: leave it at {supported!r}")


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _multiply_gradients(optimizers: Sequence[Optimizer], factor: float) -> None:
    with torch.no_grad():
        for optimizer in optimizers:
            for param in _parameters(optimizer):
                if param.grad is not None:
                    param.grad.mul_(factor)


def _clip(params: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip the gradients to `max_norm` and give the norm that they had."""
    if math.isinf(max_norm):  # measure only: inf/inf would make every gradient a NaN
        return nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    return nn.utils.clip_grad_norm_(params, max_norm)


def _overflowed(scaler: LossScaler, optimizers: Sequence[Optimizer], grad_norm: torch.Tensor) -> bool:
    """Tell whether any gradient is not finite. A norm may be infinite though every gradient is finite."""
    if scaler.is_enabled():
        return any(scaler.found_inf(optimizer) for optimizer in optimizers)
    # Clipping to a norm that is not finite makes an inf a NaN, and a finite number 0.
    if math.isfinite(grad_norm.item()):
        return False
    return any(not_finite(p.grad) for o in optimizers for p in _parameters(o) if p.grad is not None)


def _step_optimizer(scaler: LossScaler, optimizer: Optimizer) -> None:
    try:
        scaler.step(optimizer)
    except TypeError as error:
        if "closure" not in str(error):
            raise
        raise TypeError(
            f"{error}. TrainStep calls {type(optimizer).__name__}.step() without a closure: an optimizer that "
            "evaluates the loss several times in a step needs a loop of its own."
        ) from error
