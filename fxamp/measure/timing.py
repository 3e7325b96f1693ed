"""Time single ops on the device at hand, forward and backward, for `cost="measured"`.

Other load on the machine can only make a call slower, so the minimum counts. All calls are timed in several sweeps. A
sweep repeats a call until times near its minimum have occurred several times, which takes longer on a busy machine. If
the minimum did not settle, or if the thread had to wait for a processor, the time is used once and not cached. All
other times are read from `cost_cache` from then on.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from passes._torch import pytree
from passes.contract.devices import DEVICES

from ..observe.snapshot import same_random_state
from . import cost_cache
from .costs import Call, Filler

SWEEPS = 3
PATIENCE = 0.06  # seconds that a call is timed for in one sweep, if its least time does not come up again
SETTLED = 5  # samples near the least one end a sweep
ENOUGH = 3  # samples near the least one, over all sweeps, make a time that is kept
ALONE = 0.9  # a thread with a CPU to itself runs for at least this share of the wall time


class OpTimer:
    """Gives the nanoseconds of calls on a device; calls timed before come from the cache."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self, calls: Sequence[Call]) -> dict[Call, int]:
        """Return the nanoseconds of each call that can run, and show a progress bar."""
        known = cost_cache.load(self.device)
        missing = [call for call in calls if call.key not in known]
        if missing:
            samples, quiet = self._measure(missing)
            known |= {key: min(quiet[key] or taken) for key, taken in samples.items()}
            cost_cache.save(self.device, {key: min(taken) for key, taken in quiet.items() if _near(taken) >= ENOUGH})
        return {call: known[call.key] for call in calls if call.key in known}

    def _measure(self, calls: Sequence[Call]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Return all samples of each call, in nanoseconds, and those of them from sweeps that nothing disturbed."""
        samples: dict[str, list[int]] = {call.key: [] for call in calls}
        quiet: dict[str, list[int]] = {call.key: [] for call in calls}
        with training_alone(), tqdm(total=SWEEPS * len(calls), desc="measuring ops", unit="op") as progress:
            for call in list(calls) * SWEEPS:
                progress.update()
                if call.key not in samples:
                    continue
                try:
                    run = self._prepare(call)
                    start = _clocks()
                    taken = self._time(run)
                except Exception:  # whatever a kernel raises on a dtype that it lacks: this op is not measured
                    del samples[call.key], quiet[call.key]
                    continue
                samples[call.key] += taken
                if self.device != "cpu" or not _waited(start, _clocks()):
                    quiet[call.key] += taken
        return samples, quiet

    def _time(self, run: Callable[[], object]) -> list[int]:
        """Time one call, forward and backward, several times; return the nanoseconds of each."""
        run()
        taken: list[int] = []
        end, synchronize = time.perf_counter() + PATIENCE, DEVICES[self.device].synchronize
        while len(taken) < 2 or (_near(taken) < SETTLED and time.perf_counter() < end):
            synchronize()
            start = time.perf_counter_ns()
            run()
            synchronize()
            taken.append(time.perf_counter_ns() - start)
        return taken

    def _prepare(self, call: Call) -> Callable[[], object]:
        """Return a function that makes the call and runs its backward."""
        args, kwargs = pytree.tree_map(
            lambda leaf: self._filled(leaf) if isinstance(leaf, Filler) else leaf, (list(call.args), dict(call.kwargs))
        )
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]

        def outputs() -> list[Tensor]:
            leaves = pytree.tree_leaves(call.function(*args, **kwargs))
            return [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]

        gradients = [torch.ones_like(t) for t in outputs()]
        if not gradients:
            return outputs
        return lambda: torch.autograd.grad(outputs(), inputs, gradients, allow_unused=True)

    def _filled(self, filler: Filler) -> Tensor:
        """Return a tensor: ones, or zeros where it may be an index."""
        size = 1 + sum((n - 1) * step for n, step in zip(filler.shape, filler.stride, strict=True))
        index = not filler.dtype.is_floating_point and filler.dtype is not torch.bool
        storage = torch.full((max(size, 1),), 0 if index else 1, dtype=filler.dtype, device=self.device)
        return storage.as_strided(filler.shape, filler.stride).requires_grad_(filler.requires_grad)


def _clocks() -> tuple[int, int]:
    """Return the nanoseconds that have passed, and those that this thread has run."""
    return time.perf_counter_ns(), time.thread_time_ns()


def _waited(start: tuple[int, int], end: tuple[int, int]) -> bool:
    """Say whether the thread had to wait for a processor between two readings of the clocks."""
    return end[1] - start[1] < ALONE * (end[0] - start[0])


def _near(taken: Sequence[int]) -> int:
    """Return how many samples are within a tenth of the least one."""
    return sum(t <= 1.1 * min(taken) for t in taken) if taken else 0


@contextlib.contextmanager
def training_alone() -> Iterator[None]:
    """Run with gradients, without warnings, and leave the random states as they were."""
    with warnings.catch_warnings(), same_random_state(), torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")
        yield
