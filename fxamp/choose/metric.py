"""`fxamp.tune(metric=, bound=)`: few nodes in FP32 that bring a metric of the user's under a bound.

Nodes are ordered by how much their roundings move the loss, and the first k of them run in FP32:

    k = 0, k = all                      is there anything to do, and can it be done
    bisection over k                    log2(nodes) runs
    without a half of what is left      a few runs more, since the order is a guess
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from passes.contract.errors import FxampError, PolicyError
from passes.contract.plan import Plan
from passes.contract.policy import Policy

from ..convert import convert, plan_of
from ..diagnose.step import Step
from ..error.variances import moved_by
from ..observe.watch import LOW_NAMES
from ..observe.workload import as_before

_MORE = 6  # runs beside those of the bisection, and the first two


def under_bound(step: Step, policy: Any, metric: Callable[[Any], Any], bound: float) -> Plan:
    """Return the plan of a small set of nodes that, run in FP32, bring a metric under a bound; see `fxamp.tune`."""
    if not callable(metric):
        raise PolicyError(f"metric= is a function of a view that returns a number, not {type(metric).__name__}.")
    if not isinstance(bound, (int, float)) or isinstance(bound, bool) or not math.isfinite(bound):
        raise PolicyError(f"bound is a finite number, not {bound!r}.")
    return _Minimum(step, policy, metric, float(bound)).plan()


class _Minimum:
    """The search for one set; it knows what was measured."""

    def __init__(self, step: Step, policy: Policy | str | None, metric: Callable[[Any], Any], bound: float):
        asked = step.policy(str(policy or step.view_policy or "O1"))
        self._step, self._policy, self._metric, self._bound = step, asked, metric, bound
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
            model = self._step.author
            with as_before(model):
                asked = replace(self._policy, ops=tuple(ops.items()))
                view = convert(model, *self._step.example, policy=asked, check=False)
                plan = plan_of(view)
                self._known[key] = _number(self._metric(view)), plan
        return self._known[key]

    def _ordered(self) -> list[str]:
        """Return the nodes that run low, those first whose roundings move the loss most."""
        low = [d.key for d in self._measured(())[1].decisions if d.colour in LOW_NAMES]
        moved: dict[str, float] = {}
        try:
            for one in moved_by(self._step, str(self._policy)):
                moved[one.site.key] = moved.get(one.site.key, 0.0) + one.square
        except FxampError:  # there is no loss
            moved = {}
        return sorted(dict.fromkeys(low), key=lambda key: -moved.get(key, 0.0))

    def _found(self, fp32: Sequence[str]) -> Plan:
        value, plan = self._measured(fp32)
        note = (
            f"tune: the metric is {value:.6g}, at most {self._bound:.6g}, with {len(fp32)} more nodes in FP32; "
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
