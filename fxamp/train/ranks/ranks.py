"""The ranks that share a training step: which of them exchange gradients, and which have to agree on a step."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from passes._torch import communication_hook

from .replicas import exchanged, replicas
from .shards import agree, groups_of, is_spread


class Ranks:
    """The ranks that train one model together, and what they exchange; a single rank exchanges nothing.

    Attributes:
        replicas: The parts of the model that exchange gradients in backward.
        groups: The groups of ranks that the model's parameters are spread over, or their gradients exchanged in.
        spread: Whether parameters are spread over ranks.
        apart: Names of the other trained parameters, whose gradients no replica exchanges.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers
        self.replicas = replicas(model)
        owned = {id(p) for replica in self.replicas for p in exchanged(replica).values()}
        trained: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                trained.update((p, "a parameter of the optimizer only") for p in group["params"] if p not in trained)
        self.spread = any(map(is_spread, trained))
        self.apart = [name for p, name in trained.items() if id(p) not in owned and not is_spread(p)]
        together: list[Any] = [replica.process_group for replica in self.replicas]
        several = [group for group in together if dist.get_world_size(group) > 1]
        self.groups = list(dict.fromkeys([*several, *groups_of(trained)]))

    @property
    def decide_apart(self) -> bool:
        """Whether gradients may differ between ranks, which then have to agree whether all are finite."""
        if not self.groups:
            return False
        return bool(self.apart) or any(map(communication_hook, self.replicas))

    @property
    def shared(self) -> bool:
        """Whether the model is made for several ranks, even if this one is alone in its groups."""
        return self.spread or bool(self.replicas)

    @property
    def replicated(self) -> int:
        """How many ranks exchange gradients in backward."""
        return max((dist.get_world_size(replica.process_group) for replica in self.replicas), default=1)

    @property
    def averaged(self) -> int:
        """Over how many ranks backward averages gradients."""
        return math.prod(dist.get_world_size(group) for group in self.groups)

    def seen(self, count: int) -> int:
        """Return the number of micro-batches that all replicas together have processed; every rank has to call this."""
        counts = [torch.tensor(float(count), device=next(r.parameters()).device) for r in self.replicas[:1]]
        for replica, total in zip(self.replicas, counts, strict=False):
            dist.all_reduce(total, group=replica.process_group)
            return int(total)
        return count

    def sum(self, numbers: Tensor) -> Tensor:
        """Sum numbers over the ranks of each group, in place, and return them."""
        for group in self.groups:
            dist.all_reduce(numbers, group=group)
        return numbers

    def agree(self, flags: Sequence[Tensor]) -> None:
        """Make each flag nonzero, in place, if it is nonzero on any rank; do nothing if ranks agree anyway."""
        if not flags or not self.decide_apart:
            return
        together = agree(torch.stack([flag.view(()).to(flags[0].device) for flag in flags]), self.groups)
        for flag, agreed in zip(flags, together.unbind(), strict=True):
            flag.copy_(agreed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Find the ranks of the copied model: process groups cannot be copied."""
        return Ranks(*copy.deepcopy((self._model, self._optimizers), memo))
