"""What costs beside bytes, as the compiler's callers tell it: the nanoseconds of calls, and what errors cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .policy import dtype_name


@dataclass(frozen=True)
class Filler:
    """A tensor to run an op on; it has strides, since the time of an op depends on them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        """Write it short: `float32[4, 8]/[8, 1]`, with a `'` where gradients flow."""
        name = dtype_name(self.dtype)
        return f"{name}{list(self.shape)}/{list(self.stride)}{chr(39) * self.requires_grad}"


@dataclass(frozen=True)
class Call:
    """One call to be timed, forward and backward.

    Attributes:
        key: all that its time depends on, apart from the machine, as text; calls with equal keys take equally long.
        args: its arguments, with a Filler for every tensor; likewise `kwargs`.
    """

    key: str
    function: Callable[..., Any] = field(compare=False)
    args: Any = field(compare=False)
    kwargs: Any = field(compare=False)


# Gives the nanoseconds of each call, forward and backward together; leaves out those that cannot run.
Timer = Callable[[Sequence[Call]], Mapping[Call, int]]


@dataclass(frozen=True)
class Penalties:
    """What each rounding costs, in the unit of the costs of the cut: bytes.

    Attributes:
        values: by key of a node: rounding its result.
        casts: by key of a reader and of what it reads: the cast down of an FP32 value, for this reader alone. An input
            of a graph has its name for a key.
    """

    values: Mapping[str, float]
    casts: Mapping[tuple[str, str], float]
