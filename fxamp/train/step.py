"""TrainStep: forward, scaled loss, backward, unscale, clip, step or skip, update, in the right order.

A *window* is the micro-batches whose gradients one optimizer step takes: `accumulate_steps` of them.

    step = TrainStep(fxamp.convert(model), F.cross_entropy, optimizer, accumulate_steps=4, max_grad_norm=1.0)
    for x, y in batches:
        result = step(x, y)
    step.flush()
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from passes.contract.devices import DEVICES
from passes.contract.errors import PolicyError, public
from passes.contract.plan import Plan
from passes.contract.plan_format import replacing
from passes.contract.policy import Level, Policy
from passes.graph.values import no_autocast

from .._torch import is_spread
from ..capture.graphs import is_compiled
from ..census.census import CallCensus
from ..convert import plan_of
from ..errors import ScaleCollapseError, names_arguments
from ..observe.workload import require_loss
from ..view.switch import policies_in_force, switch_views
from . import checkpoint
from .collapse import with_overflow
from .compiled_step import CompiledStep
from .compiler import model_to_compile
from .course import Course
from .describe import reasons_to_wait
from .files import naming, weights_in
from .loop import Loop
from .options import MEANT, Options, choose_scaler, compile_anew, low_dtype_of
from .ranks.ranks import Ranks, exchange
from .ranks.refused import refuse_differences, refuse_unfit_model, refuse_unfit_ranks
from .result import HostFlag, StepResult
from .scaler import Culprits, LossScaler, collapsed, named_gradients, require_scale, update_scale
from .update import AtEnd, Update, step_by_closure, take_step
from .weights import Mode, WeightCasts
from .window import (
    UNWEIGHTED,
    LossFunction,
    Mean,
    Weight,
    Window,
    close_window,
    first_with_gradient,
    live,
    loss_of,
    open_window,
    range_of,
    refuse_constant,
)


@public
class TrainStep:
    """Run one training step per call.

    Results are bit for bit those of a hand-written loop with `torch.amp.GradScaler`: an optimizer with a gradient that
    is not finite is skipped, and the others step. It waits for the device only where Python has to decide something
    (see `waits`). It also settles three cases that such a loop leaves open:

    - An optimizer without gradients does not step.
    - With `max_grad_norm`, one gradient that is not finite skips every optimizer, since there is no norm to clip to.
      That holds without loss scaling too.
    - A call that raises an error abandons its window: gradients are set to None, and the next call begins a new window.

    After a window all gradients of model and loss are None, also those of parameters that are in no optimizer.
    Gradients that the optimizers find when a window opens are cleared, and a log line says so.

    A call is a window of `backward` and, at its end, `update`, which are there for losses of one's own::

        with step.window():
            loss = F.cross_entropy(step.model(x), y) + penalty
            step.backward(loss)
        result = step.update()

    Args:
        model: A module that `fxamp.convert` or `fxamp.compile` returned, or a wrapper of one. An unconverted model
            trains in FP32, except with `compile="fxamp"`. TrainStep never calls train() or eval().
        loss_fn: It is called as `loss_fn(output, target)`, or without a target as `loss_fn(output)`, and returns a
            tensor of one element. With None the loss is an entry of the model's output, `output.loss` or
            `output["loss"]`, the output itself if it is a tensor of shape (), or the one tensor of shape () in it that
            has a gradient, as in `(logits, loss)`; two of them are an error.
        optimizer: One optimizer, or several over distinct parameters. One that evaluates the loss itself (LBFGS) has to
            be the only one; it runs the micro-batches of the window again whenever it evaluates the loss.
        scaler: A LossScaler that nothing else uses; a number for a static loss scale; None for no loss scaling. "auto"
            is `LossScaler(min_scale=1, max_scale=2**24)` for a model in FP16, else None; for a compiled model this is
            decided at its first call.
        accumulate_steps: Micro-batches in a window. The loss is divided by it.
        max_grad_norm: Clip the unscaled gradients of all optimizers to this norm, taken over all of them together.
            `float("inf")` measures the norm and clips nothing.
        scheduler: One or several, each for one of the optimizers. A scheduler steps when its optimizer has stepped.
        ema: One `torch.optim.swa_utils.AveragedModel` of the model or several, updated when a step was taken.
        weights: "per_step" casts each weight that a view reads in 16 bits once a window, and keeps the copy, whose
            memory stays from window to window. "per_use" casts at every call.
            Gradients are the same, bit for bit. A weight that is written to, moved or replaced is cast again; an edit
            through `.data` takes effect in the next window. Only one window at a time is open over a view. "auto" is
            "per_step" if the forwards of a window would cast a weight more than once, else "per_use". With `compile`
            under DistributedDataParallel it is "per_use", since torch exchanges gradients during backward only for
            graphs that read the weights, not copies of them. `step.weights.per_use` names what is cast at every call.
            Under FSDP2 "per_step" is refused. A compiled step reads copies at any length of window, unless it is
            "per_use" (see `compile`).
        max_skips: So many skipped steps in a row raise ScaleCollapseError, which names the first parameter and the
            first node with a value that is not finite; its `overflow.policy` is one that cures it, for `switch`. The
            window is finished then: what stepped is counted, and its scheduler has stepped. The limit of a LossScaler
            that is handed in holds where it has one.
        check_finite: Look at gradients without loss scaling too. Where neither a scaler nor `max_grad_norm` looks at
            them, an optimizer with a gradient that is not finite is skipped by a flag, which a fused or compiled
            optimizer and SGD read on the device; for others the host reads it, once a window (see `waits`). False
            lets such an optimizer step.
        on_gradients: Called once a window with the parameters that have gradients, after these are unscaled and before
            they are clipped. With it the end of a window is not compiled.
        census: "warn" or "error": watch the first call, and the next one after a graph was captured, as `fxamp.census`
            does, and say what did not run as planned in a warning or as a VerificationError. Other calls cost nothing.
        compile: With True, Inductor compiles model and loss as one graph and, from the second window on, everything
            after the last backward as another; fused optimizers are not compiled. The first casts no weight: it reads
            low copies, which are leaves of autograd, so that their gradients stay in 16 bits until the update reads
            them. `compiled.leaves.reason` says why it does not, where that cannot be. The second writes the copies with
            the weights; an edit of a weight through `.data` shows in nothing, and is not read. It may be the name of
            another backend, or a mapping of `torch.compile`'s backend, mode, options, dynamic and fullgraph. Backend
            "fxamp" converts the model, which must not be converted yet. With `{"mode": "reduce-overhead"}` on CUDA,
            gradients are zeroed in place after a window, since Inductor's CUDA graphs have recorded their addresses,
            and one that a window does not compute is zero, not None. `compiled` counts graphs, breaks, recompiles and
            uncompiled functions, and `compiled.counts` kernels, casts among them, and bytes. O2 in BF16 is, compiled by
            Inductor, O1 whose saved values and gradients are stored in 16 bits: `plan()` lists these.
        output: What a compiled step keeps of the model's output, detached: None for nothing; "low" for what was
            computed, in 16 bits where it was; "full" for the dtypes of the model itself. What is kept is stored, which
            large logits are worth only where something reads them. Uncompiled, `result.output` has the output.
        update: "compiled" compiles fused optimizers too, in a compiled step: one graph reads gradients in 16 bits and
            writes weights, states and low copies. Compiled, an optimizer may differ from
            its eager self by a rounding, since it computes bias corrections in FP32 and not in Python.
        reduce: When FSDP2 reduces gradients over the ranks: in the backward of each "micro_batch", or once a "window",
            in that of its last one. Between the two each rank keeps gradients of the whole model, 4 bytes a parameter,
            which `describe` gives; such a window cannot end early. Where `set_requires_gradient_sync(False)` was called
            it is "window".

    Attributes:
        scaler: The LossScaler in use; a disabled one without loss scaling.
        weights: Which casts of weights are kept for a window.
        compiled: Counts of the compiled graphs; None if nothing is compiled.
        ranks: The ranks that share the step; with a single process it holds no groups of ranks.
        windows: How many windows were finished.
        switches: The policies that `switch` has set, each with the number of windows before it.

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
        (('Python decides whether SGD steps, which fused=True leaves to the device',), True)
        >>> step.windows, step.steps, step.skipped, step.switches, step.position, step.torn
        (2, 2, 0, (), 0, False)
        >>> step.accumulate_steps, step.max_grad_norm, step.max_skips, step.check_finite
        (2, 1.0, 20, True)
        >>> step.loss_fn is nn.functional.cross_entropy, step.optimizers[0] is optimizer, step.schedulers, step.averages
        (True, True, (), ())
        >>> step.undecided, step.in_place, step.closes
        (False, False, False)
    """

    scaler: LossScaler
    compiled: CompiledStep | None

    @names_arguments("TrainStep", MEANT)
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
        max_skips: int = 20,
        check_finite: bool = True,
        on_gradients: Callable[[list[Tensor]], Any] | None = None,
        census: Literal["warn", "error"] | None = None,
        compile: bool | str | Mapping[str, Any] = False,
        output: Literal["low", "full"] | None = None,
        update: Literal["compiled"] | None = None,
        reduce: Literal["micro_batch", "window"] = "micro_batch",
    ) -> None:
        self.options = options = Options.of(
            model, loss_fn=loss_fn, optimizer=optimizer, scaler=scaler, accumulate_steps=accumulate_steps,
            max_grad_norm=max_grad_norm, scheduler=scheduler, ema=ema, weights=weights, max_skips=max_skips,
            check_finite=check_finite, on_gradients=on_gradients, census=census, compile=compile, output=output,
            update=update, reduce=reduce,
        )  # fmt: skip
        self.model = model if options.compile is None else model_to_compile(model, options.compile)
        refuse_unfit_model(self.model, weights)
        self.ranks = Ranks(self.model, options.optimizers, reduce)
        self._cast_and_compile()
        dtype = low_dtype_of(self.model)
        # A compiled model is converted at its first call; its low dtype is not known before.
        waits = scaler == "auto" and dtype is None and any(is_compiled(module) for module in self.model.modules())
        self.pending: Mapping[str, Any] | None = {} if waits else None
        choose_scaler(self, dtype)
        self.course, self.policies = Course(), policies_in_force(self.model)  # as it was made; `switch` sets others
        self.opened: Window | None = None
        self.census = None if census is None else CallCensus(census)
        self.loop = Loop(self.model, options)

    def _cast_and_compile(self) -> None:
        compiled_replicas = self.options.compile is not None and self.ranks.replicated > 1
        mode: Mode = "per_use" if self.options.weights == "auto" and compiled_replicas else self.options.weights
        self.weights = WeightCasts(self.model, mode, self.accumulate_steps)
        compile_anew(self)

    loss_fn = property(attrgetter("options.loss_fn"), doc="")
    optimizers = property(attrgetter("options.optimizers"), doc="")
    schedulers = property(attrgetter("options.schedulers"), doc="")
    averages = property(attrgetter("options.averages"), doc="")
    accumulate_steps = property(attrgetter("options.accumulate_steps"), doc="")
    max_grad_norm = property(attrgetter("options.max_grad_norm"), doc="")
    max_skips = property(attrgetter("options.max_skips"), doc="")
    check_finite = property(attrgetter("options.check_finite"), doc="")
    windows = property(attrgetter("course.windows"), doc="")
    switches = property(attrgetter("course.switches"), doc="")
    torn = property(attrgetter("course.torn"), doc="")
    closes = property(attrgetter("options.closes"), doc="")

    @property
    def undecided(self) -> bool:
        """Whether the scaler is chosen only when the model is captured."""
        return self.pending is not None

    @property
    def position(self) -> int:
        """The number of micro-batches in the open window."""
        return 0 if self.opened is None else self.opened.position

    @property
    def steps(self) -> int:
        """How many windows ended with a step of an optimizer. Reading it may wait for the device."""
        return self.course.steps

    @property
    def skipped(self) -> int:
        """How many windows ended with a skipped step of an optimizer. Reading it may wait for the device."""
        return self.course.skipped.read()

    @property
    def in_place(self) -> bool:
        """Whether gradients keep their memory, since a CUDA graph has recorded their addresses."""
        return self.compiled is not None and self.compiled.settings.captures

    def written(self) -> tuple[Any, ...]:
        """Return the objects that a call writes, for whoever runs one and puts everything back afterwards.

        Example:
            >>> {step.model, *step.optimizers} <= {*step.written()}
            True
        """
        options = self.options
        own = (self, self.scaler, self.loop, self.course, *self.course.tallies, self.census)
        return (*own, self.model, options.loss_fn, *options.optimizers, *options.schedulers, *options.averages)

    def __repr__(self) -> str:
        scaling = {"none": "no loss scaling", "static": "a static loss scale", "dynamic": "a dynamic loss scale"}
        several = "s" * (len(self.optimizers) > 1)
        window = f"windows of {self.accumulate_steps}, {len(self.optimizers)} optimizer{several}"
        return f"<fxamp TrainStep of {type(self.model).__name__}: {window}, {scaling[self.scaler.kind]}>"

    @property
    def waits(self) -> tuple[str, ...]:
        """The reasons why a step waits for the device once, at the end of a window; empty where it never does."""
        return reasons_to_wait(self)

    @property
    def converted_model(self) -> nn.Module:
        """The converted module inside a wrapper such as DistributedDataParallel; without one, the model itself."""
        inside = self.weights.parts
        return inside[0] if len(inside) == 1 else self.model

    def plan(self) -> Plan:
        """Return what was decided on the graphs of the model, and what the compiled step stores in 16 bits beside.

        Where it stores such values, the plan is one of O2. A step of a view that `fxamp.convert(model, plan=...)`
        returned then stores exactly these.

        Raises:
            CaptureError: The model is not converted, or nothing of it was captured yet: call the step first.

        Example:
            >>> step(x, y).stepped, step.plan().decisions == fxamp.plan_of(converted).decisions
            (True, True)
        """
        plan, stored = plan_of(self.converted_model), () if self.compiled is None else self.compiled.stored
        if not stored:
            return replace(plan, stored=())
        return replace(plan, policy=replace(plan.policy, level=Level.O2), stored=stored)

    def __call__(
        self, inputs: Any, target: Any = None, *, scale: float | None = None, weight: Weight = UNWEIGHTED
    ) -> StepResult:
        """Run one micro-batch forward and backward; at the end of a window, step the optimizers.

        Args:
            inputs: A tensor or a tuple for `model(*inputs)`, or a mapping for `model(**inputs)`, with the shapes that
                the model takes.
            target: The second argument of `loss_fn`.
            scale: The loss scale of this window, instead of the scaler's. The scale, growth and count of skipped steps
                of the scaler do not change in such a window. Within a window leave `scale` out or repeat it.
            weight: The weight of this micro-batch in the mean of its window, for example its number of tokens: a number
                from 0 on, or a tensor of one element, which Python does not read. Gradients are the weighted mean over
                the micro-batches of the window, and over ranks. Give it on all ranks or on none.

        Raises:
            PolicyError: An argument cannot be used.
            ScaleCollapseError: `max_skips` steps in a row were skipped.

        Example:
            >>> step(x, y, scale=128.0).scale
            128.0
            >>> step(x, y, weight=len(x)).stepped
            True
        """
        self._check_scale(scale)
        try:
            window = self._begin(scale)
            with _UNWATCHED if self.census is None else self.census.watches(self, _CALL), window.micro_batch():
                with range_of("forward"):
                    if self.compiled is None:
                        loss, output = loss_of(self.model, self.loss_fn, inputs, target)
                    else:
                        loss, output = self.compiled.forward(self.loss_fn, inputs, target)
                refuse_constant(loss, self.optimizers)
                self._backward(window, loss, weight, (inputs, target))
            if window.position < window.size:
                return self._result(window, None, output)
            return self._finish(window, output)
        except BaseException:
            self._abandon()
            raise

    def _begin(self, scale: float | None) -> Window:
        window = open_window(self, scale)
        self._compare_ranks()
        self.loop.before_micro_batch(window.position)
        return window

    @contextlib.contextmanager
    def window(self, scale: float | None = None) -> Iterator[Window]:
        """Open a window for forwards of one's own: inside, each weight is cast once.

        `backward` takes their losses, and `update` ends the window, inside this context or after it. An error inside
        leaves the window as if it had not been opened. Entered again, it goes on with a window that is open.

        Raises:
            PolicyError: The step is compiled, so that its loss is a part of a graph; or the optimizer runs it again.

        Example:
            >>> with step.window():
            ...     step.backward(nn.functional.cross_entropy(step.model(x), y))
            >>> step.update().reason
            'stepped'
        """
        self._refuse_own_loss()
        self._check_scale(scale)
        try:
            window = self._begin(scale)
            with window.micro_batch():
                yield window
        except BaseException:
            self._abandon()
            raise

    def backward(self, loss: Tensor, weight: Weight = UNWEIGHTED) -> None:
        """Run backward for a loss of the model, as one micro-batch of the window.

        Args:
            loss: A tensor of one element, not scaled and not divided. For several losses of one micro-batch give their
                sum.
            weight: As for a call.

        Raises:
            PolicyError: The loss does not depend on what the optimizers train, or cannot be handed over (see `window`).

        Example:
            >>> with step.window():
            ...     output = step.model(x)
            ...     step.backward(nn.functional.cross_entropy(output, y) + 0.01 * output.square().mean())
            >>> step.update().stepped
            True
        """
        self._refuse_own_loss()
        if self.opened is None and self.weights.asked != "per_use":
            self.loop.say("forward", "a forward outside of `with step.window():` casts weights at each use")
        self.course.refuse_torn()
        try:
            window = open_window(self)
            require_loss(loss)
            refuse_constant(loss, self.optimizers)
            self._backward(window, loss, weight, None)
            if window.position == 1 and not self.ranks.late and first_with_gradient(self.optimizers) is None:
                raise PolicyError(
                    "this loss gives no gradient to any parameter that the optimizers train: compute it from "
                    "step.model's output"
                )
        except BaseException:
            self._abandon()
            raise

    def update(self) -> StepResult:
        """End the window: unscale, clip, and step.

        Raises:
            PolicyError: No backward has run since the last window ended.
            ScaleCollapseError: `max_skips` steps in a row were skipped.

        Example:
            >>> with step.window():
            ...     step.backward(nn.functional.cross_entropy(step.model(x), y))
            >>> step.update().kept
            1
        """
        window = self.opened
        if window is None or not window.position:
            close_window(self)
            raise PolicyError("there is no window to end: call step.backward(loss) first, once a window or more often")
        complete = window.position == window.size and window.exchanged
        if not complete:
            self._refuse_unreduced(window)
        try:
            return self._finish(window, None, None if complete else self._seen(window))
        except BaseException:
            self._abandon()
            raise

    def flush(self) -> StepResult:
        """End an unfinished window now, for example at the end of an epoch, and step. If no window is open, do nothing.

        Gradients are the mean over the micro-batches seen, by their weights. Under DistributedDataParallel all ranks
        have to call this, and the mean is over the micro-batches of all ranks.

        Example:
            >>> step = fxamp.TrainStep(converted, nn.functional.cross_entropy, optimizer, accumulate_steps=4)
            >>> step(x, y).reason, step.flush().reason
            ('accumulating', 'stepped')
        """
        self._compare_ranks()
        self.course.refuse_torn()
        if self.opened is not None:
            self._refuse_unreduced(self.opened)
        total = self.ranks.seen(self.position)
        if not total:
            return self._result(self.opened or Window(self), Update({}))
        try:
            window = open_window(self)
            return self._finish(window, None, self._seen(window, total))
        except BaseException:
            self._abandon()
            raise

    def switch(self, policy_or_plan: Policy | Plan | str) -> None:
        """Let the model follow another policy, or a plan of it, from the next window on, for all its callers.

        Weights stay as they are, in FP32, so nothing is converted; graphs are captured again. The low dtype has to be
        the same. It is recorded in the state of the step, and set again where that is loaded.

        Raises:
            PolicyError: A window is open; no part of the model is converted; the policy or plan does not fit the model,
                or has another low dtype.

        Example:
            >>> step.switch("O2,dtype=bf16")
            >>> step(x, y).reason, [policy for _, policy in step.switches]
            ('stepped', ['O2,dtype=bf16'])
            >>> step.switch("O1,dtype=bf16")
        """
        if self.position:
            raise PolicyError("a policy is switched between two windows: call flush() first, or wait for its end")
        close_window(self)
        policy = switch_views(self.model, policy_or_plan)
        compile_anew(self)
        self.course.switch(str(policy), policy_or_plan if isinstance(policy_or_plan, Plan) else None)
        self.loop.said.discard("ranks")

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a run needs to continue bit for bit, as plain values and tensors.

        It holds the states of the model, of a loss that is a module, of the optimizers, schedulers, averages and
        scaler, and of the random number generators of torch, Python and NumPy. It also holds parameters that the
        optimizers train outside the model, and the position in the window with the gradients so far. Tensors are the
        ones in use, not copies.

        Example:
            >>> torch.save(step.state_dict(), "step.pt")
        """
        return checkpoint.state_of(self)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, allow: Sequence[str] = ()) -> None:
        """Load a state that `state_dict` returned into a TrainStep that was made in the same way.

        Args:
            state_dict: The state.
            allow: Settings that may differ from those of the state, which are "policy", "max_grad_norm" and, between
                two windows, "accumulate_steps". The present ones then hold.

        Raises:
            PolicyError: It is not the state of a TrainStep, or has other settings or another model. Nothing changed.

        Example:
            >>> torch.save(step.state_dict(), "step.pt")
            >>> step.load_state_dict(torch.load("step.pt"))
        """
        checkpoint.load(self, state_dict, allow)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a file, which holds the old state or the new one whenever the process ends.

        Raises:
            OSError: The file, or the one beside it that then takes its place, cannot be written.

        Example:
            >>> step.save("step.pt")
            >>> step.load("step.pt")
        """
        with replacing(path) as file:
            torch.save(self.state_dict(), file)

    def load(self, path: str | os.PathLike[str], *, allow: Sequence[str] = ()) -> None:
        """Load a state that `save` wrote. The file may come from anybody: nothing in it is run.

        It is read with `weights_only=True`, whatever the environment asks torch for. Classes that you have given to
        `torch.serialization.add_safe_globals` are made as torch makes them. For a sharded model the file holds
        DTensors, whose classes torch allows, and with them it may make ranks communicate: read what you do not trust by
        `fxamp.load_checkpoint` then.

        Args:
            path: The file.
            allow: As in `load_state_dict`.

        Raises:
            PolicyError: The file holds something other than tensors and plain values, or is damaged; or as in
                `load_state_dict`. It names the file. Nothing changed.
            OSError: The file cannot be opened.

        Example:
            >>> step.save("step.pt")
            >>> step.load("step.pt", allow=["max_grad_norm"])
        """
        state = weights_in(path, sharded=any(map(is_spread, self.model.parameters())))
        with naming(path):
            self.load_state_dict(state, allow=allow)

    def __getstate__(self) -> dict[str, Any]:
        if self.position:
            raise PolicyError("a TrainStep cannot be copied within a window: call flush() first, or save state_dict()")
        return {**self.__dict__, "weights": None, "compiled": None, "opened": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._cast_and_compile()
        self.scaler.name_parameters(self.model.named_parameters())

    def _check_scale(self, scale: float | None) -> None:
        """Refuse a scale that no window could be opened with, or that the open one does not have."""
        if self.torn:
            self.course.refuse_torn()
        if scale is not None:
            require_scale("scale", scale)
        if scale is not None and self.opened is not None and scale != (began := self.opened.given_scale):
            raise PolicyError(
                f"scale={scale!r} within a window that began with {began or 'the scale of the scaler'}: "
                "the gradients of a window add up, so they need the same scale. Change it at the start of a window."
            )

    def _compare_ranks(self) -> None:
        """Refuse, on all ranks, settings that they cannot share or that differ: at a first call, and after a change."""
        if "ranks" in self.loop.said:
            return
        ranks, scaler, undecided = self.ranks, self.scaler, self.undecided
        refuse_unfit_ranks(ranks, accumulate_steps=self.accumulate_steps, scaled=scaler.is_enabled() or undecided)
        if ranks.groups or (ranks.shared and dist.get_world_size() > 1):
            asked = dict.fromkeys(str(policy) for policy, _ in policies_in_force(self.model).values())
            told = {
                "the policy": list(asked),
                "the number of ranks": [dist.get_world_size(group) for group in ranks.groups],
                "the loss scaler": "undecided" if undecided else {"kind": scaler.kind, **scaler.state_dict()},
                **checkpoint.settings_of(self),
                **{name: getattr(self.options, name) for name in ("max_skips", "check_finite", "reduce")},
                "the number of finished windows": self.course.windows,
            }
            refuse_differences(told, ranks.groups, self.model)
        self.loop.said.add("ranks")

    def _abandon(self) -> None:
        """Leave nothing of a window open, where an error or an interrupt ends a call."""
        position = self.position
        try:
            for replica in self.ranks.replicas:  # which an interrupt may have left without an exchange
                replica.require_backward_grad_sync = True
            close_window(self)
        finally:  # a signal may have ended the first
            close_window(self)
        if position:
            left = f"an error left a window after {position} of {self.accumulate_steps} micro-batches"
            self.loop.say("abandoned", f"{left}, whose gradients are gone: the next call begins a new window")
        if self.accumulate_steps > 1:  # this rank is at another micro-batch than those that saw no error
            self.loop.said.discard("ranks")

    def _refuse_unreduced(self, window: Window) -> None:
        """Refuse to end a window whose gradients FSDP2 has not reduced."""
        if self.ranks.late and window.position:
            raise PolicyError(
                f"{window.position} of the window's {self.accumulate_steps} micro-batches have been seen, and FSDP2 "
                "reduces gradients in the backward of the last one, if its forward is in a `with step.window():` of "
                "its own: complete the window, or reduce those of each micro-batch (reduce='micro_batch', "
                "set_requires_gradient_sync(True))"
            )

    def _backward(self, window: Window, loss: Tensor, weight: Weight, batch: Any) -> None:
        self.loop.warn_of_fp32()
        if self.undecided:  # the model has been converted now
            pending, self.pending = self.pending, None
            choose_scaler(self, low_dtype_of(self.model))
            if pending:
                self.scaler.load_state_dict(dict(pending))
            if window.given_scale is None:
                window.scaler = self.scaler
        if self.closes and weight is not UNWEIGHTED:
            raise PolicyError(
                f"{type(self.optimizers[0]).__name__} runs the window again itself, without weights: leave out weight="
            )
        share = window.share_of(weight, loss.device)
        if loss.requires_grad:
            weighted = loss if isinstance(share, float) and share == 1 else loss * share
            with range_of("backward"), no_autocast():
                mean = weighted if window.size == 1 else weighted / window.size
                if self.compiled is not None:
                    self.compiled.leaves.set_aside()
                window.scaler.scale(mean).backward()
        window.exchanged = self.ranks.exchanged
        if self.compiled is not None:
            self.compiled.after_backward(last=window.size == 1 and weight is UNWEIGHTED)
        detached = loss.detach().view(())
        # The next replay of a CUDA graph overwrites the loss.
        window.took(detached.clone() if self.in_place else detached, share)
        # The last window before the limit of skipped steps keeps all that may have overflowed.
        if batch is None or not (self.closes or self.course.skips_in_a_row.at_most + 1 >= self.max_skips):
            window.batches.clear()
        if batch is not None:
            window.batches.append(batch)
        self.loop.after_micro_batch()

    def _refuse_own_loss(self) -> None:
        if self.compiled is not None:
            raise PolicyError(
                "compile= makes model and loss one graph, which has no place for a loss of one's own: give it as "
                "loss_fn, or leave compile out"
            )
        if self.closes:
            name = type(self.optimizers[0]).__name__
            raise PolicyError(f"{name} runs the window again itself, which takes a loss_fn: call step(inputs, target)")

    def _seen(self, window: Window, total: int | None = None) -> int:
        """Return the micro-batches of all ranks, for a window whose gradients were not exchanged in backward."""
        # A scaler has no scale before it scales: perhaps only other ranks did, or the run that saved this window.
        window.scaler.scale(torch.zeros((), device=next(self.model.parameters()).device))
        return self.ranks.seen(window.position) if total is None else total

    def _finish(self, window: Window, output: Any, total: int | None = None) -> StepResult:
        """End a window; `total` is the number of micro-batches of all ranks, if they end it early."""
        caller = [(d, torch.get_autocast_dtype(d)) for d in DEVICES if torch.is_autocast_enabled(d)]
        rates = self._rates()
        with range_of("update"), no_autocast():
            update, mean = self._end(window, total, caller)
        self.course.windows += 1
        result = self._result(window, update, output, mean.kept, rates)
        error = self._count(window, update)
        self.course.torn = False
        close_window(self)
        if error is not None:
            raise with_overflow(error, self, window)
        return result

    def _end(self, window: Window, total: int | None, caller: Sequence[tuple[str, torch.dtype]]) -> tuple[Update, Mean]:
        early = total is not None
        mean = Mean(window.position * self.ranks.replicated if total is None else total)
        if not self.closes:
            mean = window.average(self.optimizers, in_backward=not early)
        others = self.closes and early and bool(self.ranks.replicas)
        stepped = (lambda o: live([o])) if self.compiled is None else self.compiled.update.stepped
        stepping = [o for o in self.optimizers if others or stepped(o)]
        if not stepping:
            self.loop.without_gradients()
            return Update({}), mean
        window.scale  # noqa: B018 - read before the update changes it
        if self.closes:
            share = mean.kept / self.ranks.replicated
            held = step_by_closure(
                stepping[0], window.scaler, lambda: self._run_again(window, share, early, caller), self.ranks,
                self.check_finite, self.course.tears,
            )  # fmt: skip
            update_scale(window.scaler)
            update = Update({stepping[0]: held})
        else:
            end = AtEnd(
                window.scaler, stepping, self.max_grad_norm, self.ranks, mean.nothing, self.options.on_gradients,
                followed=bool(self.schedulers or self.averages), check_finite=self.check_finite,
                begins=self.course.tears,
            )  # fmt: skip
            compiled = self.compiled
            update = take_step(end) if compiled is None else compiled.update(end, bool(compiled.loss.kernels.ran))
        return update._replace(held_back=self._follow(update)), mean

    def _run_again(
        self, window: Window, share: float | Tensor, early: bool, autocasts: Sequence[tuple[str, torch.dtype]]
    ) -> Tensor:
        """Run the micro-batches of a window again, `share` per rank, and return the mean of their losses.

        Gradients and loss are averaged over all ranks, since an optimizer decides by the loss how to continue. Ranks
        exchange gradients in the last backward or, where a window ends early, after it: some may have seen fewer.
        """
        count, losses = len(window.batches), []
        with self.weights.window():
            for index, (inputs, target) in enumerate(window.batches):
                with self.ranks.exchanging(not early and index + 1 == count):
                    with contextlib.ExitStack() as caller:
                        for device, dtype in autocasts:
                            caller.enter_context(torch.autocast(device, dtype))
                        loss = loss_of(self.model, self.loss_fn, inputs, target)[0] / share
                    window.scaler.scale(loss).backward()
                    losses.append(loss.detach())
        if not self.ranks.groups:
            return torch.stack(losses).sum()
        totals = torch.zeros(2, device=next(self.model.parameters()).device)
        for loss in losses:
            totals += torch.stack([loss.float().view(()) * share, torch.ones_like(totals[0])])
        self.ranks.sum(totals)
        for replica in reversed(self.ranks.replicas) if early else ():
            exchange(replica, totals.new_tensor([count]), share)
        return totals[0] / totals[1]

    def _follow(self, update: Update) -> Mapping[Optimizer, Any]:
        """Let each scheduler step if its optimizer did, and each average take in the weights if any did."""
        if not self.schedulers and not self.averages:
            return update.held_back
        known = {optimizer: bool(held) for optimizer, held in update.held_back.items()}
        for scheduler in self.schedulers:
            if not known.get(scheduler.optimizer, True):
                scheduler.step()
        if not all(known.values()):
            for one in self.averages:
                one.update_parameters(self.model)
        return known

    def _count(self, window: Window, update: Update) -> ScaleCollapseError | None:
        """Count steps and skips, without waiting for the device; return the error of `max_skips` in a row."""
        flags = [bool(held) if isinstance(held, HostFlag) else held for held in update.held_back.values()]
        if not flags:
            return None
        on_device = [flag.view(()) for flag in flags if isinstance(flag, Tensor)]
        skipped: bool | Tensor = any(flag for flag in flags if isinstance(flag, bool))
        held_back: bool | Tensor = all(flag for flag in flags if isinstance(flag, bool))
        if on_device:
            least = most = on_device[0]
            if len(on_device) > 1:
                least, most = torch.stack([flag.to(most.device) for flag in on_device]).aminmax()
            skipped, held_back = skipped or most, held_back and least
        in_a_row = self.course.count(held_back, skipped)
        scaler, limit = self.scaler, window.scaler.max_skips or self.max_skips
        if skipped is True and not scaler.is_enabled():
            first = Culprits(named_gradients(scaler, self.optimizers))
            self.loop.say(
                "skip",
                f"a step was skipped, because gradients are not finite, first {first}; with max_skips={limit} in a row "
                "that is an error",
            )
        if not in_a_row.reaches(limit):
            return None
        more = f"; the loss scale is now {scaler.get_scale()}" if scaler.is_enabled() else ""
        return collapsed(in_a_row, named_gradients(scaler, self.optimizers), more)

    def _result(
        self, window: Window, update: Update | None, output: Any = None, kept: int | Tensor | None = None,
        rates: tuple[float | Tensor, ...] | None = None,
    ) -> StepResult:  # fmt: skip
        """Make the result of a call: `update` is None in an unfinished window, `kept` counts its micro-batches."""
        return StepResult(
            window.losses[-1][0] if window.losses else torch.tensor(math.nan),
            None if update is None else update.grad_norm,
            output,
            update is None,
            tuple(None if update is None else update.held_back.get(o) for o in self.optimizers),
            window.scale,
            window.position if kept is None else kept,
            tuple(window.losses),
            self._rates() if rates is None else rates,
        )

    def _rates(self) -> tuple[float | Tensor, ...]:
        rates = (group["lr"] for o in self.optimizers for group in o.param_groups if "lr" in group)
        return tuple(rate.clone() if isinstance(rate, Tensor) else rate for rate in rates)  # a scheduler may fill one


_CALL, _UNWATCHED = TrainStep.__call__.__code__, contextlib.nullcontext()
