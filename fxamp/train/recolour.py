"""`on_collapse="recolour"`: after many skipped steps in a row, run in FP32 what overflowed, and go on.

    scale 65536, skipped; 32768, skipped; ...; 1, skipped        the batch is run again, once
    fc2/linear#0 overflows: FP32 from now on                      a log line, and an entry of `switches`
    scale 65536                                                   as it was before the first of the skipped steps

While steps succeed it costs nothing: what says that a step was skipped is the scaler's own flag.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from passes.contract.policy import Policy

from ..trust.given_step import GivenStep
from ..trust.ranges.overflow import Overflow, overflow_of
from .scale.scaler import LossScaler
from .state import TrainState

logger = logging.getLogger("fxamp")


def recolour(
    step: TrainState, batches: Sequence[tuple[Any, Any]], scale: float, switch: Callable[[Policy], object]
) -> bool:
    """Run in FP32 what overflowed in a window, or lower the loss scale if that is enough; say whether there is a cure.

    Every rank has to call this; what overflows on one of them is FP32 on all.

    Args:
        step: between two windows.
        batches: inputs and target of the micro-batches of the window.
        scale: the loss scale of the window.
        switch: lets the step follow another policy.
    """
    found = None if step.ranks.spread else _found(step, batches, scale)
    mine = (math.inf, None, "") if found is None else (found.largest_scale, found.policy, str(found))
    told: list[Any] = [mine]
    for group in step.ranks.groups:
        told = [None] * dist.get_world_size(group)
        dist.all_gather_object(told, mine, group=group)
    told = [one for one in told if one[2]]
    fits = min((largest for largest, _, _ in told), default=0.0)
    name, before = type(step.model).__name__, _before_skips(step.scaler)
    if before and 1 <= fits < scale:
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


def _found(step: TrainState, batches: Sequence[tuple[Any, Any]], scale: float) -> Overflow | None:
    """Return the first overflow of a window; None if it cannot be told."""
    # Ranks make different numbers of runs, so that none may exchange anything.
    model = step.model.module if isinstance(step.model, nn.parallel.DistributedDataParallel) else step.model
    given = GivenStep(model, tuple(batches), step.loss_fn, step)
    try:
        found = (overflow_of(given, batch, scale) for batch in batches)
        return next((one for one in found if one is not None), None)
    except Exception as e:  # the error of many skipped steps is raised then
        logger.warning("fxamp: the batches were not run again: %s", e)
        return None


def _before_skips(scaler: LossScaler) -> float:
    """Return the loss scale before the last skipped steps in a row; 0 where it does not change."""
    if not scaler.is_enabled() or scaler.kind != "dynamic":
        return 0.0
    history = list(scaler.history)
    while len(history) > 1 and history[-2].skipped:
        history.pop()
    return history[-1].scale if history else 0.0


def _set(scaler: LossScaler, scale: float) -> None:
    """Begin anew with a loss scale, 0 for the present one, and with no step skipped."""
    if not scaler.is_enabled():
        return
    state = scaler.state_dict()
    state["fxamp"]["overflows_in_a_row"] = 0
    scaler.load_state_dict({**state, "scale": scale or state["scale"], "_growth_tracker": 0})
