"""The census of calls of a TrainStep that run anyway: the first one, and the next one after a graph was captured."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from passes.contract.errors import PolicyError, VerificationError

from ...capture.compiled import runner_of
from ...convert import converted_in
from ..watch import Watch
from .census import Census, census_of
from .graphs import watched_graphs
from .step import Step

How = Literal["warn", "error"]


class CallCensus:
    """Watches calls when there are new graphs, and says what did not run as planned.

    Args:
        how: "warn", or "error", which raises.

    Attributes:
        last: the last census; None before the first.

    Raises:
        PolicyError: `how` is something else.
    """

    def __init__(self, how: How) -> None:
        if how not in ("warn", "error"):
            raise PolicyError(f'census must be "warn", "error" or None, got {how!r}')
        self._how, self._graphs = how, -1
        self.last: Census | None = None

    def is_due(self, model: nn.Module) -> bool:
        """Say whether graphs were captured since the last census, or there was none."""
        return self._graphs != _graphs(model)

    def __call__(self, step: Any, run: Callable[[], Any]) -> Any:
        """Run a call of a TrainStep under a watch, and return its result.

        Raises:
            VerificationError: something did not run as planned, and `how` is "error".
        """
        parts = converted_in(step.model)
        watch = Watch(step.model, CallCensus.__call__.__code__)
        with watched_graphs([part for _, part in parts]), watch:
            result = run()
        self._graphs = _graphs(step.model)
        ended = result.reason != "accumulating"
        seen = Step(watch, (), step.scaler, result.reason == "overflow", ended)
        self.last = found = census_of(step.model, dict(parts), seen)
        if found.differences:
            listed = "".join(f"\n  {d}" for d in found.differences[:5])
            text = f"{found.name}: {len(found.differences)} differences between what ran and the plan:{listed}"
            if self._how == "error":
                raise VerificationError(text)
            warnings.warn(text, stacklevel=3)
        return result


def _graphs(model: nn.Module) -> int:
    """Return the number of graphs of all views in a model."""
    runners = [runner for module in model.modules() if (runner := runner_of(module)) is not None]
    return sum(len(runner.entries) for runner in runners)
