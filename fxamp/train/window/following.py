"""Schedulers and averages of the weights, which follow the steps that optimizers took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from .result import HeldBack


def follow(
    held_back: Mapping[Optimizer, HeldBack],
    model: nn.Module,
    schedulers: Sequence[LRScheduler],
    averages: Sequence[AveragedModel],
) -> Mapping[Optimizer, HeldBack]:
    """Let each scheduler step if its optimizer did, and each average take in the weights if any did.

    Args:
        held_back: Whether each optimizer was held back. The host waits for these flags only if something depends on
            them.
        model: Model whose weights are averaged.
        schedulers: Schedulers, each of one of the optimizers, which may have had no gradients.
        averages: Averages of the model.

    Returns:
        `held_back`, as plain bools if the host has waited.
    """
    if not schedulers and not averages:
        return held_back
    known = {optimizer: bool(held) for optimizer, held in held_back.items()}
    for scheduler in schedulers:
        if not known.get(scheduler.optimizer, True):
            scheduler.step()
    if not all(known.values()):
        for average in averages:
            average.update_parameters(model)
    return known
