"""The names that three diagnostics had before; they are accepted for a release, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from passes.contract.plan import Plan

from ..error.measure import measure_error
from ..error.report import ErrorReport
from .compare import Comparison, compare
from .tune import tune


def verify(*args: Any, **kwargs: Any) -> ErrorReport:
    """Call `fxamp.measure_error`, which this was the name of; the loss is a tensor of one element.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", DeprecationWarning)
        ...     found = fxamp.verify(model, x, y, loss=nn.functional.cross_entropy, policies="O1")
        >>> found.measured
        True
    """
    _warn("verify", "measure_error")
    return measure_error(*args, **kwargs)


def advise(*args: Any, **kwargs: Any) -> Comparison:
    """Call `fxamp.compare`, which this was the name of; the loss is a tensor of one element.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", DeprecationWarning)
        ...     found = fxamp.advise(model, x, y, loss=nn.functional.cross_entropy, dtype="bf16")
        >>> found["O1"].casts > 0
        True
    """
    _warn("advise", "compare")
    return compare(*args, **kwargs)


def bisect(*args: Any, metric: Callable[[Any], Any], bound: float, **kwargs: Any) -> Plan:
    """Call `fxamp.tune` with a metric, a number or a tensor of one element, and a bound; this was the name of that.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", DeprecationWarning)
        ...     plan = fxamp.bisect(model, x, metric=lambda view: 0.0, bound=1.0)
        >>> plan.policy.level.value
        'O1'
    """
    _warn("bisect", "tune(metric=, bound=)")
    return tune(*args, metric=metric, bound=bound, **kwargs)


def _warn(before: str, now: str) -> None:
    warnings.warn(f"fxamp.{before} is now fxamp.{now}; the old name goes after 0.2.", DeprecationWarning, stacklevel=3)
