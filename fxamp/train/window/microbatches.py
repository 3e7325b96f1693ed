"""`on_overflow="skip_microbatch"`: a micro-batch whose gradients are not finite is left out, not its whole window.

The gradients of each micro-batch are computed separately, checked, and added to the sum of the earlier ones by a select
on the device. This needs memory for a second set of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from passes.contract.errors import PolicyError

from .conditional import gradients, holds_inf_or_nan, parameters


class KeptMicroBatches:
    """The gradients of one window's micro-batches, except those that are not finite.

    Attributes:
        seen: How many there were.
        kept: How many were added up, on the device once there was one.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._sums: dict[Tensor, Tensor | None] = {}
        self.reset()

    def reset(self) -> None:
        """Open a new window."""
        self._sums.clear()
        self.seen = 0
        self.kept: int | Tensor = 0

    def before_backward(self) -> None:
        """Put the sum so far aside, so that backward leaves only the gradients of one micro-batch."""
        for p in self._parameters():
            self._sums[p], p.grad = p.grad, None

    @torch.no_grad()
    def after_backward(self) -> None:
        """Add the new gradients to the sum if all are finite; afterwards `.grad` holds the sum again.

        Raises:
            PolicyError: A gradient is sparse.
        """
        new = gradients(self._optimizers)
        if any(gradient.is_sparse for gradient in new):
            raise PolicyError(
                'on_overflow="skip_microbatch" works only with dense gradients, and some are sparse: use '
                'on_overflow="skip_window"'
            )
        self.seen += 1
        bad = holds_inf_or_nan(new)
        self.kept = self.kept + 1 - bad
        for p in self._parameters():
            before = self._sums.pop(p)
            if p.grad is not None:
                added = torch.where(bad.to(p.device) != 0, torch.zeros_like(p.grad), p.grad)
                p.grad = added if before is None else before.add_(added)
            else:
                p.grad = before

    def _parameters(self) -> list[Tensor]:
        return [p for optimizer in self._optimizers for p in parameters(optimizer)]
