"""Time variants of a step side by side; compare times only as ratios, within one call of `interleaved`."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from fxamp.measure.counts import laps
from passes.contract.errors import FxampError


class Timing(NamedTuple):
    """Seconds of a step: the median, the distance between its quartiles, and all of them, round by round."""

    median: float
    spread: float
    rounds: tuple[float, ...]

    def over(self, other: Timing) -> tuple[float, float]:
        """Return the median of its ratios to another timing, round by round, and the width of its 95 % interval.

        The interval lies between two of the ratios, by the binomial distribution of how many are below the median: a
        few slow rounds do not widen it.
        """
        ratios = sorted(a / b for a, b in zip(self.rounds, other.rounds, strict=True))
        below = max(int(len(ratios) / 2 - 0.98 * len(ratios) ** 0.5), 0)
        return statistics.median(ratios), ratios[-1 - below] - ratios[below]


def interleaved(
    variants: Mapping[str, Callable[[], object]], rounds: int | Iterable[object], *, warmup: int = 2
) -> dict[str, Timing]:
    """Time each variant once per round, in turn, so that the machine's drift hits all alike.

    Args:
        variants: what to run, by name.
        rounds: how many rounds, or an iterable to run through, such as a progress bar.
        warmup: rounds at the beginning that are run but not counted.
    """
    taken = laps(variants, range(rounds) if isinstance(rounds, int) else rounds)
    return {name: _timing(seconds[warmup:]) for name, seconds in taken.items()}


def keep_freed_memory() -> None:
    """Let the allocator of this process keep what is freed, if it is glibc's.

    Otherwise page faults make a fifth of a step's time on a CPU, and depend on which variant ran before.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    trim_threshold, mmap_max = -1, -4  # mallopt(3)
    if mallopt is not None:
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


def _timing(seconds: list[float]) -> Timing:
    if len(seconds) < 2:
        raise FxampError(f"{len(seconds)} timed rounds are too few: give at least two more rounds than `warmup`")
    low, _, high = statistics.quantiles(seconds, n=4)
    return Timing(statistics.median(seconds), high - low, tuple(seconds))
