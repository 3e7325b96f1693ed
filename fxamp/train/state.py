"""The settings and the course of a training step, which its checkpoint, its checks and its description read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from passes.contract.plan import Plan

from .compiled.compiled_step import CompiledStep
from .ranks.ranks import Ranks
from .scale.scaler import LossScaler, SkipsInARow
from .weights.weights import WeightCasts
from .window.loss import LossFunction
from .window.window import ByHand, Window


class Tally:
    """A count of windows whose flags may be on the device, where it then stays until it is read."""

    def __init__(self, known: int = 0) -> None:
        self._known: int | Tensor = known

    def add(self, flag: bool | Tensor) -> None:
        """Count one more window, if the flag is set or nonzero."""
        one: int | Tensor = int(flag) if isinstance(flag, bool) else (flag.view(()) != 0).to(torch.float32)
        before = self._known
        self._known = (
            before.to(one.device) + one if isinstance(before, Tensor) and isinstance(one, Tensor) else before + one
        )

    def read(self) -> int:
        """Return the count."""
        self._known = int(self._known)
        return self._known


class TrainState:
    """What a TrainStep is made of.

    Attributes:
        model: What it trains.
        loss_fn: Its loss.
        optimizers: Its optimizers.
        schedulers: Their schedulers.
        averages: Averages of the weights.
        scaler: The LossScaler in use; a disabled one without loss scaling.
        low_dtype: The low dtype of the model, None if there is none or it is not known yet.
        accumulate_steps: Micro-batches in a window.
        max_grad_norm: The norm to which gradients are clipped.
        on_overflow: What an overflow skips.
        max_skips: Steps in a row that may be skipped.
        on_collapse: What happens then: "raise", or "recolour" and go on.
        on_gradients: What is called with the parameters, once their gradients are unscaled.
        weights: Which casts of weights are kept for a window.
        compiled: Counts of the compiled graphs; None if nothing is compiled.
        ranks: The ranks that share the step; with a single process it holds no groups of ranks.
        windows: How many windows were finished.
        opened: The window that is open.
        undecided: Whether the scaler is chosen only when the model is captured.
        pending_scaler: A state of the scaler that was loaded before that.
        switches: The policies that `switch` has set: the number of finished windows, and the policy.
        switched_plan: The plan that `switch` was given last; None for a policy.
        aborted: Why the last window did not come to its end; "" if it did.
    """

    model: nn.Module
    loss_fn: LossFunction | None
    optimizers: tuple[Optimizer, ...]
    schedulers: tuple[LRScheduler, ...]
    averages: tuple[AveragedModel, ...]
    scaler: LossScaler
    low_dtype: torch.dtype | None
    accumulate_steps: int
    max_grad_norm: float | None
    on_overflow: Literal["skip_window", "skip_microbatch"]
    max_skips: int
    on_collapse: Literal["raise", "recolour"] = "raise"  # a class attribute, for what an older fxamp pickled
    on_gradients: Callable[[list[Tensor]], Any] | None
    weights: WeightCasts
    compiled: CompiledStep | None
    ranks: Ranks
    windows: int
    opened: Window | None
    undecided: bool
    pending_scaler: Mapping[str, Any] | None
    switches: tuple[tuple[int, str], ...]
    switched_plan: Plan | None
    aborted: str
    by_hand: ByHand
    tallies: dict[str, Tally]
    skips_in_a_row: SkipsInARow
    said: set[str]

    @property
    def position(self) -> int:
        """The number of micro-batches in the open window."""
        return 0 if self.opened is None else self.opened.position

    @property
    def steps(self) -> int:
        """How many windows ended with a step of an optimizer. Reading it may wait for the device."""
        return self.tallies["steps"].read()

    @property
    def skipped(self) -> int:
        """How many windows ended with a skipped step of an optimizer. Reading it may wait for the device."""
        return self.tallies["skipped"].read()

    @property
    def waits(self) -> tuple[str, ...]:
        """The reasons why a step waits for the device once, at the end of a window."""
        raise NotImplementedError

    def rates(self) -> tuple[float | Tensor, ...]:
        """Return the learning rate of each group of parameters."""
        return tuple(group["lr"] for o in self.optimizers for group in o.param_groups if "lr" in group)

    def open_window(self, scale: float | None) -> Window:
        """Open a window, unless one is open."""
        raise NotImplementedError

    def close_window(self) -> None:
        """Leave the window that is open, without a step; do nothing if none is."""
        raise NotImplementedError


def trained_without_optimizer(model: nn.Module, optimizers: Sequence[Optimizer]) -> float:
    """Return the share of the trainable elements of a model that no optimizer trains."""
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    sizes = [(p.numel(), id(p) in held) for p in model.parameters() if p.requires_grad]
    return sum(n for n, known in sizes if not known) / max(sum(n for n, _ in sizes), 1)
