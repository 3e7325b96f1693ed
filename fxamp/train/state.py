"""The settings and the course of a training step: what its checkpoint, its checks and its description read.

It owns the window that is open, the clearing of gradients, and what has been said.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from passes.contract.errors import PolicyError
from passes.contract.plan import Plan

from .compiled_step import CompiledStep
from .ranks.ranks import Ranks
from .scaler import LossScaler, Tally, require_scale
from .weights import WeightCasts
from .window import ByHand, KeptMicroBatches, LossFunction, Window, parameters

logger = logging.getLogger("fxamp")

_LOOKS = 500  # windows between two looks for parameters that no optimizer trains: a walk costs as much as a step


class TrainState:
    """What a TrainStep is made of. Settings and counts are described there.

    Attributes:
        low_dtype: The low dtype of the model, None if there is none or it is not known yet.
        undecided: Whether the scaler is chosen only when the model is captured.
        pending_scaler: A state of the scaler that was loaded before that.
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
    skips_in_a_row: Tally
    said: set[str]
    _untrained: list[Tensor]

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
    def in_place(self) -> bool:
        """Whether gradients keep their memory, since a CUDA graph has recorded their addresses."""
        return self.compiled is not None and self.compiled.settings.captures

    def rates(self) -> tuple[float | Tensor, ...]:
        """Return the learning rate of each group of parameters."""
        return tuple(group["lr"] for o in self.optimizers for group in o.param_groups if "lr" in group)

    def say(self, about: str, text: str) -> None:
        """Log a warning once."""
        if about not in self.said:
            self.said.add(about)
            logger.warning("fxamp: %s", text)

    def open_window(self, scale: float | None = None) -> Window:
        """Open a window with a scale of its own, or return the one that is open.

        Raises:
            PolicyError: The scale cannot be used, or is another one than that of the open window.
        """
        if scale is not None:
            require_scale("scale", scale)
        window = self.opened
        if window is not None and scale is not None and scale != window.given_scale:
            raise PolicyError(
                f"scale={scale!r} within a window that began with {window.given_scale or 'the scale of the scaler'}: "
                "the gradients of a window add up, so they need the same scale. Change it at the start of a window."
            )
        self.weights.open()
        if window is not None:
            return window
        self._clear_stale()
        scaler = self.scaler if scale is None else LossScaler(init_scale=scale, dynamic=False)
        kept = KeptMicroBatches(self.optimizers) if self.on_overflow == "skip_microbatch" else None
        self.opened = Window(scaler, scale, kept)
        if self.low_dtype == torch.float16 and not scaler.is_enabled() and "unscaled" not in self.said:
            self.said.add("unscaled")
            warnings.warn(
                "training in FP16 without loss scaling: gradients below 6e-8 become zero. "
                'Leave scaler at "auto", or give a LossScaler.',
                stacklevel=4,
            )
        return self.opened

    def close_window(self) -> None:
        """Leave the window that is open, without a step; do nothing if none is."""
        self.weights.end()
        if self.opened is not None:
            self.opened.scaler._forget_step()
            self.opened = None
            self.by_hand.after_window(self.schedulers, self._clear(in_place=self.in_place))

    def _clear(self, *, in_place: bool) -> list[Tensor]:
        """Clear the gradients of model, loss and optimizers; return the parameters of optimizers that had one."""
        had = [p for o in self.optimizers for group in o.param_groups for p in group["params"] if p.grad is not None]
        for p in had:
            if in_place:
                p.grad.detach_().zero_()
            else:
                p.grad = None
        if self.windows % _LOOKS == 1:
            self._look_for_untrained()
        for p in self._untrained:
            if p.grad is not None:
                p.grad = None
        return had

    def _look_for_untrained(self) -> None:
        """Find the parameters of the model, and of a loss that is a module, that are in no optimizer."""
        held = {id(p) for optimizer in self.optimizers for p in parameters(optimizer)}
        modules = [self.model, self.loss_fn] if isinstance(self.loss_fn, nn.Module) else [self.model]
        self._untrained = [p for module in modules for p in module.parameters() if id(p) not in held]

    def _clear_stale(self) -> None:
        """Clear gradients that somebody has left; for CUDA graphs have one of zeros for each parameter."""
        if self.in_place:
            for p in (p for o in self.optimizers for p in parameters(o) if p.grad is None):
                p.grad = torch.zeros_like(p)
            return
        stale = self.by_hand.stale(self.optimizers)
        if stale is not None:
            name = next((name for name, p in self.model.named_parameters() if p is stale), "a parameter outside of it")
            self.say(
                "stale",
                f"{type(self.model).__name__} had gradients that were there when its window opened, the first '{name}':"
                " they are cleared. A TrainStep adds up those of its own window only",
            )
            self._clear(in_place=False)
