"""Tensors that are spread over ranks: DTensors, as FSDP2 and tensor parallelism make of parameters and gradients.

Element-wise work is done on each rank's own part; results about the whole tensor are agreed by all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_spread(tensor: Tensor) -> bool:
    """Say whether a tensor is a DTensor, without an import that some builds of torch lack."""
    return hasattr(tensor, "device_mesh")


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank has, without a copy; return a plain tensor itself."""
    spread: Any = tensor
    return spread.to_local() if is_spread(tensor) else tensor


def with_local_gradient(gradient: Tensor) -> Tensor:
    """Return a stand-in for a parameter, for code that looks only at its gradient: the part that this rank has."""
    part = local(gradient)
    stand_in = part.detach()
    stand_in.grad = part
    return stand_in


def groups_of(tensors: Iterable[Tensor]) -> list[Any]:
    """Return the groups of ranks that some tensors are spread over, one for each dimension of their meshes."""
    meshes: dict[Any, None] = {tensor.device_mesh: None for tensor in tensors if is_spread(tensor)}  # type: ignore[attr-defined]
    groups = {mesh.get_group(dim): None for mesh in meshes for dim in range(mesh.ndim) if mesh.size(dim) > 1}
    return list(groups)


def agree(flags: Tensor, groups: Iterable[Any]) -> Tensor:
    """Set each number, in place, to its maximum over the ranks of the groups, and return them."""
    for group in groups:
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    return flags


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of some tensors together; every rank gets the same result."""
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[_layout(tensor)].append(tensor)
    norms: list[Any] = [nn.utils.get_total_norm(some) for some in alike.values()]
    norms = [norm.full_tensor() if is_spread(norm) else norm for norm in norms]
    if len(norms) > 1:
        norms = [torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))]
    return torch.as_tensor(norms[0]) if norms else torch.zeros(())


def _layout(tensor: Any) -> Any:
    return (tensor.device_mesh, tensor.placements) if is_spread(tensor) else None
