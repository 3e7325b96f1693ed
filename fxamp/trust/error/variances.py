"""How much each rounding moves the loss, to first order, from one run that rounds nothing.

A value t with the gradient g = dloss/dt moves the loss by the sum of g * (round(t) - t) over its elements. If rounding
errors are independent, its variance is V, the sum of g^2 ulp(t)^2 / 12 (Widrow); S is the sum that the actual roundings
give. Where they have one sign, as where many elements are equal, S^2 is larger, and counts in the place of V.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..given_step import Loss, given_step
from .emulation import Site
from .rounding import BITS, nearest, power
from .runs import POLICIES, Subject


@dataclass(frozen=True)
class Moved:
    """How one site moves the loss.

    Attributes:
        site: where it is rounded.
        variance: V, by batch.
        signed: S, by batch.
    """

    site: Site
    variance: tuple[float, ...]
    signed: tuple[float, ...]

    @property
    def square(self) -> float:
        """The mean over batches of the square that it moves the loss by: the larger of V and S^2."""
        both = zip(self.variance, self.signed, strict=True)
        return sum(max(v, s * s) for v, s in both) / len(self.variance)

    @property
    def bias(self) -> float:
        """The mean of S over batches, in units of its standard error; 0 for fewer than eight batches."""
        n = len(self.signed)
        mean = sum(self.signed) / n
        error = (sum((s - mean) ** 2 for s in self.signed) / max(n - 1, 1) / n) ** 0.5
        return abs(mean) / error if n > 7 and error else 0.0


class Sums:
    """Sums V and S at every site of a run that rounds nothing: an `at` of `Subject.emulated`.

    Args:
        low: the low dtype.
        everything: also at values that the real run does not round.
    """

    def __init__(self, low: torch.dtype, *, everything: bool = False) -> None:
        self._low, self._everything = low, everything
        self._batches: list[dict[tuple[Node, str], tuple[Tensor, Tensor]]] = []
        self._sites: dict[tuple[Node, str], Site] = {}

    def begin(self) -> None:
        """Begin a batch."""
        self._batches.append({})

    def __call__(self, site: Site, value: Tensor) -> Tensor:
        """Let the gradient of a value add to its sums; one that needs none gets one, since it is rounded too."""
        if site.part == "scores" or not (site.rounds or self._everything):
            return value
        if not value.requires_grad:
            if site.writes:
                return value
            value = value.detach().requires_grad_()
        kept = [value.detach().clone() if site.writes else value.detach()]
        batch, place = self._batches[-1], (site.node, site.part)
        unit = 4.0 ** -BITS[self._low] / 12
        self._sites[place] = site

        def add(grad: Tensor | None) -> None:
            if grad is None or not kept:  # an author's own backward may leave it out
                return
            held = kept.pop()  # freed here, as what autograd saves is
            error = nearest(held, self._low).sub_(held)
            moved = power(held, self._low).mul_(grad).mul_(error != 0)  # masks and zeros are held as they are
            variance = torch.linalg.vector_norm(moved).square() * unit
            signed = error.mul_(grad).sum()
            before = batch.get(place)
            batch[place] = (variance, signed) if before is None else (before[0] + variance, before[1] + signed)

        value.register_hook(add)
        return value

    def found(self) -> list[Moved]:
        """Return what every site moves, read from the device once."""
        zero = torch.zeros(())
        made = []
        for place, site in self._sites.items():
            sums = [batch.get(place, (zero, zero)) for batch in self._batches]
            signed = (float(s) for _, s in sums)  # not a number where a value that moves nothing leaves the range
            made.append(Moved(site, tuple(float(v) for v, _ in sums), tuple(s if isfinite(s) else 0.0 for s in signed)))
        return made


def moved_by(subject: Subject, name: str) -> list[Moved]:
    """Return how each rounding of a policy moves the loss, over all batches of a diagnostic."""
    sums = Sums(subject.policy(name).dtype or torch.bfloat16)
    for batch in subject.given.batches:
        sums.begin()
        subject.emulated(name, batch, sums)
    return sums.found()


def variances(
    model_or_step: Any, inputs: Any = None, target: Any = None, *, loss: Loss = None,
    batches: Iterable[Any] | None = None, policies: Sequence[str] = POLICIES,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Return how much the roundings of each node move the loss, for each policy: {policy: {node key: V}}.

    A node answers for its result and for the casts of its operands. The root of the sum over all nodes predicts the RMS
    error of the loss. One forward and backward a policy and batch runs, in FP32; everything is as before afterwards.

    Args:
        model_or_step: as every diagnostic takes it, as the arguments up to `batches`.
        inputs: of the model.
        target: of the loss.
        loss: a function of the output, or of output and target.
        batches: in place of `inputs`.
        policies: policy strings, or "autocast".

    Raises:
        PolicyError: there is no loss, no such policy, or a part of the model is converted.
        CaptureError: nothing of the model was captured.
    """
    subject = Subject(given_step(model_or_step, inputs, target, loss=loss, batches=batches))
    found: dict[str, dict[str, float]] = {}
    for name in policies:
        by_key = found.setdefault(name, {})
        for moved in moved_by(subject, name):
            by_key[moved.site.key] = by_key.get(moved.site.key, 0.0) + moved.square
    return found
