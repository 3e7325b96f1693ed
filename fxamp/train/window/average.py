"""The gradients at the end of a window: the mean over the micro-batches of all ranks that were not left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..ranks.ranks import Ranks
from ..ranks.replicas import exchange, exchanged
from .conditional import parameters
from .microbatches import KeptMicroBatches


class Mean(NamedTuple):
    """The number of micro-batches over which the gradients of a window are averaged.

    Attributes:
        kept: That number, over all ranks that have a replica of the model.
        nothing: Not 0, on the device, if `kept` is 0; None if it cannot be 0.
        overflow: Not 0, on the device, where a micro-batch was left out; None where none can be.
    """

    kept: int | Tensor
    nothing: Tensor | None = None
    overflow: Tensor | None = None


def average(
    optimizers: Sequence[Optimizer],
    ranks: Ranks,
    seen: int,
    kept: KeptMicroBatches | None,
    accumulate_steps: int,
    *,
    in_backward: bool,
) -> Mean:
    """Make gradients the mean over micro-batches, before they are unscaled, so that the check for inf sees the means.

    Args:
        optimizers: Optimizers whose gradients are averaged; the gradients of each micro-batch are divided by
            `accumulate_steps`.
        ranks: Who exchanges them.
        seen: Micro-batches of this rank.
        kept: Those of them that were not left out; None where none is.
        accumulate_steps: Micro-batches in a window of one rank.
        in_backward: Whether the last backward has exchanged gradients.
    """
    own: int | Tensor = seen if kept is None else torch.as_tensor(kept.kept, dtype=torch.float32)
    total: int | Tensor = own * ranks.replicated
    everything: int | Tensor = seen * ranks.replicated
    done: set[Tensor] = set()
    if ranks.replicas and not (in_backward and kept is None):
        counts = torch.stack([torch.as_tensor(count, dtype=torch.float32) for count in (own, seen)])
        for replica in reversed(ranks.replicas):
            params = exchanged(replica).values()
            total, everything = exchange(replica, counts.to(next(iter(params)).device), accumulate_steps).unbind()
            done.update(params)
    if kept is not None or 0 < seen < accumulate_steps:
        _multiply([p for o in optimizers for p in parameters(o) if p not in done], accumulate_steps / own)
    if kept is None:
        return Mean(total)
    return Mean(total, (torch.as_tensor(total) == 0).float(), (torch.as_tensor(total) < everything).float())


@torch.no_grad()
def _multiply(params: Iterable[Tensor], factor: float | Tensor) -> None:
    for p in params:
        if p.grad is not None:
            p.grad.mul_(factor)
