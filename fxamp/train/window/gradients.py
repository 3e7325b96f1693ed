"""The gradients of a window: which there are, whether all are finite, and the mean over its micro-batches.

With `on_overflow="skip_microbatch"` a micro-batch whose gradients are not finite is left out, not its whole window: the
gradients of each are computed separately, checked, and added to the earlier ones by a select on the device. This needs
memory for a second set of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from passes.contract.errors import PolicyError

from ..ranks.ranks import Ranks
from ..ranks.replicas import exchange, exchanged
from ..ranks.shards import agree, groups_of, local


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def gradients(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the gradients that there are."""
    return [p.grad for optimizer in optimizers for p in parameters(optimizer) if p.grad is not None]


def first_with_gradient(optimizer: Optimizer) -> Tensor | None:
    """Return the first parameter of an optimizer that has a gradient."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                return p  # type: ignore[no-any-return]
    return None


def untrained(model: nn.Module, loss: object, optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters of a model and of a loss that is a module that are in no optimizer."""
    held = {id(p) for optimizer in optimizers for p in parameters(optimizer)}
    modules = [model, loss] if isinstance(loss, nn.Module) else [model]
    return [p for module in modules for p in module.parameters() if id(p) not in held]


def holds_inf_or_nan(tensors: list[Tensor]) -> Tensor:
    """Return 1.0 on the device if any number is not finite, on any rank that has a part of them, else 0.0."""
    parts = [part.detach() for part in map(local, tensors) if part.numel()]
    if parts and all(part.device.type == "cpu" and not part.is_sparse for part in parts):
        # On a CPU this takes a thirtieth of the time of the norms.
        bounds = torch.stack([bound.float() for part in parts for bound in part.aminmax()])
    else:
        bounds = nn.utils.get_total_norm(parts, math.inf)
    found = (~bounds.isfinite().all()).float()
    return agree(found, groups_of(tensors))


class KeptMicroBatches:
    """The gradients of one window's micro-batches, except those that are not finite.

    Attributes:
        kept: How many were added up, on the device once there was one.
        share: The sum of their weights.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._sums: dict[Tensor, Tensor | None] = {}
        self.kept: int | Tensor = 0
        self.share: float | Tensor = 0.0

    def before_backward(self) -> None:
        """Put the sum so far aside, so that backward leaves only the gradients of one micro-batch."""
        for p in self._parameters():
            self._sums[p], p.grad = p.grad, None

    @torch.no_grad()
    def after_backward(self, share: float | Tensor) -> None:
        """Add the new gradients, those of a micro-batch of this weight, to the sum if all are finite.

        Raises:
            PolicyError: A gradient is sparse.
        """
        new = gradients(self._optimizers)
        if any(gradient.is_sparse for gradient in new):
            raise PolicyError(
                'on_overflow="skip_microbatch" works only with dense gradients, and some are sparse: use '
                'on_overflow="skip_window"'
            )
        bad = holds_inf_or_nan(new)
        self.kept = self.kept + 1 - bad
        self.share = self.share + (1 - bad) * share
        for p in self._parameters():
            before = self._sums.pop(p)
            if p.grad is not None:
                added = torch.where(bad.to(p.device) != 0, torch.zeros_like(p.grad), p.grad)
                p.grad = added if before is None else before.add_(added)
            else:
                p.grad = before

    def _parameters(self) -> list[Tensor]:
        return [p for optimizer in self._optimizers for p in parameters(optimizer)]


class Mean(NamedTuple):
    """What the gradients of a window are the mean of.

    Attributes:
        kept: The number of micro-batches, over all ranks that have a replica of the model.
        nothing: A flag on the device, nonzero if every micro-batch was left out; None where that cannot happen.
        overflow: A flag on the device, nonzero where a micro-batch was left out; None where that cannot happen.
    """

    kept: int | Tensor
    nothing: Tensor | None = None
    overflow: Tensor | None = None


def average(
    optimizers: Sequence[Optimizer],
    ranks: Ranks,
    seen: int,
    share: float | Tensor,
    kept: KeptMicroBatches | None,
    accumulate_steps: int,
    *,
    weighted: bool,
    in_backward: bool,
) -> Mean:
    """Make gradients the mean over micro-batches, before they are unscaled, so that the check for inf sees the means.

    Args:
        optimizers: Optimizers whose gradients are averaged; the gradients of each micro-batch are multiplied by its
            weight and divided by `accumulate_steps`.
        ranks: The ranks that exchange them.
        seen: Micro-batches of this rank.
        share: The sum of their weights, which are 1 where none were given.
        kept: Those of them that were not left out; None if none can be left out.
        accumulate_steps: Micro-batches in a window of one rank.
        weighted: Whether weights were given.
        in_backward: Whether the last backward has exchanged gradients.
    """
    own: int | Tensor = seen if kept is None else torch.as_tensor(kept.kept, dtype=torch.float32)
    weight = share if kept is None else torch.as_tensor(kept.share, dtype=torch.float32)
    total: int | Tensor = own * ranks.replicated
    everything: int | Tensor = seen * ranks.replicated
    done: set[Tensor] = set()
    if ranks.replicas and not (in_backward and kept is None):
        counts = torch.stack([torch.as_tensor(count, dtype=torch.float32) for count in (weight, own, seen)])
        for replica in reversed(ranks.replicas):
            params = exchanged(replica).values()
            _, total, everything = exchange(replica, counts.to(next(iter(params)).device), accumulate_steps).unbind()
            done.update(params)
    # A rank without micro-batches has taken part in the exchange, and has nothing of its own.
    factor: float | Tensor = accumulate_steps / weight if isinstance(weight, Tensor) or weight else 1.0
    if weighted and ranks.groups and not done:
        factor = accumulate_steps * ranks.averaged / ranks.sum(torch.as_tensor(weight, dtype=torch.float64).clone())
    if isinstance(factor, Tensor) or factor != 1:
        _multiply([p for o in optimizers for p in parameters(o) if p not in done], factor)
    if kept is None:
        nothing = (torch.as_tensor(weight) == 0).float() if isinstance(weight, Tensor) else None
        return Mean(total, nothing)
    return Mean(total, (torch.as_tensor(total) == 0).float(), (torch.as_tensor(total) < everything).float())


@torch.no_grad()
def _multiply(params: Iterable[Tensor], factor: float | Tensor) -> None:
    for p in params:
        if p.grad is not None:
            p.grad.mul_(factor)
