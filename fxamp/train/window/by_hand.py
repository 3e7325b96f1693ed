"""Calls of a hand-written training loop that a TrainStep makes itself, found by what they leave behind."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from passes.contract.errors import PolicyError

from .gradients import first_with_gradient

logger = logging.getLogger("fxamp")


class ByHand:
    """What a TrainStep left after its last micro-batch and its last window, compared with what the next one finds."""

    def __init__(self) -> None:
        self._gradients = False  # whether the micro-batches of this window left any
        self._versions: list[int | None] = []  # of one weight of each optimizer, within a window
        self._epochs: list[tuple[int, ...]] = []  # of each scheduler, between windows
        self._warned: set[str] = set()

    def after_micro_batch(self, optimizers: Sequence[Optimizer]) -> None:
        """Note the state within a window."""
        self._gradients = any(first_with_gradient(o) is not None for o in optimizers)
        self._versions = _versions(optimizers)

    def after_window(self, schedulers: Sequence[LRScheduler]) -> None:
        """Note the state between windows."""
        self._gradients, self._versions = False, []
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
        for optimizer, before, now in zip(optimizers, self._versions, _versions(optimizers), strict=False):
            if before != now:
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

    def _warn(self, text: str, *values: object) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(f"fxamp: {text}", *values)


def _epochs_of(scheduler: LRScheduler) -> tuple[int, ...]:
    """Return how often a scheduler stepped; for a chain of them how often each did."""
    return tuple(one.last_epoch for one in getattr(scheduler, "_schedulers", [scheduler]) if hasattr(one, "last_epoch"))


def _versions(optimizers: Sequence[Optimizer]) -> list[int | None]:
    """Return how often a weight of each optimizer was written to; None if no weight of it has a gradient."""
    return [None if (p := first_with_gradient(o)) is None else p._version for o in optimizers]
