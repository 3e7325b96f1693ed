"""After many skipped steps in a row: which node overflows first, and with `on_collapse="recolour"` a run that goes on.

    scale 65536, skipped; 32768, skipped; ...; 1, skipped        the window is run again, once
    fc2/linear#0 overflows: FP32 from now on                      a log line, and an entry of `switches`
    scale 65536                                                   as it was before the first of the skipped steps

While steps succeed it costs nothing: what says that a step was skipped is the scaler's own flag.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from passes.contract.policy import Policy

from ..diagnose.step import GivenStep
from ..ranges.overflow import Overflow, overflow_of
from .scaler import LossScaler
from .state import TrainState
from .window import Window

logger = logging.getLogger("fxamp")


def first_overflow(step: TrainState, window: Window, *, cured: bool) -> Overflow | None:
    """Run again what is left of a window's batches, and return the first overflow; None if it cannot be told.

    Its cure, if that is wanted too, takes more runs. The step is between two windows.
    """
    model = step.model.module if isinstance(step.model, nn.parallel.DistributedDataParallel) else step.model
    # Ranks make different numbers of runs, so that none may exchange anything.
    if step.ranks.spread or (step.ranks.replicas and model is step.model):
        return None
    given = GivenStep(model, tuple(window.batches), step.loss_fn, step)
    try:
        found = (overflow_of(given, batch, float(window.scale), cured=cured) for batch in window.batches)
        return next((one for one in found if one is not None), None)
    except Exception as e:  # the error of many skipped steps is raised then
        logger.warning("fxamp: the batches were not run again: %s", e)
        return None


def recolour(step: TrainState, window: Window, found: Overflow | None, switch: Callable[[Policy], object]) -> bool:
    """Run in FP32 what overflowed in a window, or lower the loss scale if that is enough; say whether there is a cure.

    Every rank has to call this, with what it found; what overflows on one of them is FP32 on all.
    """
    mine = (math.inf, None, "") if found is None else (found.largest_scale, found.policy, str(found))
    told: list[Any] = [mine]
    for group in step.ranks.groups:
        told = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, mine, group=group)
    told = [one for one in told if one[2]]
    fits = min((largest for largest, _, _ in told), default=0.0)
    name, before = type(step.model).__name__, _before_skips(step.scaler)
    if before and 1 <= fits < float(window.scale):
        _set(step.scaler, fits)
        logger.warning("fxamp: %s runs on with the loss scale %g: %s", name, fits, told[0][2])
        return True
    policies = [policy for _, policy, _ in told]
    if not policies or None in policies:
        return False
    switch(replace(policies[0], ops=tuple({pair for policy in policies for pair in policy.ops})))
    _set(step.scaler, before)
    logger.warning(
        "fxamp: %s runs on, after %d skipped steps, with what overflowed in FP32%s: %s", name,
        step.scaler.max_skips or step.max_skips, f" and the loss scale {before:g}" if before else "", told[0][2],
    )  # fmt: skip
    return True


def _before_skips(scaler: LossScaler) -> float:
    """Return the loss scale before the last skipped steps in a row; 0 where it does not change."""
    if scaler.kind != "dynamic":
        return 0.0
    history = list(scaler.history)
    while len(history) > 1 and history[-2].skipped:
        history.pop()
    return history[-1].scale if history else 0.0


def _set(scaler: LossScaler, scale: float) -> None:
    """Begin anew with a loss scale, 0 for the present one, and with no step skipped."""
    if scaler.is_enabled():
        state = scaler.state_dict()
        state["fxamp"]["overflows_in_a_row"] = 0
        scaler.load_state_dict({**state, "scale": scale or state["scale"], "_growth_tracker": 0})
