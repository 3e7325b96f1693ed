"""`fxamp.tune`: the plan that casts the fewest bytes within a budget of error, by minimum cut, and measured.

Of a compiled step it is what the step stores in 16 bits that is chosen, in `stored`. Else:

errors of roundings, to first order        `Derivatives`: how much each moves the loss and the gradients
lambda * error beside the bytes of casts   `measure.Penalties`;         the compiler's cut decides
lambda                                     by bisection, until the predicted error is within the budget
the certificate                            the measured error of what was found, on the batches that were given
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from passes import ByteCosts
from passes.contract.errors import PolicyError
from passes.contract.plan import CERTIFICATE, Plan
from passes.contract.policy import Level, Policy

from ..diagnose.step import AUTOCAST, Step, diagnostic, one_policy, step_of
from ..error.derivatives import Derivatives, keys_of
from ..error.measure import measured
from ..error.report import Errors
from ..errors import NoLossError, in_short
from ..measure.costs import Penalties
from ..observe.workload import Loss
from ..train.step import TrainStep
from .metric import under_bound
from .stored import stored_within

_LOSS, _GRADIENT = 0.2, 0.8  # the parts of both errors in what is charged
_MARGIN = 1.02  # by which a prediction has to be within the tolerance
_DRAW = 0.05  # how far off an error is that was measured on one batch, as a part of it
_RANGE = -2.0, 3.0  # of the logarithm of lambda
_STEPS, _CUTS = 5, 3  # of a bisection; how many cuts are measured


@diagnostic
def tune(
    model_or_step: Any, inputs: Any = None, target: Any = None, *, kwargs: Mapping[str, Any] | None = None,
    loss: Loss = None, batches: Iterable[Any] | None = None, policies: Policy | str | None = None,
    tolerance: float | str = "autocast", metric: Callable[[Any], Any] | None = None, bound: float | None = None,
    policy: Policy | str | None = None,
) -> Plan:  # fmt: skip
    """Find the plan that casts the fewest bytes with an error of the gradient within a tolerance.

    The error is that of `fxamp.measure_error`, relative and RMS over parameters, measured with the real kernels on the
    batches given. Compared are O1, the same with one copy of each value (`share_casts=storage`), O2, and what lies
    between them: minimum cuts in which each rounding is charged with the error that it makes, to first order. Matrix
    products run low in all of them. The plan keeps what was measured, in `plan.certificate` and in its notes.
    The more batches, the less the plan fits one. Everything is as before afterwards.

    With `metric` and `bound` it is another search: a small set of nodes that, run in FP32, bring the metric under the
    bound. The metric is measured at most log2(nodes) + 8 times, each time of a view of the model; nodes are tried in
    the order of how much they move the loss, or as they run where there is none. The set is small rather than smallest.

    Of a compiled `TrainStep` that follows O2 in BF16 it is a third one: what it stores in 16 bits beside O1, which is
    nothing, what is saved for backward, what kernels of backward hand on, or both. Each is compiled, and run on the
    batches, unless its error is predicted to be above twice the tolerance. Of what is within the tolerance, and by
    Inductor's counts of forward and backward above O1 in none, the plan stores what moves the fewest bytes, in
    `plan.stored`. The step stays as it is: `step.switch(plan)`.

    Args:
        policies: The policy whose dtype, device and overrides hold; None is that of the view, else "O2", and "O1" with
            a metric.
        tolerance: The largest error, such as 0.02; "autocast" is that of `torch.autocast`, measured beside. A plan has
            to be within it as measured, and as predicted with a margin of 2 %. O1, which has autocast's values, is
            within "autocast"; all others need a margin as measured too, since on few batches an error is one draw: 5 %
            over the root of their number; nor may they have more casts than O1. Of a compiled step "autocast" is
            1.25 of autocast's error, and O1 is within it.
        metric: A function of a view that returns a number, such as an error on validation data; smaller is better, and
            NaN is worst. It may call train() and eval(); what it does to the model is undone.
        bound: What the metric has to be at most.
        policy: The name of `policies` before; accepted until 1.0.

    Returns:
        For `fxamp.convert(model, plan=plan)`. States that were not captured here follow the plan by its keys.

    Raises:
        PolicyError: The tolerance is not a positive number, or FP32 itself exceeds it; or nothing keeps it, and the
            message has the nearest that does exist, and its cost; autocast itself fails, or is not finite; no parameter
            requires a gradient; it is a graph; a compiled step follows another level or FP16, is compiled by another
            backend than Inductor, or has an open window; the metric is not under the bound even with all nodes in FP32.
            As `fxamp.measure_error` besides.
        CaptureError: As `fxamp.measure_error`.

    Example:
        >>> plan = fxamp.tune(model, x, y, loss=nn.functional.cross_entropy, tolerance=0.05)
        >>> plan.certificate["measured"] <= 0.05
        True
        >>> tuned = fxamp.convert(model, plan=plan)
        >>> with torch.no_grad():
        ...     exact = model(x)
        >>> def distance(view):
        ...     with torch.no_grad():
        ...         return (view(x) - exact).norm() / exact.norm()
        >>> plan = fxamp.tune(model, x, metric=distance, bound=1e-3)
        >>> float(distance(fxamp.convert(model, plan=plan))) <= 1e-3
        True
    """
    if (metric is None) != (bound is None):
        raise PolicyError("metric= and bound= go together: the metric of a view has to be at most the bound.")
    asked = one_policy(policies if policies is not None else policy)
    step = step_of(model_or_step, inputs, target, kwargs=kwargs, loss=loss, batches=batches)
    if metric is not None and bound is not None:
        return under_bound(step, asked, metric, bound)
    if isinstance(step.train_step, TrainStep) and step.train_step.compiled is not None:
        return stored_within(step, asked, _required(tolerance))
    return Search(step, asked).plan(_required(tolerance))


def _required(tolerance: float | str) -> float | str:
    number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    if tolerance != AUTOCAST and not (number and 0 < float(tolerance) < math.inf):
        raise PolicyError(f'tolerance is "autocast" or a relative error above 0, such as 0.02, not {tolerance!r}.')
    return tolerance


@dataclass(frozen=True)
class _Cut:
    """A colouring that was found."""

    name: str  # as a policy
    base: Policy  # what it colours otherwise
    weight: float  # lambda
    square: float  # its predicted square error, in units of O1's


class Search:
    """The search for one plan."""

    def __init__(self, step: Step, policy: Policy | str | None) -> None:
        if isinstance(step.author, GraphModule):
            raise PolicyError(
                "tune captures a model in several colourings: give the module that the graph was made of."
            )
        if not step.parameters:
            raise PolicyError(
                f"no parameter of {type(step.author).__name__} requires a gradient, whose error tune keeps: measure "
                "the loss with fxamp.measure_error."
            )
        own = Policy("O2") if step.view_policy is None else replace(step.view_policy, level=Level.O2)
        asked = step.policy(str(own if policy is None else Policy.of(policy)))
        self._step = step
        self._base, self._o1 = replace(asked, level=Level.O2), replace(asked, level=Level.O1)
        sharing = dict.fromkeys((asked.share_casts, asked.share_casts or "storage"))  # the latter sums in FP32
        self._exact = [str(replace(self._o1, share_casts=share)) for share in sharing]  # autocast's values
        self._bases = [replace(self._base, share_casts=share) for share in sharing]
        low = {torch.float16: "fp16", torch.bfloat16: "bf16"}[asked.dtype or torch.bfloat16]
        self._autocast = f"{AUTOCAST},dtype={low}"
        self._cuts: dict[str, _Cut] = {}

    def plan(self, tolerance: float | str) -> Plan:
        """Return the plan."""
        asked = [self._autocast] if tolerance == AUTOCAST else []
        for name in asked:
            self._refuse_failing(name)
        for name in self._exact:  # what is not measured in the end is not captured
            self._step.decide(name, str(self._base), Policy.of(name))
        errors = {e.policy: e for e in measured(self._step, (*asked, *self._exact, str(self._base))).policies}
        autocast = errors.pop(self._autocast).per_parameter if asked else math.inf
        limit = autocast if tolerance == AUTOCAST else float(tolerance)
        floor = errors.pop("FP32").per_parameter
        if not math.isfinite(limit):
            raise PolicyError("torch.autocast itself is not finite here: give a tolerance, or see fxamp.find_overflow.")
        if limit <= floor:
            raise PolicyError(f"tolerance={limit:.2g} is not above the error of FP32 itself, {floor:.2g}.")
        as_measured = 1 + _DRAW / len(self._step.batches) ** 0.5 if tolerance == AUTOCAST else 1.0
        predicted = self._search(errors, limit, limit / as_measured)
        most = errors[self._exact[0]].casts or 0 if tolerance == AUTOCAST else math.inf
        within = [
            e for e in errors.values()
            if max(e.per_parameter * as_measured, predicted.get(e.policy, e.per_parameter) * _MARGIN) <= limit
            and (e.casts or 0) <= most
        ]  # fmt: skip
        if tolerance == AUTOCAST:
            exact = (errors[name] for name in self._exact)  # but for deviations: taken where none casts less
            within += [e for e in exact if e.per_parameter <= autocast * _MARGIN and e not in within]
        if not within:
            raise PolicyError(_nothing_keeps(limit, errors.values(), predicted))
        best = min(within, key=lambda e: (e.cast_bytes or 0, e.casts or 0))
        return self._certified(best, limit, predicted.get(best.policy), len(self._step.batches), errors)

    def _refuse_failing(self, autocast: str) -> None:
        try:
            self._step.run(self._step.batches[0], autocast)
        except NoLossError:
            raise
        except Exception as error:  # whatever a model raises under dtypes that its author has not seen
            raise PolicyError(
                f"{type(self._step.author).__name__} fails under torch.autocast ({in_short(error):.200}), which so "
                "has no error to keep: give a tolerance, such as 0.02."
            ) from error

    def _search(self, errors: dict[str, Errors], limit: float, as_measured: float) -> dict[str, float]:
        """Measure the cut that is predicted to be within a limit, and another where it is not; return predictions."""
        o1, o2 = errors[str(self._o1)].per_parameter, str(self._base)
        if not o1:
            return {}
        charged = Charges(self._step, o2, str(self._o1))
        predicted, aim = {o2: o1 * charged.square(charged.rounded(o2)) ** 0.5}, limit / _MARGIN
        if predicted[o2] <= aim and errors[o2].per_parameter <= limit:
            return predicted  # O2 is where all charges are zero: no cut casts less
        for base in self._bases:
            within = aim
            for _ in range(_CUTS):
                cut = self._bisect(charged, base, (within / o1) ** 2)
                if cut is None or cut.name in errors:
                    break
                errors[cut.name] = found = measured(self._step, (cut.name,))[cut.name]
                predicted[cut.name] = o1 * cut.square**0.5
                if found.per_parameter > as_measured:
                    within = min(within * as_measured / found.per_parameter * 0.99, predicted[cut.name] * 0.999)
                elif (found.cast_bytes or 0) < min(errors[name].cast_bytes or 0 for name in self._exact):
                    return predicted
                else:
                    break  # what has autocast's values casts fewer bytes
        return predicted

    def _bisect(self, charged: Charges, base: Policy, aim: float) -> _Cut | None:
        """Return the cut of the smallest lambda that is predicted to be within an aim; None where none is.

        A larger lambda has a smaller error: where the last one that the bisection can come to is not within, none is.
        """
        low, high = _RANGE
        if self._cut(charged, base, 10 ** (high - (high - low) / 2**_STEPS)).square > aim:
            return None
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if self._cut(charged, base, 10**middle).square <= aim:
                high = middle
            else:
                low = middle
        within = [cut for cut in self._cuts.values() if cut.base == base and cut.square <= aim]
        return min(within, key=lambda cut: cut.weight) if within else None

    def _cut(self, charged: Charges, base: Policy, weight: float) -> _Cut:
        """Return the cut of a lambda, made once; lambda is in units of the bytes that O1 casts.

        It is solved again on the graphs that are captured: nothing is run or captured for it.
        """
        name = f"{base} with an error's weight of {weight:.4g}"
        if name not in self._cuts:
            self._step.decide(name, str(self._base), base, charged.costs(base.device or self._step.device, weight))
            self._cuts[name] = _Cut(name, base, weight, charged.square(charged.rounded(name)))
        return self._cuts[name]

    def _certified(
        self, best: Errors, limit: float, predicted: float | None, batches: int, errors: Mapping[str, Errors]
    ) -> Plan:
        plan = self._step.plan(best.policy)
        numbers = {"tolerance": limit, "measured": best.per_parameter, "gradient": best.gradient, "loss": best.loss,
                   "batches": batches, "casts": best.casts or 0, "cast_bytes": best.cast_bytes or 0}  # fmt: skip
        if predicted is not None:
            numbers["predicted"] = predicted
        proved = "the values of autocast, bit for bit, but for the deviations of the plan"
        notes = (
            f"{CERTIFICATE}: {_verdict(best, errors[self._exact[0]], errors.values(), limit)}",
            f"{CERTIFICATE}: measured on {batches} batches: gradient within {best.per_parameter:.3g} (RMS over "
            f"parameters), tolerance {limit:.3g}; {best.casts} casts of {best.cast_bytes} bytes a step",
            f"{CERTIFICATE}: first order, these batches and these weights: nothing is bounded for others",
            f"{CERTIFICATE}: proved: {proved if best.policy in self._exact else 'nothing'}",
        )
        tried = ", ".join(f"{_short(n)} {e.per_parameter:.3g} at {e.cast_bytes} bytes" for n, e in errors.items())
        return replace(
            plan, certificate=numbers,
            notes=(*plan.notes, *self._step.notes, *notes, f"{CERTIFICATE}: compared: {tried}"),
        )  # fmt: skip


def _short(name: str) -> str:
    """Return the level of a policy, how it shares casts where that is asked for, and the weight of a cut."""
    policy, _, weight = name.partition(" with an error's ")
    words = policy.split(",")
    shares = [word for word in words[1:] if word.startswith("share_casts=")]
    return ",".join([words[0], *shares]) + (f", a cut by an error's {weight}" if weight else "")


def _verdict(best: Errors, base: Errors, errors: Iterable[Errors], limit: float) -> str:
    """Return what the search came to, in one sentence."""
    fewer = {e.policy: 1 - (e.cast_bytes or 0) / (base.cast_bytes or 1) for e in errors}
    if fewer[best.policy] > 0:
        return (
            f"{_short(best.policy)} casts {100 * fewer[best.policy]:.0f} % fewer bytes than {_short(base.policy)}, "
            f"with an error of {best.per_parameter:.3g} for {base.per_parameter:.3g}"
        )
    said = f"{_short(best.policy)} stays: nothing that casts fewer bytes is within {limit:.3g}"
    cheaper = [e for e in errors if fewer[e.policy] > 0]
    if not cheaper:
        return said
    near = min(cheaper, key=lambda e: e.per_parameter)
    share = f"{100 * fewer[near.policy]:.0f} % fewer bytes"
    return f"{said}; the nearest, {_short(near.policy)}, casts {share} with an error of {near.per_parameter:.3g}"


def _nothing_keeps(limit: float, errors: Iterable[Errors], predicted: Mapping[str, float]) -> str:
    near = min(errors, key=lambda e: max(e.per_parameter, predicted.get(e.policy, 0.0)))
    error = f"{near.per_parameter:.3g}"
    if near.policy in predicted:
        error += f" measured and {predicted[near.policy]:.3g} predicted"
    return (
        f"nothing keeps a tolerance of {limit:.3g}: the nearest is {_short(near.policy)}, {error}, with {near.casts} "
        f"casts of {(near.cast_bytes or 0) / 1e6:.2f} MB a step. Below it matrix products have to be FP32, as with "
        'policy="O2,modules.head=fp32".'
    )


class Charges:
    """The error that each rounding makes, for any colouring: of every value, and of every read of one.

    It is 0.2 times the variance of the loss and 0.8 times that of the gradients, each in units of a policy's whole. A
    gradient that sums hand on counts once, however many of those that have it are rounded.

    Args:
        step: the model and its batches.
        name: the policy whose graphs are looked at, which rounds every value that any colouring may round.
        unit: the policy whose error is the unit.
    """

    def __init__(self, step: Step, name: str, unit: str) -> None:
        self._step, self._found = step, Derivatives(step, name)
        of_unit = self.rounded(unit)
        self._whole = tuple(sum(by) or 1.0 for by in self._parts(of_unit))
        self._bytes = step.casts(unit)[1]
        sharing = Counter(self._found.handed[at] for keys in self.rounded(name) for at in set(keys) & self._backward)
        self.charges = {at: self._charge(at, sharing) for at in self._found.losses}  # of rounding, by a place's key

    @property
    def _backward(self) -> Set[Any]:
        return self._found.backward.keys()

    def _charge(self, at: Any, sharing: Mapping[Any, int]) -> float:
        """Return what rounding at one key costs a cut, which adds up charges: a part of a gradient that is shared."""
        found = self._found
        gradient = found.forward[at] + found.backward[at] / max(sharing.get(found.handed[at], 1), 1)
        return _LOSS * found.losses[at] / self._whole[0] + _GRADIENT * gradient / self._whole[1]

    def _parts(self, rounded: Sequence[tuple[Any, ...]]) -> tuple[list[float], list[float]]:
        keys = {at for keys in rounded for at in keys}
        return [self._found.losses.get(at, 0.0) for at in keys], self._found.gradients(rounded)

    def costs(self, device: str, weight: float) -> Penalties:
        """Return what a cut is told that things cost: the bytes of casts, and errors, weighted by bytes of the unit."""
        scaled = {at: weight * self._bytes * v for at, v in self.charges.items()}
        return Penalties(
            ByteCosts(device), {key: v for key, v in scaled.items() if isinstance(key, str)},
            {key: v for key, v in scaled.items() if isinstance(key, tuple) and len(key) == 2},
        )  # fmt: skip

    def rounded(self, name: str) -> list[tuple[Any, ...]]:
        """Return the keys of what a policy rounds, a tuple for each place."""
        found = {site.place: keys_of(site) for site in self._step.rounding(name)}
        return list(found.values())

    def square(self, rounded: Sequence[tuple[Any, ...]]) -> float:
        """Return the square of the error of roundings, in units of that of the unit."""
        loss, gradient = map(sum, self._parts(rounded))
        return float(_LOSS * loss / self._whole[0] + _GRADIENT * gradient / self._whole[1])
