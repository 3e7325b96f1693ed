"""Count the casts, bytes and ops of a training step, and time steps side by side.

The counts are exact and the same on every run; compare times only as ratios, within one call of `laps`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..observe.interpret import Ops
from ..observe.watch import casts_in


@dataclass(frozen=True)
class StepCounts:
    """Counts of one training step: dtype casts, bytes they read and write, bytes saved for backward, ops dispatched."""

    casts: int
    cast_bytes: int
    saved_bytes: int
    ops: int


class _Counter(Ops):
    """Counts ops, and among them those that change a floating dtype; a batched copy is one cast."""

    def __init__(self) -> None:
        super().__init__(self._count)
        self.casts = self.cast_bytes = self.ops = 0

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        self.ops += 1
        casts = casts_in(func, args, out)
        self.casts += bool(casts)
        self.cast_bytes += sum(source.nbytes + to.nbytes for source, to in casts)
        return out


def step_counts(fn: Callable[[], Tensor]) -> StepCounts:
    """Count one forward of `fn`, which returns the loss, and its backward, if it has one.

    `fn` runs twice, once for the casts and once for what it saves, on the same random numbers; the generators are
    restored. Gradients are left in `.grad`. A compiled function cannot be counted: under a dispatch mode
    `torch.compile` runs the original model, so count on the emitted GraphModule.
    """
    counts = op_counts(fn)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return replace(counts, saved_bytes=saved_bytes(fn))


def op_counts(fn: Callable[[], Tensor]) -> StepCounts:
    """Count one forward and backward as `step_counts` does, but for what is saved, which is 0: `fn` runs once."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with _Counter() as counter:
            loss = fn()
            if loss.requires_grad:
                loss.backward()
    return StepCounts(counter.casts, counter.cast_bytes, 0, counter.ops)


def saved_bytes(fn: Callable[[], Tensor]) -> int:
    """Add up the distinct storages that the forward of `fn` saves for backward, parameters apart."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = fn()
    # The graph had to live until here: a freed storage's address may be given out again.
    del loss
    return sum(storages.values())


def window_counts(loss: Callable[[], Tensor], micro_batches: int, weights: Any = None) -> StepCounts:
    """Count the forwards and backwards of one window; the bytes saved for backward are those of one micro-batch.

    Gradients are None before, as after a step. If casts of weights are kept, `weights` is that of a TrainStep.
    """
    found = step_counts(lambda: last_loss(loss, micro_batches, weights))
    with torch.random.fork_rng(), contextlib.nullcontext() if weights is None else weights.window():
        return replace(found, saved_bytes=saved_bytes(loss))


def last_loss(loss: Callable[[], Tensor], micro_batches: int, weights: Any = None) -> Tensor:
    """Run a window up to its last backward, and return the loss for that; arguments as for `window_counts`."""
    with contextlib.nullcontext() if weights is None else weights.window():
        for _ in range(micro_batches - 1):
            loss().backward()
        return loss()


def laps(variants: Mapping[str, Callable[[], object]], rounds: Iterable[object]) -> dict[str, list[float]]:
    """Return the seconds of each variant in each round, in which they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in rounds:
        for name, run in variants.items():
            _synchronize()
            start = time.perf_counter()
            run()
            _synchronize()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
