"""The ranks that share a training step: what is spread over them, what they exchange, and what they agree on.

Replicas (DistributedDataParallel) exchange gradients once a window: during the backward of its last micro-batch, or
after it where a window ends early. Shards are DTensors, as FSDP2 and tensor parallelism make of parameters and
gradients: element-wise work is done on each rank's own part, and results about the whole tensor are agreed by all.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from passes.graph.values import LOW_DTYPES

from ..._torch import communication_hook, is_sharded, is_spread, norms_of, reduces_gradients

_BUCKET = 25 * 2**20  # bytes that are exchanged together, as DistributedDataParallel does by default


class Ranks:
    """The ranks that train one model together, and what they exchange; a single rank exchanges nothing."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], reduce: str = "micro_batch") -> None:
        self._model, self._optimizers, self._reduce = model, optimizers, reduce
        sharded: list[Any] = [module for module in model.modules() if is_sharded(module)]
        # The parts of the model that FSDP2 shards, where it reduces their gradients once a window.
        self.late = sharded if reduce == "window" or not all(map(reduces_gradients, sharded)) else []
        self.replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        owned = {id(p) for replica in self.replicas for p in exchanged(replica)}
        trained: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                trained.update((p, "a parameter of the optimizer only") for p in group["params"] if p not in trained)
        self.spread = any(map(is_spread, trained))
        # The names of the other trained parameters, whose gradients no replica exchanges.
        self.apart = [name for p, name in trained.items() if id(p) not in owned and not is_spread(p)]
        together: list[Any] = [replica.process_group for replica in self.replicas]
        several = [group for group in together if dist.get_world_size(group) > 1]
        self.groups = list(dict.fromkeys([*several, *groups_of(trained)]))  # that share parameters, or their gradients

    @property
    def decide_apart(self) -> bool:
        """Whether gradients may differ between ranks, which then have to agree whether all are finite."""
        return bool(self.groups and (self.apart or any(map(communication_hook, self.replicas))))

    @property
    def shared(self) -> bool:
        """Whether the model is made for several ranks, even if this one is alone in its groups."""
        return self.spread or bool(self.replicas)

    @property
    def replicated(self) -> int:
        """How many ranks exchange gradients in backward."""
        return max((dist.get_world_size(replica.process_group) for replica in self.replicas), default=1)

    @property
    def exchanged(self) -> bool:
        """Whether the last forward has made the backward after it exchange gradients, if any are exchanged at all."""
        return all(replica.require_forward_param_sync for replica in self.replicas) and all(
            map(reduces_gradients, self.late)
        )

    @property
    def averaged(self) -> int:
        """Over how many ranks backward averages gradients."""
        return math.prod(dist.get_world_size(group) for group in self.groups)

    def exchanging(self, now: bool) -> contextlib.AbstractContextManager[Any]:
        """Return a context whose forward and backward exchange gradients, or leave that to a later one."""
        for module in self.late:
            module.set_requires_gradient_sync(now, recurse=False)
        if now or not self.replicas:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for replica in self.replicas:
            stack.enter_context(replica.no_sync())
        return stack

    def seen(self, count: int) -> int:
        """Return the number of micro-batches that all replicas together have processed; every rank has to call this."""
        for replica in self.replicas[:1]:
            total = torch.tensor(float(count), device=next(replica.parameters()).device)
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
        return Ranks(*copy.deepcopy((self._model, self._optimizers), memo), self._reduce)


def exchanged(replica: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients a replica exchanges."""
    left_out = set(replica.parameters_to_ignore)
    return [p for name, p in replica.module.named_parameters() if p.requires_grad and name not in left_out]


@torch.no_grad()
def exchange(replica: DistributedDataParallel, counts: Tensor, share: float | Tensor) -> Tensor:
    """Exchange gradients outside backward, without communication hooks: each becomes the mean over all micro-batches.

    A gradient that no rank has stays None. `counts` begins with the number of micro-batches of this rank, and is
    returned summed over ranks; `share` divides gradients already.
    """
    group, trained = replica.process_group, exchanged(replica)
    counts = counts.clone()
    dist.all_reduce(counts, group=group)
    there = torch.tensor([float(p.grad is not None) for p in trained], device=counts.device)
    dist.all_reduce(there, group=group)
    for bucket in _buckets([p for p, count in zip(trained, there.tolist(), strict=True) if count]):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).mul_(share / counts[0])
        dist.all_reduce(flat, group=group)
        for p, gradient, mean in zip(bucket, gradients, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad = gradient.copy_(mean.view_as(gradient))
    replica.require_forward_param_sync = True  # the next forward takes buffers from the first rank, as after a backward
    return counts


def _buckets(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
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


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank has, without a copy; return a plain tensor itself."""
    spread: Any = tensor
    return spread.to_local() if is_spread(tensor) else tensor


def groups_of(tensors: Iterable[Tensor]) -> list[Any]:
    """Return the groups of ranks that some tensors are spread over, one for each dimension of their meshes."""
    meshes: dict[Any, None] = {tensor.device_mesh: None for tensor in tensors if is_spread(tensor)}  # type: ignore[attr-defined]
    return list({mesh.get_group(dim): None for mesh in meshes for dim in range(mesh.ndim) if mesh.size(dim) > 1})


def agree(flags: Tensor, groups: Iterable[Any]) -> Tensor:
    """Set each number, in place, to its maximum over the ranks of the groups, and return them."""
    for group in groups:
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    return flags


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of some tensors together; every rank gets the same result. That of 16-bit tensors is FP32."""
    if any(tensor.dtype in LOW_DTYPES and not is_spread(tensor) for tensor in tensors):
        device = tensors[0].device
        return torch.as_tensor(
            torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms_of(list(tensors))]))
        )
    alike: dict[Any, list[Any]] = defaultdict(list)  # torch takes tensors of one mesh
    for tensor in tensors:
        spread: Any = tensor
        alike[(spread.device_mesh, spread.placements) if is_spread(tensor) else None].append(tensor)
    norms: list[Any] = [nn.utils.get_total_norm(some) for some in alike.values()]
    norms = [norm.full_tensor() if is_spread(norm) else norm for norm in norms]
    if len(norms) > 1:
        norms = [torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))]
    return torch.as_tensor(norms[0]) if norms else torch.zeros(())
