"""`StepResult`: what one call of a TrainStep did. Nothing is read from the device before it is asked for.

A read waits for all kernels launched before it. A copy of a flag that is launched before the optimizer's step does not
wait for that step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from passes.contract.errors import public

Reason = Literal["stepped", "accumulating", "overflow", "no_gradients"]


class HostFlag:
    """A flag of one element, on an accelerator, whose copy to the host has begun; `bool()` waits for it."""

    def __init__(self, flag: Tensor) -> None:
        self._host = torch.empty(flag.shape, dtype=flag.dtype, pin_memory=True)
        self._host.copy_(flag, non_blocking=True)
        self._arrived = torch.get_device_module(flag.device).current_stream(flag.device).record_event()

    def __bool__(self) -> bool:
        self._arrived.synchronize()
        return bool(self._host)


HeldBack = bool | Tensor | HostFlag  # whether gradients that were not finite held an optimizer back


def to_host(flag: bool | Tensor) -> bool | Tensor | HostFlag:
    """Begin to copy a flag from an accelerator to the host; a flag on the host is returned itself."""
    return HostFlag(flag) if isinstance(flag, Tensor) and flag.device.type != "cpu" else flag


@public
@dataclass(frozen=True, eq=False, repr=False)
class StepResult:
    """The result of one call of a TrainStep.

    What is not a tensor is a plain Python value. A value that only the device knows is read, and waited for, when you
    first ask for it.

    Attributes:
        loss: The loss of this micro-batch as `loss_fn` gave it, of shape (): undivided, unscaled, detached. `flush` and
            `update` give the loss of the last micro-batch, or NaN if there was none.
        grad_norm: The norm of the unscaled gradients before clipping, of shape (); None without `max_grad_norm`, and
            for a call that does not end a window.
        output: What the model returned, as it was; of a compiled step what its `output` keeps, detached. None for a
            loss that was handed to `backward`.

    Example:
        >>> result = step(x, y)
        >>> result.loss.shape, result.stepped, result.skipped, result.scale, result.kept, result.reason
        (torch.Size([]), True, False, 1.0, 1, 'stepped')
        >>> sorted(result.metrics())
        ['kept', 'loss', 'lr', 'mean_loss', 'nonfinite_losses', 'scale', 'skipped']
        >>> bool(result.mean_loss == result.loss), result.stepped_each
        (True, (True,))
    """

    loss: Tensor
    grad_norm: Tensor | None
    output: Any
    _accumulating: bool
    _flags: tuple[HeldBack | None, ...]
    _scale: float | Tensor
    _kept: int | Tensor
    _losses: tuple[tuple[Tensor, float | Tensor], ...] = field(default=())
    _rates: tuple[float | Tensor, ...] = field(default=())

    @cached_property
    def mean_loss(self) -> Tensor:
        """The mean of the losses of this window so far, by the weights of the micro-batches, of shape ()."""
        total = sum(share for _, share in self._losses)
        mean: Any = sum(loss * share for loss, share in self._losses) / total if self._losses else self.loss
        return mean  # type: ignore[no-any-return]

    @cached_property
    def stepped_each(self) -> tuple[bool, ...]:
        """Whether each optimizer stepped."""
        return tuple(held is not None and not held for held in self._held_back)

    @cached_property
    def stepped(self) -> bool:
        """Whether any optimizer stepped."""
        return any(self.stepped_each)

    @cached_property
    def skipped(self) -> bool:
        """Whether an optimizer did not step because gradients were not finite."""
        return any(self._held_back)

    @cached_property
    def scale(self) -> float:
        """The loss scale of this window, 1.0 without loss scaling."""
        return float(self._scale)

    @cached_property
    def kept(self) -> int:
        """The number of micro-batches in this window so far whose gradients are in the mean.

        At the end of a window under DistributedDataParallel it counts the micro-batches of all ranks.
        """
        return int(self._kept)

    @cached_property
    def reason(self) -> Reason:
        """The outcome of the call, in a word.

        It is "accumulating" within a window; at its end "overflow" if any optimizer was held back, "no_gradients" if
        none had gradients, else "stepped".
        """
        if self._accumulating:
            return "accumulating"
        if all(held is None for held in self._flags):
            return "no_gradients"
        return "overflow" if self.skipped else "stepped"

    def metrics(self) -> dict[str, float]:
        """Return what a tracker plots, as Python numbers by name, with one read from the device.

        The names are "loss", "mean_loss", "scale", "skipped", "kept", "grad_norm" if it was measured, and "lr", or
        "lr/0", "lr/1" where there are several groups of parameters: the learning rates of this window.
        "nonfinite_losses" is the number of losses in this window that are inf or NaN, whatever the gradients are.

        Example:
            >>> step(x, y).metrics()["scale"]
            1.0
        """
        rates = {"lr" if len(self._rates) == 1 else f"lr/{i}": rate for i, rate in enumerate(self._rates)}
        asked: dict[str, Any] = {
            "loss": self.loss, "mean_loss": self.mean_loss, "scale": self._scale, "kept": self._kept, **rates
        }  # fmt: skip
        if self._losses:
            losses = torch.stack([loss for loss, _ in self._losses])
            asked["nonfinite_losses"] = (~losses.isfinite()).sum()
        if self.grad_norm is not None:
            asked["grad_norm"] = self.grad_norm
        flags = [held for held in self._flags if isinstance(held, Tensor)]
        if flags:
            asked["skipped"] = torch.stack([flag.view(()).to(flags[0].device) for flag in flags]).max()
        held = {k: v.detach() for k, v in asked.items() if isinstance(v, Tensor)}
        on_device = [v.to(self.loss.device, torch.float64).view(()) for v in held.values()]
        read = dict(zip(held, torch.stack(on_device).tolist(), strict=True)) if held else {}
        rest = any(bool(held) for held in self._flags if held is not None and not isinstance(held, Tensor))
        known = {k: float(v) for k, v in asked.items() if not isinstance(v, Tensor)}
        return {**known, **read, "skipped": float(bool(read.get("skipped", 0.0)) or rest)}

    @cached_property
    def _held_back(self) -> tuple[bool | None, ...]:
        return tuple(None if held is None else bool(held) for held in self._flags)

    def __repr__(self) -> str:
        """Return what the host knows, without waiting for the device."""
        known = [f"reason={self.reason!r}"] if not any(isinstance(f, (Tensor, HostFlag)) for f in self._flags) else []
        scale = [] if isinstance(self._scale, Tensor) else [f"scale={self._scale:g}"]
        loss = [f"loss={self.loss.item():.6g}"] if self.loss.device.type == "cpu" else []
        return f"StepResult({', '.join([*loss, *known, *scale])})"
