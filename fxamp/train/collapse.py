"""After many skipped steps in a row: which node overflows first, and the policy that cures it.

    scale 65536, skipped; 32768, skipped; ...; 1, skipped        the last window is run again, once
    fc2/linear#0 overflows                                        ScaleCollapseError.overflow, with its policy

While steps succeed it costs nothing: what says that a step was skipped is the scaler's own flag.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from ..diagnose.step import Step
from ..errors import ScaleCollapseError
from ..ranges.overflow import Overflow, overflow_of
from .window import Window

if TYPE_CHECKING:
    from .step import TrainStep

logger = logging.getLogger("fxamp")


def with_overflow(error: ScaleCollapseError, step: TrainStep, window: Window) -> ScaleCollapseError:
    """Return the error of many skipped steps with the first overflow in it, if it can be told; the window is closed."""
    found = _on_all_ranks(step, _first_overflow(step, window))
    if found is None:
        return error
    first, *_ = str(found).splitlines()
    error = ScaleCollapseError(f"{error} The first overflow is {first}.")
    error.overflow = found
    return error


def _first_overflow(step: TrainStep, window: Window) -> Overflow | None:
    """Run again what is left of a window's batches, and return the first overflow; None if it cannot be told."""
    model = step.model.module if isinstance(step.model, nn.parallel.DistributedDataParallel) else step.model
    # Ranks make different numbers of runs, so that none may exchange anything.
    if step.ranks.spread or (step.ranks.replicas and model is step.model):
        return None
    window_step = Step(model, tuple(window.batches), step.loss_fn, step)
    try:
        found = (overflow_of(window_step, batch, float(window.scale)) for batch in window.batches)
        return next((one for one in found if one is not None), None)
    except Exception as e:  # the error of many skipped steps is raised then
        logger.warning("fxamp: the batches were not run again: %s", e)
        return None


def _on_all_ranks(step: TrainStep, found: Overflow | None) -> Overflow | None:
    """Return the first overflow of all ranks, whose policy cures those of all; None if no rank can tell one."""
    told: list[Any] = [found]
    for group in step.ranks.groups:
        told = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, found, group=group)
    overflows: list[Overflow] = [one for one in told if one is not None]
    if len(overflows) < 2:
        return next(iter(overflows), None)
    fits, policies = min(one.largest_scale for one in overflows), [one.policy for one in overflows]
    known = [policy for policy in policies if policy is not None]
    if len(known) < len(policies):
        return replace(overflows[0], policy=None, largest_scale=fits)
    ops = tuple({pair for policy in known for pair in policy.ops})
    return replace(overflows[0], policy=replace(known[0], ops=ops), largest_scale=fits)
