"""`StepResult`: what one call of a TrainStep did. Nothing is read from the device before it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from .on_the_way import OnTheWay

Reason = Literal["stepped", "accumulating", "overflow", "no_gradients"]
HeldBack = bool | torch.Tensor | OnTheWay  # whether gradients that were not finite held an optimizer back


@dataclass(frozen=True, eq=False)
class StepResult:
    """The result of one call of a TrainStep.

    `stepped`, `skipped`, `scale`, `kept` and `reason` are plain Python values. A value that only the device knows is
    read, and waited for, when you first ask for it. `loss` and `grad_norm` are tensors.

    Attributes:
        loss: The loss of this micro-batch as `loss_fn` gave it, of shape (): undivided, unscaled, detached. `flush`
            gives the loss of the last micro-batch, or NaN if there was none.
        grad_norm: The norm of the unscaled gradients before clipping, of shape (); None without `max_grad_norm`, and
            for a call that does not end a window.
        accumulating: Whether the window is not finished yet.
        held_back: For each optimizer, in order, whether its step was skipped because gradients were not finite; None
            for one that had no gradients.
        given_scale: See `scale`.
        given_kept: See `kept`.

    Example:
        >>> result = step(x, y)
        >>> result.loss.shape, result.stepped, result.skipped, result.scale, result.kept, result.reason
        (torch.Size([]), True, False, 1.0, 1, 'stepped')
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    accumulating: bool
    held_back: tuple[HeldBack | None, ...]
    given_scale: float | torch.Tensor
    given_kept: int | torch.Tensor

    @cached_property
    def stepped(self) -> bool | tuple[bool, ...]:
        """Whether the optimizer stepped; one bool per optimizer when there are several."""
        flags = tuple(held is not None and not held for held in self._held_back)
        return flags if len(flags) > 1 else flags[0]

    @cached_property
    def skipped(self) -> bool:
        """Whether an optimizer did not step because gradients were not finite."""
        return any(self._held_back)

    @cached_property
    def scale(self) -> float:
        """The loss scale of this window, 1.0 without loss scaling."""
        return float(self.given_scale)

    @cached_property
    def kept(self) -> int:
        """The number of micro-batches in this window so far whose gradients are in the mean.

        At the end of a window under DistributedDataParallel it counts the micro-batches of all ranks.
        """
        return int(self.given_kept)

    @cached_property
    def reason(self) -> Reason:
        """The outcome of the call, in a word.

        It is "accumulating" within a window; at its end "overflow" if any optimizer was held back, "no_gradients" if
        none had gradients, else "stepped".
        """
        if self.accumulating:
            return "accumulating"
        if all(held is None for held in self.held_back):
            return "no_gradients"
        return "overflow" if self.skipped else "stepped"

    @cached_property
    def _held_back(self) -> tuple[bool | None, ...]:
        return tuple(None if held is None else bool(held) for held in self.held_back)
