"""Learning rates as tensors for the length of a compiled step, so that a scheduler's new rate compiles nothing anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


@contextlib.contextmanager
def rates_as_tensors(optimizers: Sequence[Optimizer], made: MutableMapping[int, Tensor]) -> Iterator[None]:
    """Put a tensor in the place of each group's learning rate; outside, schedulers and checkpoints see the number.

    Args:
        optimizers: Whose groups.
        made: The tensors of earlier calls, by group; those that are new are added.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if group["params"]]
    numbers = [group["lr"] for group in groups]
    for index, (group, number) in enumerate(zip(groups, numbers, strict=True)):
        if isinstance(number, (int, float)):
            device = group["params"][0].device
            if index not in made or made[index].device != device:
                made[index] = torch.empty((), dtype=torch.float32, device=device)
            group["lr"] = made[index].fill_(number)
    try:
        yield
    finally:
        for group, number in zip(groups, numbers, strict=True):
            group["lr"] = number
