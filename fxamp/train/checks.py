"""Checks of a TrainStep before each micro-batch, across ranks before the first one, and after its first forward."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from passes.contract.devices import DEVICES

from ..view.view import is_view
from .checkpoint import settings
from .given import policies_asked, policies_of
from .ranks.refused import refuse_unfit_ranks
from .ranks.same import compare
from .state import TrainState, trained_without_optimizer

logger = logging.getLogger("fxamp")


def begin(step: TrainState) -> None:
    """Refuse settings that ranks cannot share, or that differ between ranks. Only the first call checks.

    Raises:
        PolicyError: There is such a setting; all ranks raise it.
    """
    if "ranks" in step.said:
        return
    scaled = step.scaler.is_enabled() or step.undecided
    refuse_unfit_ranks(step.ranks, accumulate_steps=step.accumulate_steps, on_overflow=step.on_overflow, scaled=scaled)
    if step.ranks.groups or (step.ranks.shared and dist.get_world_size() > 1):
        compare(_told(step), step.ranks.groups, step.model)
    step.said.add("ranks")


def before_micro_batch(step: TrainState) -> None:
    """Make the checks of each micro-batch, and of the first one `begin`'s.

    Raises:
        PolicyError: Ranks cannot share the settings, or gradients were cleared within a window.
    """
    begin(step)
    step.by_hand.check(step.optimizers, step.schedulers, step.position, step.accumulate_steps)
    _warn_of_eval(step)


def warn_of_fp32(step: TrainState) -> None:
    """Say that a model is not converted, once, after its first forward: it trains in FP32, perhaps by mistake."""
    if "fp32" in step.said:
        return
    step.said.add("fp32")
    if any(torch.is_autocast_enabled(device) for device in DEVICES) or is_converted(step):
        return
    name = type(step.model).__name__
    logger.warning(
        "fxamp: TrainStep trains %s in FP32, since it is not converted: give it what fxamp.convert(model, ...) or "
        "fxamp.compile(model) returned. Keep the optimizer: the parameters are the same.", name,
    )  # fmt: skip


def _warn_of_eval(step: TrainState) -> None:
    """Warn each time that a model was switched to eval mode and then trains: that may be a mistake."""
    if step.model.training:
        step.said.discard("eval")
    elif "eval" not in step.said:
        step.said.add("eval")
        logger.warning(
            "fxamp: TrainStep trains %s in eval mode: dropout is off and statistics of batch norms stay. Call train() "
            "before.", type(step.model).__name__,
        )  # fmt: skip


def warn_of_settings(step: TrainState) -> None:
    """Name settings that look like mistakes: a scheduler made for epochs, and a model that is hardly trained."""
    left_out = trained_without_optimizer(step.model, step.optimizers)
    if left_out >= 0.5:
        logger.warning(
            "fxamp: no optimizer of this TrainStep trains %.0f %% of the trainable weights of %s: give it the other "
            "optimizers too, or call requires_grad_(False) on what stays.", 100 * left_out, type(step.model).__name__,
        )  # fmt: skip
    for scheduler in step.schedulers:
        length = next((getattr(scheduler, name) for name in _LENGTHS if hasattr(scheduler, name)), None)
        if isinstance(length, int) and _EPOCHS[0] <= length <= _EPOCHS[1]:
            logger.warning(
                "fxamp: %s steps after each window, and %d windows are few: if it counts epochs, leave it out of the "
                "TrainStep, and call scheduler.step() yourself after each epoch.", type(scheduler).__name__, length,
            )  # fmt: skip


_LENGTHS = ("step_size", "T_max", "T_0")  # after which a scheduler changes the rate, or begins again
_EPOCHS = (10, 300)  # as many steps as runs have epochs


def is_converted(step: TrainState) -> bool:
    """Say whether a step's model, or a part of it, is converted, or will be by the step."""
    return any(map(is_view, step.model.modules())) or bool(policies_of(step.model))


def _told(step: TrainState) -> dict[str, Any]:
    """Return the settings that all ranks must share, by the names that users know."""
    return {
        "the policy": policies_asked(step.model),
        "the number of ranks": [dist.get_world_size(group) for group in step.ranks.groups],
        "the loss scaler": "undecided" if step.undecided else {"kind": step.scaler.kind, **step.scaler.state_dict()},
        **settings(step),
        "max_grad_norm": step.max_grad_norm,
        "on_collapse": step.on_collapse,
        "the number of finished windows": step.windows,
    }
