"""Checks of a TrainStep before each micro-batch, across ranks before the first one, and after its first forward."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from passes.contract.devices import DEVICES

from ..dynamo import compiled
from ..view.view import is_view
from .checkpoint import settings
from .given import policies_of
from .ranks.refused import refuse_unfit_ranks
from .ranks.same import compare

if TYPE_CHECKING:
    from .step import TrainStep

logger = logging.getLogger("fxamp")


def begin(step: TrainStep) -> None:
    """Refuse settings that ranks cannot share, or that differ between ranks. Only the first call checks.

    Raises:
        PolicyError: There is such a setting; all ranks raise it.
    """
    if step._begun:
        return
    scaled = step.scaler.is_enabled() or step._undecided
    refuse_unfit_ranks(step.ranks, accumulate_steps=step.accumulate_steps, on_overflow=step.on_overflow, scaled=scaled)
    if step.ranks.groups or (step.ranks.shared and dist.get_world_size() > 1):
        compare(_told(step), step.ranks.groups, step.model)
    step._begun = True


def before_micro_batch(step: TrainStep) -> None:
    """Make the checks of each micro-batch, and of the first one `begin`'s.

    Raises:
        PolicyError: Ranks cannot share the settings, or gradients were cleared within a window.
    """
    begin(step)
    step._by_hand.check(step.optimizers, step.schedulers, step._position, step.accumulate_steps)
    _warn_of_eval(step)


def warn_of_fp32(step: TrainStep) -> None:
    """Say that a model is not converted, once, after its first forward: it trains in FP32, perhaps by mistake."""
    if step._seen:
        return
    step._seen = True
    if any(torch.is_autocast_enabled(device) for device in DEVICES) or is_converted(step):
        return
    name = type(step.model).__name__
    logger.warning(
        "fxamp: TrainStep trains %s in FP32, since it is not converted: give it what fxamp.convert(model, ...) or "
        "fxamp.compile(model) returned. Keep the optimizer: the parameters are the same.", name,
    )  # fmt: skip


def _warn_of_eval(step: TrainStep) -> None:
    """Warn each time that a model was switched to eval mode and then trains: that may be a mistake."""
    if step._training is step.model.training:
        return
    step._training = step.model.training
    if not step.model.training:
        logger.warning(
            "fxamp: TrainStep trains %s in eval mode: dropout is off and statistics of batch norms stay. Call train() "
            "on the module that the step was given; that of its original does not switch a converted module.",
            type(step.model).__name__,
        )


def is_converted(step: TrainStep) -> bool:
    """Say whether a step's model, or a part of it, is converted, or will be by the step."""
    return any(map(is_view, step.model.modules())) or bool(policies_of(step.model))


def _told(step: TrainStep) -> dict[str, Any]:
    """Return the settings that all ranks must share, by the names that users know."""
    return {
        "the policy": _policies(step),
        "the number of ranks": [dist.get_world_size(group) for group in step.ranks.groups],
        "the loss scaler": "undecided" if step._undecided else {"kind": step.scaler.kind, **step.scaler.state_dict()},
        **settings(step),
        "max_grad_norm": step.max_grad_norm,
        "the number of finished windows": step.windows,
    }


def _policies(step: TrainStep) -> list[str]:
    """Return the policies by which parts of the model were, or will be, converted."""
    found = [compiled.asked_of(module) for module in step.model.modules()]
    return [str(policy) for policy in found if policy is not None]
