"""`fxamp.bisect`: few nodes in FP32 that bring a metric of the user's under a bound.

Nodes are ordered by how much their roundings move the loss, and the first k of them run in FP32:

    k = 0, k = all                      is there anything to do, and can it be done
    bisection over k                    log2(nodes) runs
    without a half of what is left      a few runs more, since the order is a guess
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from passes.contract.errors import FxampError, PolicyError
from passes.contract.plan import Plan
from passes.contract.policy import Policy

from ...convert import convert, plan_of
from ...observe.workload import Loss, as_before, given_step
from ..error.runs import Subject
from ..error.variances import moved_by

_MORE = 6  # runs beside those of the bisection, and the first two


def bisect(
    model_or_step: Any, inputs: Any = None, target: Any = None, *, metric: Callable[[Any], Any], bound: float,
    loss: Loss = None, batches: Iterable[Any] | None = None, policy: Policy | str | None = None,
) -> Plan:  # fmt: skip
    """Find a small set of nodes that, run in FP32, bring a metric under a bound.

    The metric is measured at most log2(nodes) + 8 times, each time of a view of the model. The plan that comes back was
    measured. The set is small rather than smallest: if any one node of it can run low, nobody has tried each of them.

    Args:
        model_or_step: A model, a view of the whole model, or a TrainStep.
        inputs: A tensor or a tuple for `model(*inputs)`, or a mapping for `model(**inputs)`, with the shapes that the
            model takes. By their loss the nodes are ordered.
        target: The second argument of the loss.
        metric: A function of a view that returns a number, such as an error on validation data; smaller is better, and
            NaN is worst. It may call train() and eval(); what it does to the model is undone.
        bound: What the metric has to be at most.
        loss: A function of the output, or, with a target, of output and target. None takes the output's own loss. A
            TrainStep brings its own. Where there is no loss, nodes are ordered as they run.
        batches: Inputs, or pairs (inputs, target), in the place of `inputs`.
        policy: What runs low otherwise; None is that of the view, else O1.

    Returns:
        The plan for `fxamp.convert(model, plan=plan)`. Its policy names the nodes that run in FP32.

    Raises:
        PolicyError: The bound is no finite number; the metric gives none; or it is not under the bound even with all
            nodes in FP32, and the message has what it is then.

    Example:
        >>> with torch.no_grad():
        ...     exact = model(x)
        >>> def distance(view):
        ...     with torch.no_grad():
        ...         return (view(x) - exact).norm() / exact.norm()
        >>> plan = fxamp.bisect(model, x, metric=distance, bound=1e-3)
        >>> float(distance(fxamp.convert(model, plan=plan))) <= 1e-3
        True
    """
    if not isinstance(bound, (int, float)) or isinstance(bound, bool) or not math.isfinite(bound):
        raise PolicyError(f"bound is a finite number, not {bound!r}.")
    given = given_step(model_or_step, inputs, target, loss=loss, batches=batches)
    search = _Search(Subject(given), policy, metric, float(bound))
    return search.plan()


class _Search:
    """The search for one set; it knows what was measured."""

    def __init__(self, subject: Subject, policy: Policy | str | None, metric: Callable[[Any], Any], bound: float):
        asked = subject.policy(str(policy or subject.own or "O1"))
        self._subject, self._policy, self._metric, self._bound = subject, asked, metric, bound
        self._known: dict[frozenset[str], tuple[float, Plan]] = {}

    def plan(self) -> Plan:
        """Return the plan."""
        if self._keeps(()):
            return self._found(())
        nodes = self._ordered()
        if not self._keeps(nodes):
            raise PolicyError(
                f"the metric is {self._measured(nodes)[0]:.6g} with all {len(nodes)} nodes in FP32, and "
                f"{self._measured(())[0]:.6g} with none: no set brings it to {self._bound:.6g}."
            )
        low, high = 0, len(nodes)  # too few, and enough
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._keeps(nodes[:middle]) else (middle, high)
        return self._found(self._thinned(nodes[:high]))

    def _thinned(self, nodes: Sequence[str]) -> Sequence[str]:
        """Leave out halves, then quarters, and so on, for as long as there are runs left."""
        part, runs = (len(nodes) + 1) // 2, 0
        while part and runs < _MORE and len(nodes) > 1:
            for start in range(0, len(nodes), part):
                fewer = [*nodes[:start], *nodes[start + part :]]
                runs += frozenset(fewer) not in self._known
                if runs > _MORE or (fewer and self._keeps(fewer)):
                    nodes = fewer if runs <= _MORE else nodes
                    break
            else:
                part //= 2
        return nodes

    def _keeps(self, fp32: Sequence[str]) -> bool:
        return self._measured(fp32)[0] <= self._bound

    def _measured(self, fp32: Sequence[str]) -> tuple[float, Plan]:
        """Return the metric with some nodes in FP32, and the plan."""
        key = frozenset(fp32)
        if key not in self._known:
            ops = {**dict(self._policy.ops), **dict.fromkeys(fp32, "fp32")}
            model = self._subject.model
            with as_before(model):
                asked = replace(self._policy, ops=tuple(ops.items()))
                view = convert(model, *self._subject.given.example, policy=asked, check=False)
                plan = plan_of(view)
                self._known[key] = _number(self._metric(view)), plan
        return self._known[key]

    def _ordered(self) -> list[str]:
        """Return the nodes that run low, those first whose roundings move the loss most."""
        low = [d.key for d in self._measured(())[1].decisions if d.colour in ("float16", "bfloat16")]
        moved: dict[str, float] = {}
        try:
            for one in moved_by(self._subject, str(self._policy)):
                moved[one.site.key] = moved.get(one.site.key, 0.0) + one.square
        except FxampError:  # there is no loss
            moved = {}
        return sorted(dict.fromkeys(low), key=lambda key: -moved.get(key, 0.0))

    def _found(self, fp32: Sequence[str]) -> Plan:
        value, plan = self._measured(fp32)
        note = (
            f"bisect: the metric is {value:.6g}, at most {self._bound:.6g}, with {len(fp32)} more nodes in FP32; "
            f"it was measured {len(self._known)} times"
        )
        return replace(plan, notes=(*plan.notes, note))


def _number(value: Any) -> float:
    """Return a metric as a number, NaN as infinity."""
    try:
        found = float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PolicyError(f"metric= returns a number, not {type(value).__name__}.") from error
    return math.inf if math.isnan(found) else found
