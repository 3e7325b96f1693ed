"""The open window of a training step: what is known of it from its first micro-batch to its end.

`ByHand` finds calls of a hand-written loop, which the step makes itself, by what they leave between two calls.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from passes._torch import is_profiling, sequence_number
from passes.contract.errors import PolicyError

from ..ranks.ranks import Ranks
from ..scale.scaler import LossScaler
from .gradients import KeptMicroBatches, first_with_gradient

logger = logging.getLogger("fxamp")

Weight = float | Tensor
UNWEIGHTED: float = float("1.0")  # the object itself says that no weight was given; all ranks give weights, or none


class Window:
    """One window.

    Attributes:
        scaler: What scales its losses.
        given_scale: The scale that was given for it, instead of the scaler's.
        position: Micro-batches seen so far.
        losses: Their losses, detached, of shape (), each with its weight over the first one's.
        reference: The first weight, or 1 where that is 0; None before there is one.
        weighted: Whether weights were given.
        kept: The micro-batches that are not left out; None if none can be.
        again: The batches, for an optimizer that runs them again; None for others.
        batch: Inputs and target of the last micro-batch; None if its loss was handed over.
        saved: The number, the weights and the losses of micro-batches before a checkpoint, whose losses are gone.
    """

    def __init__(
        self, scaler: LossScaler, given_scale: float | None, kept: KeptMicroBatches | None, again: bool
    ) -> None:
        self.scaler, self.given_scale, self.kept = scaler, given_scale, kept
        self.position = 0
        self.losses: list[tuple[Tensor, Weight]] = []
        self.reference: Weight | None = None
        self.weighted = False
        self.again: list[tuple[Any, Any]] | None = [] if again else None
        self.batch: tuple[Any, Any] | None = None
        self._saved: Weight = 0.0
        self._scale: float | Tensor | None = None

    @property
    def share(self) -> Weight:
        """The sum of the weights of its micro-batches, over the first one's."""
        return sum((share for _, share in self.losses), self._saved)

    @property
    def loss(self) -> Tensor:
        """The last loss; NaN if there was none."""
        return self.losses[-1][0] if self.losses else torch.tensor(math.nan)

    @property
    def scale(self) -> float | Tensor:
        """Its loss scale, a copy that no update changes; it stays on the device."""
        if self._scale is None:
            scale = self.scaler._scale if self.scaler.is_enabled() else None
            self._scale = self.scaler.get_scale() if scale is None else scale.clone()
        return self._scale

    def scaled_by(self, scaler: LossScaler) -> None:
        """Scale losses by another scaler: the one that is chosen once a model is captured."""
        self.scaler, self._scale = scaler, None

    def share_of(self, weight: Weight, ranks: Ranks, device: torch.device) -> Weight:
        """Return the weight of a micro-batch over that of the first one, the same reference on all ranks.

        Raises:
            PolicyError: The weight is a number that is negative or not finite, or a tensor of several elements.
        """
        _check(weight)
        if weight is UNWEIGHTED and not self.weighted:
            self.reference = 1.0
            return 1.0
        if self.reference is None:
            self.reference = _reference(weight, ranks, device)
        self.weighted = True
        share = weight / self.reference
        return share.detach() if isinstance(share, Tensor) else share

    def took(self, loss: Tensor, share: Weight, batch: tuple[Any, Any] | None) -> None:
        """Note a micro-batch whose gradients are there."""
        self.position += 1
        self.losses.append((loss, share))
        self.batch = batch
        if self.again is not None and batch is not None:
            self.again.append(batch)

    def check_weights(self) -> None:
        """Raise PolicyError if the weights of all micro-batches are the number 0."""
        share = self.share
        if self.weighted and not isinstance(share, Tensor) and share == 0:
            raise PolicyError("every weight of this window is 0, so its gradients have no mean: leave it out")

    def state(self) -> dict[str, Any]:
        """Return it as plain values and tensors, without losses and batches."""
        return {
            "position": self.position, "given_scale": self.given_scale, "share": self.share,
            "reference": self.reference, "weighted": self.weighted,
            "kept": None if self.kept is None else int(self.kept.kept),
            "kept_share": None if self.kept is None else float(self.kept.share),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state` returned."""
        self.position, self._saved = state["position"], state.get("share", float(state["position"]))
        self.reference, self.weighted = state.get("reference", 1.0), state.get("weighted", False)
        if self.kept is not None:
            self.kept.kept = state["kept"]
            self.kept.share = state.get("kept_share", float(state["kept"]))


def _check(weight: object) -> None:
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise PolicyError(f"weight must be a number or a tensor of one element, got shape {tuple(weight.shape)}")
    elif not isinstance(weight, (int, float)) or isinstance(weight, bool) or not 0 <= weight < math.inf:
        raise PolicyError(f"weight must be a finite number from 0 on, or a tensor of one element, got {weight!r}")


def _reference(weight: Weight, ranks: Ranks, device: torch.device) -> Weight:
    """Return the first weight of the first rank, or 1 where that is 0; between ranks it is broadcast once."""
    if not ranks.groups:
        if isinstance(weight, Tensor):
            return torch.where(weight == 0, torch.ones_like(weight), weight).detach().view(())
        return float(weight) or 1.0
    found = torch.as_tensor(weight, dtype=torch.float64, device=device).detach().clone().view(())
    found = torch.where(found == 0, torch.ones_like(found), found)
    for group in ranks.groups:
        dist.broadcast(found, dist.get_global_rank(group, 0), group=group)
    return found


def range_of(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a range that a profiler shows, for a part of a step."""
    return record_function(f"fxamp.{name}") if is_profiling() else contextlib.nullcontext()


class ByHand:
    """What a TrainStep left after its last micro-batch and its last window, compared with what the next one finds."""

    def __init__(self) -> None:
        self._gradients = False  # whether the micro-batches of this window left any
        self._versions: list[int | None] = []  # of one weight of each optimizer, within a window
        self._epochs: list[tuple[int, ...]] = []  # of each scheduler, between windows
        self._cleared: list[Tensor] = []  # the parameters that had gradients in the last window
        self._recorded = -1  # the number of autograd's next op when it ended
        self._warned: set[str] = set()

    def after_micro_batch(self, optimizers: Sequence[Optimizer]) -> None:
        """Note the state within a window."""
        self._versions = list(map(_version, optimizers))
        self._gradients = any(version is not None for version in self._versions)

    def after_window(self, schedulers: Sequence[LRScheduler], cleared: list[Tensor]) -> None:
        """Note the state between windows, and the parameters whose gradients were cleared."""
        self._gradients, self._versions = False, []
        self._cleared, self._recorded = cleared, sequence_number()
        self._epochs = list(map(_epochs_of, schedulers))

    def check(
        self, optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler], position: int, accumulate_steps: int
    ) -> None:
        """Look for what was done by hand since.

        It warns once of an optimizer that stepped within a window, or of a scheduler that stepped.

        Args:
            optimizers: Those of the TrainStep.
            schedulers: Those of the TrainStep.
            position: How many micro-batches the open window has had.
            accumulate_steps: How many it will have.

        Raises:
            PolicyError: Gradients were cleared within a window.
        """
        if self._gradients and all(first_with_gradient(o) is None for o in optimizers):
            raise PolicyError(
                f"the gradients of {position} of the window's {accumulate_steps} micro-batches were cleared "
                "before the next one: leave out zero_grad(). A TrainStep clears gradients itself, after each window."
            )
        for optimizer, before in zip(optimizers, self._versions, strict=False):
            if before != _version(optimizer):
                self._warn(
                    "the weights that %s trains changed within a window of %d micro-batches: leave out "
                    "optimizer.step(). A TrainStep steps itself, after each window.",
                    type(optimizer).__name__, accumulate_steps,
                )  # fmt: skip
        for scheduler, epoch in zip(schedulers, self._epochs, strict=False):
            if _epochs_of(scheduler) == tuple(one + 1 for one in epoch):
                self._warn(
                    "%s stepped outside its TrainStep, which steps it after each window: leave out scheduler.step(), "
                    "or do not give the scheduler to the TrainStep.", type(scheduler).__name__,
                )  # fmt: skip
        self._epochs = []

    def stale(self, optimizers: Iterable[Optimizer]) -> Tensor | None:
        """Return the first parameter that has a gradient before a window opens.

        A walk over thousands of parameters costs as much as the forward of a small model. While autograd has recorded
        nothing in this thread since the last window, only those are looked at that had a gradient in it.
        """
        if sequence_number() != self._recorded:
            return next((p for o in optimizers if (p := first_with_gradient(o)) is not None), None)
        return next((p for p in self._cleared if p.grad is not None), None)

    def _warn(self, text: str, *values: object) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(f"fxamp: {text}", *values)


def _epochs_of(scheduler: LRScheduler) -> tuple[int, ...]:
    """Return how often a scheduler stepped; for a chain of them how often each did."""
    return tuple(one.last_epoch for one in getattr(scheduler, "_schedulers", [scheduler]) if hasattr(one, "last_epoch"))


def _version(optimizer: Optimizer) -> int | None:
    """Return how often a weight of an optimizer was written to; None if no weight of it has a gradient."""
    return None if (p := first_with_gradient(optimizer)) is None else p._version
