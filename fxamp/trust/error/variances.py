"""How much each rounding moves the loss, to first order, from one run that rounds nothing.

A value t with the gradient g = dloss/dt moves the loss by the sum of g * (round(t) - t) over its elements. If rounding
errors are independent, its variance is V, the sum of g^2 ulp(t)^2 / 12 (Widrow); S is the sum that the actual roundings
give. Where they have one sign, as where many elements are equal, S^2 is larger, and counts in the place of V.

No policy is needed for a run: V and S are known at every value, and at every set of reads of one, whatever rounds it.
So one run serves all policies whose roundings are at places of its graphs. A cast gets the gradient of its own readers;
of two casts of a value in two policies, one is for readers of the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ..given_step import Batch
from .emulation import Decides, Place, Site
from .rounding import BITS, blocks, nearest, power
from .runs import Ran, Subject


@dataclass(frozen=True)
class Moved:
    """How the roundings at one place move the loss.

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


@dataclass
class _Places:
    """Where the graphs of a policy round, and where they could.

    Attributes:
        low: what the policy rounds to.
        rounded: the places that it rounds, each with its first site.
        values: the values that its graphs make, and those inside kernels.
        reads: the reads of values, as pairs of the keys of the reader and of the value.
    """

    low: torch.dtype
    rounded: dict[Place, Site] = field(default_factory=dict)
    values: set[Place] = field(default_factory=set)
    reads: set[tuple[str, str]] = field(default_factory=set)

    def at(self, site: Site, value: Tensor) -> Tensor:
        """Note a value."""
        if site.part != "cast":
            self.values.add(site.place)
        if site.rounds and site.part != "scores":
            self.rounded.setdefault(site.place, site)
        return value

    def read(self, reader: str, source: str, value: Tensor) -> Tensor:
        """Note a read of a value."""
        self.reads.add((reader, source))
        return value

    def have(self, place: Place, site: Site) -> bool:
        """Say whether a run of these graphs passes a place of another policy."""
        return place in self.rounded or place in self.values or (bool(site.reads) and self.reads.issuperset(site.reads))


class Unrounded:
    """Steps that round nothing, and how the roundings of several policies move their loss.

    Args:
        subject: the model and its batches.
        names: of the policies.

    Attributes:
        runs: for each step that a batch needs, the policy whose graphs it runs, and all policies that it serves. It is
            one step, unless a policy rounds what no other policy's graph has.
    """

    def __init__(self, subject: Subject, names: Sequence[str]) -> None:
        self._subject = subject
        self._places = {name: self._places_of(name) for name in names}
        self._sums: dict[str, list[Sums]] = {}
        self.runs: dict[str, list[str]] = {}
        left = list(names)
        while left:
            served = {name: [n for n in left if self._serves(name, n)] for name in left}
            base = max(left, key=lambda name: len(served[name]))
            self.runs[base], self._sums[base] = served[base], []
            left = [n for n in left if n not in served[base]]

    def _places_of(self, name: str) -> _Places:
        found = _Places(self._subject.policy(name).dtype or torch.bfloat16)
        batch = self._subject.given.batches[0]
        self._subject.emulated(name, batch, found.at, read=found.read, everywhere=True, backward=False)
        return found

    def _serves(self, base: str, name: str) -> bool:
        here = self._places[base]
        return all(here.have(place, site) for place, site in self._places[name].rounded.items())

    def run(self, base: str, batch: Batch, decides: Decides | None = None) -> Ran:
        """Run a step on one batch."""
        sums = Sums([self._places[n] for n in self.runs[base]], self._places[base].rounded)
        self._sums[base].append(sums)
        ran = self._subject.emulated(base, batch, sums.at, read=sums.read, decides=decides, everywhere=True)
        sums.views.clear()  # of what has got no gradient
        return ran

    def moved(self, name: str) -> list[Moved]:
        """Return what each rounding of a policy moves, over all batches that were run."""
        base = next(base for base, served in self.runs.items() if name in served)
        places = self._places[name]
        sums = [one.found(places.low) for one in self._sums[base]]
        both = {place: [one.get(place, (0.0, 0.0)) for one in sums] for place in places.rounded}
        return [
            Moved(site, tuple(v for v, _ in both[place]), tuple(s for _, s in both[place]))
            for place, site in places.rounded.items()
        ]


class Sums:
    """Sums V and S over one step that rounds nothing, at each place that a policy rounds.

    Args:
        served: the places of policies.
        nodes: the places that are nodes of the graphs that run; those of other casts are seen by their reads.

    Attributes:
        views: what is read by other casts, until its gradient is there.
    """

    def __init__(self, served: Sequence[_Places], nodes: Collection[Place]) -> None:
        self._lows: dict[Place, dict[torch.dtype, None]] = {}
        self._by_read: dict[tuple[str, str], list[Place]] = {}
        for places in served:
            for place in places.rounded:
                self._lows.setdefault(place, {})[places.low] = None
        for place in sorted(self._lows, key=len, reverse=True):  # casts for many readers before those for some of them
            for read in place[1:] if place[0] == "cast" and place not in nodes else ():
                self._by_read.setdefault(read, []).append(place)
        self.views: dict[tuple[Place, int], Tensor] = {}
        self._found: dict[torch.dtype, dict[Place, Tensor]] = {}

    def at(self, site: Site, value: Tensor) -> Tensor:
        """Let the gradient of a value add to its sums."""
        return self._hooked(site.place, value, writes=site.writes) if site.place in self._lows else value

    def read(self, reader: str, source: str, value: Tensor) -> Tensor:
        """Let the gradient of a read add to the sums of the casts that it goes through, each a view for its readers."""
        for place in self._by_read.get((reader, source), ()):
            at = place, value.data_ptr()
            if at not in self.views:
                self.views[at] = self._hooked(place, value.view_as(value), at)
            value = self.views[at]
        return value

    def _hooked(self, place: Place, value: Tensor, view: Any = None, *, writes: bool = False) -> Tensor:
        """Return a value whose gradient adds to sums; one that needs none gets one, since it is rounded too."""
        if not value.requires_grad:
            if writes:
                return value
            value = value.detach().requires_grad_()
        kept = [value.detach().clone() if writes else value.detach()]

        def add(grad: Tensor | None) -> None:
            self.views.pop(view, None)
            if grad is not None and kept:  # an author's own backward may leave it out
                self._add(place, kept.pop(), grad)  # freed here, as what autograd saves is

        value.register_hook(add)
        return value

    def _add(self, place: Place, held: Tensor, grad: Tensor) -> None:
        for low in self._lows[place]:
            found = self._found.setdefault(low, {})
            for t, g in blocks(held, grad):
                error = nearest(t, low).sub_(t)
                moved = power(t, low).mul_(g).mul_(error != 0)  # masks and zeros are held as they are
                variance = torch.linalg.vector_norm(moved).square() * (4.0 ** -BITS[low] / 12)
                both = torch.stack((variance, error.mul_(g).sum()))
                found[place] = both if place not in found else found[place] + both

    def found(self, low: torch.dtype) -> Mapping[Place, tuple[float, float]]:
        """Return V and S by place, read from the device once."""
        sums = self._found.get(low, {})
        read = torch.stack(tuple(sums.values())).tolist() if sums else []
        # S is not a number where a value that moves nothing leaves the range.
        return {place: (v, s if isfinite(s) else 0.0) for place, (v, s) in zip(sums, read, strict=True)}


def moved_by(subject: Subject, name: str) -> Iterator[Moved]:
    """Yield how each rounding of a policy moves the loss, over all batches of a diagnostic."""
    steps = Unrounded(subject, [name])
    for batch in subject.given.batches:
        steps.run(name, batch)
    yield from steps.moved(name)
