"""TrainStep: forward, scaled loss, backward, unscale, clip, step or skip, update, in the right order.

A *window* is the micro-batches whose gradients one optimizer step takes: `accumulate_steps` of them.

    step = TrainStep(fxamp.convert(model), F.cross_entropy, optimizer, accumulate_steps=4, max_grad_norm=1.0)
    for x, y in batches:
        result = step(x, y)
    step.flush()
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from passes.contract.errors import NotAModuleError, PolicyError

from ..dynamo import compiled
from . import checkpoint
from .checks import before_micro_batch, begin, warn_of_fp32
from .compiled.compile_settings import converted_by, refuse_unfit, settings_of
from .compiled.compiled_step import CompiledStep
from .describe import reasons_to_wait
from .ema import averages_of
from .given import low_dtype_of, optimizers_of, scaler_of, schedulers_of
from .ranks.ranks import Ranks
from .ranks.refused import refuse_unfit_model
from .ranks.replicas import exchanging
from .scale.scaler import LossScaler
from .scale.settings import require_count, require_number, require_scale
from .weights.weights import Mode, WeightCasts
from .window.average import Mean, average
from .window.by_hand import ByHand
from .window.closure import needs_closure, refuse_company, run_window, step_by_closure
from .window.conditional import parameters
from .window.following import follow
from .window.loss import LossFunction, loss_of, refuse_constant
from .window.microbatches import KeptMicroBatches
from .window.result import StepResult
from .window.update import Update, take_step


class TrainStep:
    """Run one training step per call.

    Results are bit for bit those of a hand-written loop with `torch.amp.GradScaler`: an optimizer with a gradient that
    is not finite is skipped, and the others step. It waits for the device only where Python has to decide something
    (see `waits`). It also settles three cases that such a loop leaves open:

    - An optimizer without gradients does not step.
    - With `max_grad_norm`, one gradient that is not finite skips every optimizer, since there is no norm to clip to.
      That holds without loss scaling too.
    - A call that raises an error abandons its window: gradients are set to None, and the next call begins a new window.

    After a window all gradients are None, also those of parameters that are in no optimizer.

    Args:
        model: A module that `fxamp.convert` or `fxamp.compile` returned, or a wrapper of one. An unconverted model
            trains in FP32, except with `compile="fxamp"`. TrainStep never calls train() or eval().
        loss_fn: It is called as `loss_fn(output, target)`, or without a target as `loss_fn(output)`. With None the loss
            is an entry of the model's output: `output.loss` or `output["loss"]`.
        optimizer: One optimizer, or several over distinct parameters. One that evaluates the loss itself (LBFGS) has to
            be the only one; it runs the micro-batches of the window again whenever it evaluates the loss.
        scaler: A LossScaler that nothing else uses; a number for a static loss scale; None for no loss scaling. "auto"
            is `LossScaler(min_scale=1, max_scale=2**24, max_skips=20)` for a model in FP16, else None; for a compiled
            model this is decided at its first call.
        accumulate_steps: Micro-batches in a window. The loss is divided by it.
        max_grad_norm: Clip the unscaled gradients of all optimizers to this norm, taken over all of them together.
            `float("inf")` measures the norm and clips nothing.
        scheduler: One or several, each for one of the optimizers. A scheduler steps when its optimizer has stepped.
        ema: One `torch.optim.swa_utils.AveragedModel` of the model or several, updated when a step was taken.
        weights: "per_step" casts each weight that a converted model reads in 16 bits once a window, and keeps the copy
            until the last backward. "per_use" casts at every call, and with `compile` in backward too. Gradients are
            the same, bit for bit. A weight that is written to, moved or replaced is cast again; an edit through `.data`
            takes effect in the next window. "auto" is "per_step" if the forwards of a window would cast a weight more
            than once, else "per_use". With `compile` under DistributedDataParallel it is "per_use", since torch
            exchanges gradients during backward only for graphs that read the weights, not copies of them. Parts of the
            model that are already compiled by `torch.compile` cast at every call; `step.weights.per_use` names them.
            Under FSDP2 "per_step" is refused.
        on_overflow: "skip_window" skips a step if any micro-batch had gradients that were not finite. "skip_microbatch"
            leaves out those micro-batches, and the gradients are the mean of the others; the scale backs off in both
            cases. "skip_microbatch" needs memory for a second set of gradients, and under DistributedDataParallel an
            exchange of gradients after the window instead of during its last backward.
        compile: With True, Inductor compiles model and loss as one graph and, from the second window on, everything
            after the last backward as another; fused optimizers are not compiled. It may also be the name of another
            backend, or a mapping of `torch.compile`'s backend, mode, options, dynamic and fullgraph. Backend "fxamp"
            converts the model, which must not be converted yet. `compiled` counts graphs, breaks, recompiles and
            uncompiled functions.
        cuda_graph: True lets Inductor capture CUDA graphs. Gradients are then zeroed in place after a window, and a
            gradient that a window does not compute is zero, not None. Without CUDA it does nothing.

    Attributes:
        scaler: The LossScaler in use; a disabled one without loss scaling.
        weights: Which casts of weights are kept for a window.
        compiled: Counts of the compiled graphs; None if nothing is compiled.
        ranks: The ranks that share the step; with a single process it holds no groups of ranks.
        windows: How many windows were finished.

    Raises:
        PolicyError: An argument is invalid, or does not fit another one; the message says what is valid.
        NotAModuleError: `model` is not a module.

    Example:
        >>> step = fxamp.TrainStep(
        ...     converted, nn.functional.cross_entropy, optimizer, accumulate_steps=2, max_grad_norm=1.0
        ... )
        >>> [step(x, y).reason for _ in range(4)]
        ['accumulating', 'stepped', 'accumulating', 'stepped']
        >>> step.waits, step.converted_model is converted
        (('Python decides whether SGD steps',), True)
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scaler: LossScaler | float | Literal["auto"] | None = "auto",
        accumulate_steps: int = 1,
        max_grad_norm: float | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        ema: AveragedModel | Sequence[AveragedModel] | None = None,
        weights: Mode = "auto",
        on_overflow: Literal["skip_window", "skip_microbatch"] = "skip_window",
        compile: bool | str | Mapping[str, Any] = False,
        cuda_graph: bool = False,
    ) -> None:
        if on_overflow not in ("skip_window", "skip_microbatch"):
            raise PolicyError(f'on_overflow must be "skip_window" or "skip_microbatch", got {on_overflow!r}')
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
        self.optimizers = optimizers_of(optimizer, model)
        self.schedulers = schedulers_of(scheduler, self.optimizers)
        self.averages = averages_of(ema, model)
        self.on_overflow = on_overflow
        refuse_company(self.optimizers, max_grad_norm, on_overflow)
        settings = settings_of(compile, cuda_graph)
        if settings is not None:
            refuse_unfit(model, self.optimizers, settings)
            model, settings = converted_by(model, settings)
            self.model = model
        self.ranks = Ranks(model, self.optimizers)
        refuse_unfit_model(model, weights)
        if weights == "auto" and settings is not None and self.ranks.replicated > 1:
            weights = "per_use"
        self.weights = WeightCasts(model, weights, accumulate_steps)
        self.compiled = None if settings is None else CompiledStep(settings, model, self.weights)
        self._low_dtype = low_dtype_of(model)
        self.scaler = scaler_of(scaler, self._low_dtype)
        self.scaler.name_parameters(model.named_parameters())
        # A compiled model is converted at its first call; its low dtype is not known before.
        compiles = any(compiled.is_compiled(module) for module in model.modules())
        self._undecided = isinstance(scaler, str) and self._low_dtype is None and compiles
        self._scaler_state: Mapping[str, Any] | None = None  # a state that was loaded before that call
        self._warned = self._begun = self._seen = False  # warned of unscaled FP16; compared ranks; looked for FP32

        self.windows = 0
        self._position = 0  # micro-batches of the open window seen so far
        self._by_hand, self._training = ByHand(), True  # the model's mode at the last micro-batch
        self._given_scale: float | None = None  # scale given for the open window
        self._window_scaler = self.scaler
        self._window_scale: float | torch.Tensor | None = None
        self._cleared: list[nn.Parameter] = []  # had no gradient when the open window began
        self._loss: torch.Tensor | None = None  # of the last micro-batch
        self._again: list[tuple[Any, Any]] | None = [] if any(map(needs_closure, self.optimizers)) else None
        self._kept = KeptMicroBatches(self.optimizers) if on_overflow == "skip_microbatch" else None

    @property
    def waits(self) -> tuple[str, ...]:
        """The reasons why a step waits for the device once, at the end of a window; empty where it never does."""
        return reasons_to_wait(self)

    @property
    def converted_model(self) -> nn.Module:
        """The converted module inside a wrapper such as DistributedDataParallel; without one, the model itself."""
        inside = self.weights.parts
        return inside[0] if len(inside) == 1 else self.model

    def __call__(self, inputs: Any, target: Any = None, *, scale: float | None = None) -> StepResult:
        """Run one micro-batch forward and backward; at the end of a window, step the optimizers.

        Args:
            inputs: A tensor or a tuple for `model(*inputs)`, or a mapping for `model(**inputs)`, with the shapes that
                the model takes.
            target: The second argument of `loss_fn`.
            scale: The loss scale of this window, instead of the scaler's. The scale, growth and count of skipped steps
                of the scaler do not change in such a window. Within a window leave `scale` out or repeat it.

        Raises:
            PolicyError: An argument cannot be used.
            ScaleCollapseError: The scaler's `max_skips` steps in a row were skipped.

        Example:
            >>> step(x, y, scale=128.0).scale
            128.0
        """
        self._open_window(scale)
        try:
            self._micro_batch(inputs, target)
        except BaseException:
            self._close_window()
            raise
        return self._result(None) if self._position < self.accumulate_steps else self._finish_window()

    def flush(self) -> StepResult:
        """End an unfinished window now, for example at the end of an epoch, and step. If no window is open, do nothing.

        Gradients are multiplied by `accumulate_steps / seen`, so that they are the mean over the micro-batches seen.
        Under DistributedDataParallel all ranks have to call this, and the mean is over the micro-batches of all ranks.

        Example:
            >>> step = fxamp.TrainStep(converted, nn.functional.cross_entropy, optimizer, accumulate_steps=4)
            >>> step(x, y).reason, step.flush().reason
            ('accumulating', 'stepped')
        """
        begin(self)
        if not (total := self.ranks.seen(self._position)):
            return self._result(Update({}, None))
        # A scaler has no scale before it scales: perhaps only other ranks did, or the run that saved this window.
        self._window_scaler.scale(torch.zeros((), device=next(self.model.parameters()).device))
        return self._finish_window(total)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a run needs to continue bit for bit, as plain values and tensors.

        It holds the states of the model, of a loss that is a module, of the optimizers, schedulers, averages and
        scaler, and of the random number generators. It also holds parameters that the optimizers train outside the
        model, and the position in the window with the gradients so far. Tensors are the ones in use, not copies.

        Example:
            >>> torch.save(step.state_dict(), "step.pt")
        """
        return checkpoint.state_of(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned into a TrainStep that was made in the same way.

        Raises:
            PolicyError: It is not the state of a TrainStep, or has other settings or another model. Nothing changed.

        Example:
            >>> torch.save(step.state_dict(), "step.pt")
            >>> step.load_state_dict(torch.load("step.pt"))
        """
        checkpoint.load(self, state_dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainStep:
        """Copy the step with its model and optimizers, between windows: copies of parameters have no gradients."""
        new = memo[id(self)] = TrainStep.__new__(TrainStep)
        new.__setstate__({key: copy.deepcopy(value, memo) for key, value in self.__getstate__().items()})
        return new

    def __getstate__(self) -> dict[str, Any]:
        if self._position:
            raise PolicyError("a TrainStep cannot be copied within a window: call flush() first, or save state_dict()")
        compiled = None if self.compiled is None else self.compiled.settings
        return {**self.__dict__, "weights": self.weights.asked, "compiled": compiled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.weights = WeightCasts(self.model, state["weights"], self.accumulate_steps)
        settings = state["compiled"]
        self.compiled = None if settings is None else CompiledStep(settings, self.model, self.weights)
        self.scaler.name_parameters(self.model.named_parameters())

    def _micro_batch(self, inputs: Any, target: Any) -> None:
        """Run forward and backward; gradients are those of the window so far."""
        before_micro_batch(self)
        last = self._position + 1 == self.accumulate_steps and self._kept is None
        with exchanging(self.ranks.replicas, last):
            loss = self._loss_of(inputs, target)
            refuse_constant(loss, self.optimizers)
            warn_of_fp32(self)
            if self._undecided:
                self._decide()
            if self._kept is not None:
                self._kept.before_backward()
            if loss.requires_grad:
                self._window_scaler.scale(loss / self.accumulate_steps).backward()
            self.weights.after_backward()
            if self._kept is not None:
                self._kept.after_backward()
        self._position += 1
        self._by_hand.after_micro_batch(self.optimizers)
        self._loss = loss.detach()
        if self._in_place:
            self._loss = self._loss.clone()  # the next replay of the CUDA graph overwrites it
        if self._again is not None:
            self._again.append((inputs, target))

    def _loss_of(self, inputs: Any, target: Any) -> torch.Tensor:
        if self.compiled is None:
            return loss_of(self.model, self.loss_fn, inputs, target)
        return self.compiled.loss_of(self.loss_fn, inputs, target)

    @property
    def _in_place(self) -> bool:
        """Whether gradients keep their memory, since a CUDA graph has recorded their addresses."""
        return self.compiled is not None and self.compiled.settings.captures

    def _open_window(self, scale: float | None) -> None:
        if scale is not None:
            require_scale("scale", scale)
        self.weights.open()
        if self._position == 0:
            self._use_scale(scale)
            self._cleared = [p for p in self.model.parameters() if p.grad is None]
            if self._in_place:
                for p in (p for o in self.optimizers for p in parameters(o) if p.grad is None):
                    p.grad = torch.zeros_like(p)
                self._cleared = [p for p in self._cleared if p.grad is None]
        elif scale is not None and scale != self._given_scale:
            raise PolicyError(
                f"scale={scale!r} within a window that began with {self._given_scale or 'the scale of the scaler'}: "
                "the gradients of a window add up, so they need the same scale. Change it at the start of a window."
            )
        if self._low_dtype == torch.float16 and not self._window_scaler.is_enabled() and not self._warned:
            self._warned = True
            warnings.warn(
                "training in FP16 without loss scaling: gradients below 6e-8 become zero. "
                'Leave scaler at "auto", or give a LossScaler.',
                stacklevel=3,
            )

    def _decide(self) -> None:
        """Choose the scaler that "auto" means, once the model is converted."""
        self._undecided = False
        self._low_dtype = low_dtype_of(self.model)
        self.scaler = scaler_of("auto", self._low_dtype)
        self.scaler.name_parameters(self.model.named_parameters())
        if self._scaler_state:
            self.scaler.load_state_dict(dict(self._scaler_state))
        self._use_scale(self._given_scale)

    def _use_scale(self, scale: float | None) -> None:
        self._given_scale = scale
        self._window_scale = None
        self._window_scaler = self.scaler
        if scale is not None:
            self._window_scaler = LossScaler(init_scale=scale, dynamic=False)

    def _finish_window(self, total: int | None = None) -> StepResult:
        self.weights.end()
        self.windows += 1
        try:
            mean, update = Mean(self._position * self.ranks.replicated if total is None else total), Update({}, None)
            if self._again is None:
                seen = (self._position, self._kept, self.accumulate_steps)
                mean = average(self.optimizers, self.ranks, *seen, in_backward=total is None)
            others = self._again is not None and total is not None and bool(self.ranks.replicas)
            live = [o for o in self.optimizers if others or any(p.grad is not None for p in parameters(o))]
            if live:
                update = self._update(live, mean) if self._again is None else self._update_by_closure(mean, total)
                update = update._replace(held_back=follow(update.held_back, self.model, self.schedulers, self.averages))
            return self._result(update, mean.kept)
        finally:
            self._close_window()

    def _update(self, live: Sequence[Optimizer], mean: Mean) -> Update:
        self._scale_now()  # before the update changes it
        told = (self._window_scaler, live, self.max_grad_norm, self.ranks, mean.nothing, mean.overflow)
        if self.compiled is not None and self.compiled.update.takes(live, self.ranks):
            return self.compiled.update(*told)
        return take_step(*told, followed=bool(self.schedulers or self.averages))

    def _update_by_closure(self, mean: Mean, total: int | None) -> Update:
        (optimizer,), scaler, share = self.optimizers, self._window_scaler, mean.kept / self.ranks.replicated
        told = (self.model, self.loss_fn, tuple(self._again or ()), scaler, self.ranks, share)
        self._scale_now()

        def run() -> torch.Tensor:
            with self.weights.window():
                return run_window(*told, self.weights, in_backward=total is None)

        held_back = step_by_closure(optimizer, scaler, run, self.ranks)
        scaler.update()
        return Update({optimizer: held_back}, None)

    def _close_window(self) -> None:
        self.weights.end()
        self._window_scaler._forget_step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not self._in_place)
        for p in self._cleared:
            p.grad = None
        self._cleared.clear()
        if self._kept is not None:
            self._kept.reset()
        if self._again is not None:
            self._again.clear()
        self._position = 0
        self._by_hand.after_window(self.schedulers)
        self._use_scale(None)
        self._loss = None

    def _scale_now(self) -> float | torch.Tensor:
        """Return the scale of the window, a copy that no update changes; it stays on the device."""
        if self._window_scale is None:
            scale = self._window_scaler._scale if self._window_scaler.is_enabled() else None
            self._window_scale = self._window_scaler.get_scale() if scale is None else scale.clone()
        return self._window_scale

    def _result(self, update: Update | None, kept: int | torch.Tensor | None = None) -> StepResult:
        """Make the result of a call: `update` is None in an unfinished window, `kept` counts its micro-batches."""
        own = self._kept.kept if self._kept is not None else self._position
        return StepResult(
            loss=torch.tensor(math.nan) if self._loss is None else self._loss,
            grad_norm=None if update is None else update.grad_norm,
            accumulating=update is None,
            held_back=tuple(None if update is None else update.held_back.get(o) for o in self.optimizers),
            given_scale=self._scale_now(),
            given_kept=own if kept is None else kept,
        )
