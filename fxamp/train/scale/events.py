"""Past updates of a loss scale: their history, and whose gradients were not finite.

Numbers that are on the device stay there until they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ..ranks.shards import agree, groups_of, local


class ScaleEvent(NamedTuple):
    """One `update()` of a loss scale.

    Attributes:
        update: Its number, from 1 on.
        scale: The loss scale that its gradients were made with.
        skipped: Whether an optimizer step was skipped.
        culprit: The first parameter whose gradient was not finite, and whether it was inf or NaN: "fc.weight (NaN)".
            "" where no step was skipped, and where a fused optimizer decided on the device.
    """

    update: int
    scale: float
    skipped: bool
    culprit: str = ""


class Event(NamedTuple):
    """A `ScaleEvent` whose numbers may still be on the device, so that recording it does not wait for them."""

    update: int
    scale: float | torch.Tensor
    found_infs: bool | list[torch.Tensor]
    culprit: str | Culprits = ""

    def read(self) -> ScaleEvent:
        """Return the event with its numbers, and wait for the device if they are still there."""
        found = self.found_infs
        skipped = found if isinstance(found, bool) else any(t.item() for t in found)
        culprit = self.culprit if isinstance(self.culprit, str) else self.culprit.first()
        return ScaleEvent(self.update, float(self.scale), skipped, culprit)


class Culprits:
    """Flags on the device that say which gradients hold an inf or a NaN, on any rank that has a part of them."""

    def __init__(self, gradients: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Check gradients, each given with the name of its parameter; nothing is read from the device."""
        self._names: list[str] = []
        self._flags: torch.Tensor | None = None
        flags: list[torch.Tensor] = []
        found: list[torch.Tensor] = []
        for name, gradient in gradients:
            values = gradient.coalesce().values() if gradient.is_sparse else local(gradient)
            self._names.append(name)
            found.append(gradient)
            flags.append(torch.stack((values.isinf().any(), values.isnan().any())).float())
        if flags:
            self._flags = agree(torch.stack([flag.to(flags[0].device) for flag in flags]), groups_of(found))

    def all(self) -> list[tuple[str, str]]:
        """Return (name, kind) for each gradient that is not finite; the kind is "inf", "NaN", or both."""
        flags: list[tuple[float, float]] = [] if self._flags is None else self._flags.tolist()
        kinds = {(1.0, 0.0): "inf", (0.0, 1.0): "NaN", (1.0, 1.0): "inf and NaN"}
        return [(name, kinds[inf, nan]) for name, (inf, nan) in zip(self._names, flags, strict=True) if inf or nan]

    def first(self) -> str:
        """Return the first such gradient with its kind as text, "" if all are finite."""
        return next((f"{name} ({kind})" for name, kind in self.all()), "")
