"""Whether somebody holds the autograd nodes of weights, in which their gradients end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def nodes_are_held(weights: Sequence[Tensor]) -> list[bool]:
    """Say of each parameter whether somebody holds its autograd node, for example for a hook on it.

    Such hooks cannot be asked for. But a parameter does not hold its node, so a hook is there only as long as somebody
    else does, for example DistributedDataParallel. What is noted on a node that nobody holds goes with it.
    """
    if not weights:
        return []
    for node in _nodes_of(weights):
        node.metadata["fxamp"] = True
        del node
    return [bool(node.metadata) for node in _nodes_of(weights)]


def _nodes_of(weights: Sequence[Tensor]) -> list[Any]:
    """Return the nodes in which the gradients of parameters end; of all at once, which `get_gradient_edge` cannot."""
    with torch.enable_grad():
        read: Any = _Reads.apply(*weights)  # type: ignore[no-untyped-call]
    return [node for node, _ in read.grad_fn.next_functions]  # in torch 2.11 these go with the tensor


class _Reads(torch.autograd.Function):
    """A function of many tensors, for its autograd node."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("its output takes part in nothing")
