"""`fxamp.compare`: one table for the question which precision to train in, and one line of advice.

time        a forward, a loss and a backward of each, in turns, so that the machine's drift hits all alike
casts, MB   counted
errors      measured against float64 (`fxamp.measure_error`), and predicted (`fxamp.estimate_error`)
advice      the fastest of those whose error is near autocast's; FP32 where none is faster beyond noise
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch

from passes.contract.errors import FxampError, PolicyError, public
from passes.contract.plan import Plan
from passes.contract.policy import SHORT, Policy
from passes.graph.values import no_autocast

from ..convert import convert, plan_of
from ..diagnose.batches import Batch
from ..diagnose.step import AUTOCAST, FP32, POLICIES, Step, diagnostic, names_of, step_of
from ..error.estimate import estimated
from ..error.measure import measure_error, measured
from ..error.report import Errors
from ..measure.counts import laps, saved_bytes
from ..observe.workload import Loss
from ..results import Result, named, table
from .tune import Search, tune

F = TypeVar("F", bound=Callable[..., Any])
TUNED = "tuned"
_SECONDS = 8.0  # for all timed steps together
_ROUNDS = (7, 60)  # at least and at most
_EQUAL = 0.03  # times that differ by less than this part are equal
_ERROR = 2.0  # times autocast's error is still near it
_ALIKE = 1.02  # errors that differ by less than this factor are equal


@dataclass(frozen=True)
class Option:
    """One way to train."""

    name: str  # "FP32", "autocast", "O1", "O2", "O3", or "tuned", which is `fxamp.tune` at autocast's error
    seconds: float  # the median time of a step: forward, loss and backward
    # half of the width of its 95 % interval, from ratios to the time of FP32 in the same round; 0 for FP32
    spread: float
    casts: int  # how many casts a step makes
    cast_bytes: int  # the bytes that these read and write
    saved_bytes: int  # the bytes saved for backward, parameters apart
    loss: float  # the measured RMS error of the loss
    gradient: float  # the measured relative error of the gradient, RMS over parameters
    predicted_loss: float | None = None  # the predicted RMS error of the loss; None where nothing is predicted
    # the predicted relative error of the gradient, RMS over parameters; None likewise
    predicted_gradient: float | None = None
    skipped: int = 0  # in FP16: how many steps are skipped until the loss scale, 65536 at first, fits


@public
@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """What each way to train costs and gives, and which to take.

    Attributes:
        name: The class of the model.
        options: The ways, FP32 first.
        recommended: The name of the one to take.
        reason: Why, in a sentence.
        plan: The plan of the recommended one, for `fxamp.convert(model, plan=...)`; None for FP32 and autocast.
        notes: What is to be said besides.

    Example:
        >>> found = fxamp.compare(model, x, y, loss=nn.functional.cross_entropy)
        >>> found.recommended, found["FP32"].casts, found.plan  # a tiny model: casts cost more than 16 bits save
        ('FP32', 0, None)
    """

    name: str
    options: tuple[Option, ...]
    recommended: str
    reason: str
    plan: Plan | None = None
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Option:
        """Return one of the options.

        Raises:
            PolicyError: There is none of this name.
        """
        return named({option.name: option for option in self.options}, name, "comparison")

    def _data(self) -> dict[str, Any]:
        data = asdict(replace(self, plan=None))
        data["plan"] = None if self.plan is None else json.loads(self.plan.to_json())
        return data

    def __repr__(self) -> str:
        return f"<fxamp comparison for {self.name}: {self.recommended}; {self.reason}>"

    def _text(self, style: str) -> str:
        head = ["option", "ms a step", "casts", "MB cast", "MB saved", "loss error", "predicted", "gradient error",
                "its prediction", "skipped"]  # fmt: skip
        rows = [
            [
                o.name, _milliseconds(o), o.casts, f"{o.cast_bytes / 1e6:.3g}",
                f"{o.saved_bytes / 1e6:.3g}", f"{o.loss:.2g}", _shown(o.predicted_loss), f"{o.gradient:.2g}",
                _shown(o.predicted_gradient), o.skipped or "",
            ]
            for o in self.options
        ]  # fmt: skip
        said = "".join(f"\nnote: {note}" for note in self.notes)
        return f"{table(head, rows, style)}\n\n{self.name}: {self.recommended}: {self.reason}{said}\n"


@diagnostic
def compare(
    model_or_step: Any, inputs: Any = None, target: Any = None, *, kwargs: Mapping[str, Any] | None = None,
    loss: Loss = None, batches: Iterable[Any] | None = None, policies: Sequence[str] | str | None = None,
    dtype: str | None = None,
) -> Comparison:  # fmt: skip
    """Measure FP32, autocast, O1, O2, O3 and what `tune` finds, on this machine, and say which to train with.

    It is the fastest of those whose error of the gradient is at most twice autocast's. Of those that are equally fast,
    within 3 % or the noise, it is the one with the smallest error, and then with the fewest bytes cast. FP32 it is
    where none is faster than FP32. Graphs run in eager mode; with Inductor, or with weights cast once a step, times
    differ. Give real sizes, since they decide on times; the first batch is timed, and errors are measured over all.
    Everything is as before afterwards.

    Args:
        policies: Policy strings beside FP32 and autocast; None is O1, O2, O3 and the plan that `tune` finds. The dtype
            that the first of them names is that of all; else it is that of the view, or of autocast on the device.
        dtype: "fp16" or "bf16", where policies are left out.

    Raises:
        PolicyError: There is no loss, a part of the model is converted, or FP32 itself is not finite on a batch.
        CaptureError: Nothing of the model was captured.
        NotAModuleError: It is neither a module nor a TrainStep.

    Example:
        >>> found = fxamp.compare(model, x, y, loss=nn.functional.cross_entropy)
        >>> [option.name for option in found.options][:5], found.reason[:20], found.notes
        (['FP32', 'autocast', 'O1', 'O2', 'O3'], 'leave it in FP32: th', ...)
    """
    step = step_of(model_or_step, inputs, target, kwargs=kwargs, loss=loss, batches=batches)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FP16 gradients without a loss scale")  # that is what is measured
        return _compared(step, None if policies is None else names_of(policies), dtype)


def _compared(step: Step, asked: Sequence[str] | None, dtype: str | None) -> Comparison:
    own = step.view_policy if asked is None else Policy.of(asked[0]) if asked else None
    low = dtype or ("" if own is None or own.dtype is None else SHORT[own.dtype])
    suffix = f",dtype={low}" if low else ""
    levels = {name: name + suffix for name in POLICIES} if asked is None else {name: name for name in asked}
    names = {AUTOCAST: AUTOCAST + suffix, **levels}
    predictable = tuple(names.values())
    notes = _with_tuned(step, names, suffix) if asked is None else ()
    batch = step.batches[0]
    times = _times(step, [FP32, *names.values()], batch)
    errors = {e.policy: e for e in measured(step, tuple(names.values())).policies}
    predicted = {e.policy: e for e in estimated(step, predictable).policies} if step.parameters else {}
    options = [
        _option(short, step, name, batch, times[name], errors[name], predicted.get(name))
        for short, name in {FP32: FP32, **names}.items()
    ]
    recommended, reason = choose(options)
    plan = None if recommended in (FP32, AUTOCAST) else plan_of(step.view(names[recommended]))
    return Comparison(type(step.author).__name__, tuple(options), recommended, reason, plan, (*step.notes, *notes))


def _with_tuned(step: Step, names: dict[str, str], suffix: str) -> tuple[str, ...]:
    """Add the plan that `tune` finds at autocast's error, unless it is that of O1 or of O2; return notes."""
    try:
        plan = Search(step, f"O2{suffix}").plan(AUTOCAST)
    except FxampError as error:
        return (f"tune: {error}",)
    colours = {(d.key, d.colour) for d in plan.decisions}
    for level in ("O1", "O2"):
        step.run(step.batches[0], names[level])  # captured here
        if {(d.key, d.colour) for d in plan_of(step.view(names[level])).decisions} == colours:
            return (f"tune at autocast's error finds {level}",)
    names[TUNED] = TUNED
    step.add(TUNED, plan.policy, convert(step.author, plan=plan, check=False))
    return ()


def _times(step: Step, names: Sequence[str], batch: Batch) -> dict[str, tuple[float, float]]:
    """Return the median seconds of a step of each, and the half width of the 95 % interval.

    Rounds are compared one by one: each time is taken as a ratio to that of FP32 in the same round.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(step.as_before(step.author))
        stack.enter_context(torch.enable_grad())
        steps = {name: _timed(step, name, batch) for name in names}
        for run in steps.values():
            run()  # captured here
        begun = time.perf_counter()
        for run in steps.values():
            run()
        once = time.perf_counter() - begun
        rounds = max(_ROUNDS[0], min(_ROUNDS[1], int(_SECONDS / once)))
        taken = laps(steps, range(rounds))
    whole = statistics.median(taken[FP32])
    found = {}
    for name, seconds in taken.items():
        ratios = [one / plain for one, plain in zip(seconds, taken[FP32], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        # The standard error of a median, of values whose quartiles are (high - low) apart, is 0.93 of that over root n.
        found[name] = whole * middle, whole * 1.96 * 0.93 * (high - low) / rounds**0.5
    return found


def _timed(step: Step, name: str, batch: Batch) -> Callable[[], None]:
    """Return a function that runs forward, loss and backward; gradients are dropped."""
    forward = step.forward(name, batch)

    def run() -> None:
        loss = forward()
        if loss.requires_grad:
            with no_autocast():
                loss.backward()
        for p in step.author.parameters():
            p.grad = None

    return run


def _option(
    short: str, step: Step, name: str, batch: Batch, timed: tuple[float, float], errors: Errors,
    predicted: Errors | None,
) -> Option:  # fmt: skip
    with step.as_before(step.author), torch.enable_grad():
        saved = saved_bytes(step.forward(name, batch))
    return Option(
        short, *timed, errors.casts or 0, errors.cast_bytes or 0, saved, errors.loss, errors.per_parameter,
        None if predicted is None else predicted.loss, None if predicted is None else predicted.per_parameter,
        step.skips(name) if math.isfinite(errors.gradient) else _MOST_SKIPPED + 1,
    )  # fmt: skip


def choose(options: Sequence[Option]) -> tuple[str, str]:
    """Return the option to take, and the reason.

    Raises:
        PolicyError: FP32 or autocast is missing.
    """
    named = {option.name: option for option in options}
    if not {FP32, AUTOCAST} <= named.keys():
        raise PolicyError("advice compares with FP32 and with autocast: give both.")
    plain, limit = named[FP32], _ERROR * named[AUTOCAST].gradient
    near = [o for o in options if o.name != FP32 and o.gradient <= limit and o.skipped <= _MOST_SKIPPED]
    if not near:
        return FP32, "in 16 bits no option stays finite with an error near autocast's"
    fastest = min(near, key=lambda o: o.seconds)
    if plain.seconds - fastest.seconds <= _noise(plain, fastest):
        apart = abs(plain.seconds - fastest.seconds) > math.hypot(plain.spread, fastest.spread)
        spread = "" if apart else ", no difference beyond the spread of this machine"
        saves = max(plain.saved_bytes - min(o.saved_bytes for o in near), 0) / 1e6
        return FP32, (
            f"leave it in FP32: the fastest option in 16 bits, {fastest.name}, takes {_ratio(fastest, plain)} of its "
            f"time{spread}; what 16 bits would save is {saves:.3g} MB kept for backward"
        )
    equal = [o for o in near if o.seconds - fastest.seconds <= _noise(o, fastest)]
    least = min(o.gradient for o in equal)
    best = min((o for o in equal if o.gradient <= _ALIKE * least), key=lambda o: (o.cast_bytes, o.casts, o.seconds))
    others = [o.name for o in equal if o is not best]
    also = f"; {', '.join(others)} are as fast within the noise, with no smaller error" if others else ""
    return best.name, (
        f"it takes {_ratio(best, plain)} of the time of FP32 and {_ratio(best, named[AUTOCAST])} of autocast's, with "
        f"{best.gradient / named[AUTOCAST].gradient:.2f} times its error of the gradient{also}"
    )


_MOST_SKIPPED = 16  # the scale is 1 then, and the next step would be skipped too


def _noise(one: Option, other: Option) -> float:
    """Return the seconds by which two options differ without a difference."""
    return max(_EQUAL * min(one.seconds, other.seconds), math.hypot(one.spread, other.spread))


def _milliseconds(option: Option) -> str:
    """Write a time; that of FP32 has no spread, since the others are compared with it round by round."""
    spread = "" if option.name == FP32 else f" ± {1e3 * option.spread:.2f}"
    return f"{1e3 * option.seconds:.2f}{spread}"


def _ratio(one: Option, other: Option) -> str:
    return f"{100 * one.seconds / other.seconds:.0f} %"


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _before(name: str, function: F, now: str, *needs: str) -> F:
    """Return a function under the name that it had before, which is accepted for a release; it `needs` arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(f"fxamp.{name} is now fxamp.{now}; the old name goes after 0.2.", DeprecationWarning, 2)
        if missing := [key for key in needs if key not in kwargs]:
            raise TypeError(f"{name}() needs {' and '.join(f'{key}=' for key in missing)}")
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call  # type: ignore[return-value]


verify = _before("verify", measure_error, "measure_error")
advise = _before("advise", compare, "compare")
bisect = _before("bisect", tune, "tune(metric=, bound=)", "metric", "bound")
