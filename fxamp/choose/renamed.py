"""The names that three diagnostics had before; they are accepted for a release, with a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from ..error.measure import measure_error
from .compare import compare
from .tune import tune

F = TypeVar("F", bound=Callable[..., Any])


def _before(name: str, function: F, now: str, *needs: str) -> F:
    """Return a function under the name that it had before; of one that was another one then, with what that needs."""

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
