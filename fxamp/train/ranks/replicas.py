"""Replicas of a model on several ranks, by DistributedDataParallel: gradients are exchanged once a window.

Before: every micro-batch exchanges the gradients so far
After:  only the last one does, during its backward; a window that ends early exchanges them when it is over
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_BUCKET = 25 * 2**20  # bytes that are exchanged together, as DistributedDataParallel does by default


def replicas(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the parts of a model that exchange gradients at the end of backward."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def exchanged(replica: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients a replica exchanges, by name."""
    left_out = set(replica.parameters_to_ignore)
    named = replica.module.named_parameters()
    return {name: p for name, p in named if p.requires_grad and name not in left_out}


@contextlib.contextmanager
def exchanging(found: Sequence[DistributedDataParallel], now: bool) -> Iterator[None]:
    """Let the forward and backward inside exchange gradients, or leave that to a later one."""
    with contextlib.ExitStack() as stack:
        if not now:
            for replica in found:
                stack.enter_context(replica.no_sync())
        yield


@torch.no_grad()
def exchange(replica: DistributedDataParallel, counts: Tensor, share: float | Tensor) -> Tensor:
    """Exchange gradients outside backward: each becomes the mean over the micro-batches of all ranks.

    A gradient that no rank has stays None. Communication hooks are not run: they belong to backward.

    Args:
        replica: Replica whose gradients are exchanged.
        counts: Begins with the number of micro-batches of this rank; more numbers may follow.
        share: Number by which the gradients of each micro-batch are divided already.

    Returns:
        `counts`, summed over the ranks.
    """
    group, trained = replica.process_group, list(exchanged(replica).values())
    counts = counts.clone()
    dist.all_reduce(counts, group=group)
    there = torch.tensor([float(p.grad is not None) for p in trained], device=counts.device)
    dist.all_reduce(there, group=group)
    live = [p for p, count in zip(trained, there.tolist(), strict=True) if count]
    for bucket in _buckets(live):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).mul_(share / counts[0])
        dist.all_reduce(flat, group=group)
        for p, gradient, mean in zip(bucket, gradients, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad = gradient.copy_(mean.view_as(gradient))
    replica.require_forward_param_sync = True  # the next forward takes buffers from the first rank, as after a backward
    return counts


def _buckets(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters in order, several together that have one dtype and one device."""
    bucket: list[nn.Parameter] = []
    size = 0
    for p in params:
        like: Any = bucket[0] if bucket else p
        if size and (size + p.nbytes > _BUCKET or (p.dtype, p.device) != (like.dtype, like.device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += p.nbytes
    if bucket:
        yield bucket
