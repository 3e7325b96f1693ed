"""Checks before the first micro-batch of a step that several ranks share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..dynamo import compiled
from .checkpoint import settings
from .ranks.refused import refuse_unfit_ranks
from .ranks.same import compare

if TYPE_CHECKING:
    from .step import TrainStep


def begin(step: TrainStep) -> None:
    """Refuse settings that ranks cannot share, or that differ between ranks. Checked once; a single rank passes.

    Raises:
        PolicyError: There is such a setting; all ranks raise it.
    """
    if step._begun:
        return
    scaled = step.scaler.is_enabled() or step._undecided
    refuse_unfit_ranks(step.ranks, accumulate_steps=step.accumulate_steps, on_overflow=step.on_overflow, scaled=scaled)
    if step.ranks.groups:
        compare(_told(step), step.ranks.groups)
    step._begun = True


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
    """Return the policies that parts of the model were converted by, or are to be."""
    plans = [getattr(module, "plan", None) for module in step.model.modules()]
    found = [getattr(plan, "policy", None) for plan in plans]
    found += [compiled.asked_of(module) for module in step.model.modules()]
    if step.compiled is not None:
        found.append(getattr(step.compiled.settings.backend, "policy", None))
    return [str(policy) for policy in found if policy is not None]
