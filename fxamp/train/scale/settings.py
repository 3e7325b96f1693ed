"""The settings that a loss scaler takes, and the parameters that it trains: all others are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from numbers import Integral, Real
from typing import NamedTuple

import torch

from passes.contract.errors import FP32_PARAMETERS, PolicyError

LOW_DTYPES = (torch.float16, torch.bfloat16)
# Between these a scale and its reciprocal are both finite FP32 numbers.
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-127, torch.finfo(torch.float32).max
_LARGEST_COUNT = 2**31 - 1  # what `torch._amp_update_scale_` counts with


class Extensions(NamedTuple):
    """The settings that GradScaler does not have."""

    dynamic: bool
    min_scale: float | None
    max_scale: float | None
    hysteresis: int
    max_skips: int | None

    def check(self) -> Extensions:
        """Return self, or raise a PolicyError that names an invalid setting."""
        if not isinstance(self.dynamic, bool):
            raise PolicyError(f"dynamic must be True or False, got {self.dynamic!r}")
        if self.min_scale is not None:
            require_scale("min_scale", self.min_scale)
        if self.max_scale is not None:
            require_scale("max_scale", self.max_scale)
        if self.min_scale is not None and self.max_scale is not None and self.min_scale > self.max_scale:
            raise PolicyError(f"min_scale must be at most max_scale={self.max_scale!r}, got {self.min_scale!r}")
        require_count("hysteresis", self.hysteresis)
        if self.max_skips is not None:
            require_count("max_skips", self.max_skips)
        return self

    def clamp(self, scale: float) -> float:
        """Bring a scale within the bounds."""
        if self.min_scale is not None and scale < self.min_scale:
            return self.min_scale
        if self.max_scale is not None and scale > self.max_scale:
            return self.max_scale
        return scale


def refuse_low_parameters(named_parameters: Iterable[tuple[str, torch.Tensor]], opening: str = "") -> None:
    """Refuse trainable float16 and bfloat16 parameters, in which small updates vanish.

    Raises:
        PolicyError: There is one. The first three are named; `opening` begins the message, with {kind} filled in.
    """
    trainable_low = ((name, p) for name, p in named_parameters if p.requires_grad and p.dtype in LOW_DTYPES)
    found = list(islice(trainable_low, 3))
    if not found:
        return
    kind = "FP16" if found[0][1].dtype == torch.float16 else "BF16"
    listing = ", ".join(f"{name} ({str(param.dtype).removeprefix('torch.')})" for name, param in found)
    raise PolicyError(
        f"{opening.format(kind=kind)}trainable parameters have a low dtype, first {listing}. Updates below the "
        f"resolution of that dtype vanish. {FP32_PARAMETERS}"
    )


def require_number(name: str, value: object, legal: str, test: Callable[[float], bool]) -> None:
    """Raise a PolicyError unless `value` is a real number, not a bool, that passes `test`; NaN passes no comparison."""
    if isinstance(value, bool) or not isinstance(value, Real) or not test(float(value)):
        raise PolicyError(f"{name} must be {legal}, got {value!r}")


def require_scale(name: str, value: object) -> None:
    """Raise a PolicyError unless `value` can be a loss scale."""
    legal = "a number from 2**-127 to 3.4e38, so that it and its reciprocal are finite in float32"
    require_number(name, value, legal, lambda x: _SMALLEST_SCALE <= x <= _LARGEST_SCALE)


def require_count(name: str, value: object) -> None:
    """Raise a PolicyError unless `value` is a positive int."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) <= _LARGEST_COUNT:
        raise PolicyError(f"{name} must be an int from 1 to {_LARGEST_COUNT}, got {value!r}")


def require_growth_factor(value: object) -> None:
    """Raise a PolicyError unless `value` can be a growth factor."""
    legal = "a finite number greater than 1 (dynamic=False keeps the scale as it is)"
    require_number("growth_factor", value, legal, lambda x: 1 < x < float("inf"))


def require_backoff_factor(value: object) -> None:
    """Raise a PolicyError unless `value` can be a backoff factor."""
    legal = "a number between 0 and 1, both excluded (dynamic=False keeps the scale as it is)"
    require_number("backoff_factor", value, legal, lambda x: 0 < x < 1)
