"""Accumulation over several ranks: gradients are exchanged once a window, by DistributedDataParallel itself.

Before: every micro-batch exchanges the gradients so far
After:  the last one does; `flush`, which nobody could foresee, exchanges them itself
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicas(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the parts of a model that exchange gradients at the end of backward."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


@contextlib.contextmanager
def exchanging(model: nn.Module, now: bool) -> Iterator[None]:
    """Let the forward and backward inside exchange gradients, or leave that to a later one."""
    with contextlib.ExitStack() as stack:
        if not now:
            for replica in replicas(model):
                stack.enter_context(replica.no_sync())
        yield


@torch.no_grad()
def exchange(model: nn.Module) -> None:
    """Make gradients that no backward has exchanged the mean over all ranks; one that no rank has stays None."""
    for replica in replicas(model):
        trained = [p for p in replica.module.parameters() if p.requires_grad]
        if not trained:
            continue
        group = replica.process_group
        there = torch.tensor([float(p.grad is not None) for p in trained], device=trained[0].device)
        dist.all_reduce(there, group=group)
        for p, count in zip(trained, there.tolist(), strict=True):
            if count:
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                gradient.div_(dist.get_world_size(group))
                dist.all_reduce(gradient, group=group)
                p.grad = gradient
