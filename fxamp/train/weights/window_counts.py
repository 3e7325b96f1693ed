"""Count the casts, bytes and ops of a whole window of micro-batches, with weights cast once or at every use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...measure.counts import StepCounts, saved_bytes, step_counts
from .weights import WeightCasts


def window_counts(loss: Callable[[], Tensor], micro_batches: int, weights: WeightCasts | None = None) -> StepCounts:
    """Count the forwards and backwards of one window; the bytes saved for backward are those of one micro-batch.

    Args:
        loss: Computes the loss of a micro-batch. Gradients are None before, as after a step.
        micro_batches: In a window.
        weights: Which casts of weights are kept for it, if any are.
    """
    found = step_counts(lambda: last_loss(loss, micro_batches, weights))
    with torch.random.fork_rng(), _in_use(weights):
        saved = saved_bytes(loss)
    return replace(found, saved_bytes=saved)


def last_loss(loss: Callable[[], Tensor], micro_batches: int, weights: WeightCasts | None = None) -> Tensor:
    """Run a window up to its last backward, and return the loss for that; arguments as for `window_counts`."""
    with _in_use(weights):
        for _ in range(micro_batches - 1):
            loss().backward()
            if weights is not None:
                weights.after_backward()
        return loss()


def _in_use(weights: WeightCasts | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if weights is None else weights.window()
