"""Make learning rates tensors during a compiled step, so that a new rate from a scheduler causes no recompilation.

Other numbers of an optimizer are constants of the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


@contextlib.contextmanager
def rates_as_tensors(optimizers: Sequence[Optimizer], made: MutableMapping[int, Tensor]) -> Iterator[None]:
    """Inside this context, each group's learning rate is a tensor; outside, schedulers and checkpoints see the number.

    Together with `foreach`, which compiles to few kernels, only `capturable` optimizers accept a tensor.

    Args:
        optimizers: Optimizers whose learning rates become tensors.
        made: The tensors of earlier calls, by group; those that are new are added.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if group["params"]]
    before: list[dict[str, Any]] = [{k: group[k] for k in ("lr", "capturable") if k in group} for group in groups]
    for index, (group, own) in enumerate(zip(groups, before, strict=True)):
        group.update(_replaced(index, own, group["params"][0].device, made))
    try:
        yield
    finally:
        for group, own in zip(groups, before, strict=True):
            group.update(own)


def _replaced(
    index: int, own: dict[str, Any], device: torch.device, made: MutableMapping[int, Tensor]
) -> dict[str, Any]:
    rate = own.get("lr")
    if not isinstance(rate, (int, float)):
        return {}
    if index not in made or made[index].device != device:
        made[index] = torch.empty((), dtype=torch.float32, device=device)
    return {key: made[index].fill_(rate) if key == "lr" else True for key in own}


class Constants:
    """The numbers of optimizers that a graph has as constants. A change recompiles the graph."""

    def __init__(self) -> None:
        self._known: list[dict[str, Any]] = []
        self._changes = 0

    def changing(self, optimizers: Sequence[Optimizer]) -> str:
        """Return which number has changed for the second time, "" where none has."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        now = [{k: v for k, v in group.items() if k != "lr" and isinstance(v, (float, tuple))} for group in groups]
        before, self._known = self._known, now
        if len(before) != len(now):
            return ""
        changed = [key for old, new in zip(before, now, strict=True) for key in new if old.get(key) != new[key]]
        self._changes += bool(changed)
        return changed[0] if changed and self._changes > 1 else ""
