"""The open window of a training step: what is known of it from its first micro-batch to its end."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from passes._torch import is_profiling
from passes.contract.errors import PolicyError

from ..ranks.ranks import Ranks
from ..scale.scaler import LossScaler
from .gradients import KeptMicroBatches

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
