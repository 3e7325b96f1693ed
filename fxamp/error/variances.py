"""How much each rounding moves the loss, to first order, from one run that rounds nothing.

A value t with the gradient g = dloss/dt moves the loss by the sum of g * (round(t) - t) over its elements. If rounding
errors are independent, its variance is V, the sum of g^2 ulp(t)^2 / 12 (Widrow); S is the sum that the actual roundings
give. Where they have one sign, as where many elements are equal, S^2 is larger, and counts in the place of V.

No policy is needed for a run: V and S are known at every value, and at every set of reads of one, whatever rounds it.
So one run serves all policies whose roundings are at places of its graphs. A cast gets the gradient of its own readers;
of two casts of a value in two policies, one is for readers of the other.

Where a kernel adds many values up in 16 bits, one after the other, S is what it makes of the sum, less the sum.

One error is no noise: h + u, where h is a low value and u less than half of its ulp, is h. The update u is lost, and
the next one too: over many steps such losses add up, while roundings cancel. So what they move the loss by, L, the sum
of g * -u over lost updates, is added over all sums of a graph before it is squared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from passes.graph.values import LOW_DTYPES
from passes.ops.rules import row_of

from ..diagnose.batches import Batch
from ..diagnose.step import Outcome, Step
from ..observe.emulation import Observer, Place, Site
from .rounding import BITS, blocks, error, power, variance

_NOTHING = (0.0,) * 6  # what is summed at a place that no gradient comes to


@dataclass(frozen=True)
class Moved:
    """How the roundings at one place move the loss."""

    site: Site  # where it is rounded
    variance: tuple[float, ...]  # V, by batch
    signed: tuple[float, ...]  # S, by batch
    lost: tuple[float, ...]  # L, by batch: what updates that are lost move the loss by
    swamped: float  # the share of updates that are lost
    beyond: bool  # the dtype does not hold values that move the loss, which no rounding stands for

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
    """Where the graphs of a policy round, and where they could."""

    low: torch.dtype  # what the policy rounds to
    rounded: dict[Place, Site] = field(default_factory=dict)  # the places that it rounds, each with its first site
    updates: set[Place] = field(default_factory=set)  # those of them that are the sum of two low values
    values: set[Place] = field(default_factory=set)  # the values that its graphs make, and those inside kernels
    # the reads of values, as pairs of the keys of the reader and of the value
    reads: set[tuple[str, str]] = field(default_factory=set)

    def at(self, site: Site, value: Tensor) -> Tensor:
        """Note a value."""
        if site.part != "cast":
            self.values.add(site.place)
        if site.rounds and site.part != "scores":
            self.rounded.setdefault(site.place, site)
            if _is_sum(site):
                self.updates.add(site.place)
        return value

    def read(self, reader: str, source: str, value: Tensor) -> Tensor:
        """Note a read of a value."""
        self.reads.add((reader, source))
        return value

    def serve(self, other: _Places) -> bool:
        """Say whether a run of these graphs passes all places that another policy rounds."""
        left = (site for place, site in other.rounded.items() if place not in self.rounded and place not in self.values)
        return all(site.reads and self.reads.issuperset(site.reads) for site in left)


class Unrounded:
    """Steps that round nothing, and how the roundings of several policies move their loss.

    A batch takes one step, unless a policy rounds what no other policy's graph has.
    """

    def __init__(self, step: Step, names: Sequence[str]) -> None:
        self._step = step
        self._places = {name: self._places_of(name) for name in names}
        self._sums: dict[str, list[Sums]] = {}
        self.runs: dict[str, list[str]] = {}  # by the policy whose graphs a step runs, all policies that it serves
        left = list(names)
        while left:
            served = {name: [n for n in left if self._places[name].serve(self._places[n])] for name in left}
            base = max(left, key=lambda name: len(served[name]))
            self.runs[base], self._sums[base] = served[base], []
            left = [n for n in left if n not in served[base]]

    def _places_of(self, name: str) -> _Places:
        found = _Places(self._step.policy(name).dtype or torch.bfloat16)
        for batch in self._step.unlike():
            self._step.run(batch, name, Observer(found.at, found.read), everywhere=True, backward=False)
        return found

    def run(self, base: str, batch: Batch, choices: list[tuple[str, Tensor]]) -> Outcome:
        """Run a step on one batch, and add the key and the operand of each choice to `choices`."""
        sums = Sums([self._places[n] for n in self.runs[base]], self._places[base].rounded)
        self._sums[base].append(sums)
        observer = Observer(
            sums.at, sums.read, total=sums.total, choice=lambda key, o, *_: choices.append((key, o.clone()))
        )
        outcome = self._step.run(batch, base, observer, everywhere=True)
        sums.end()
        return outcome

    def base(self, name: str) -> str:
        """Return the policy whose graphs are run for a policy."""
        return next(base for base, served in self.runs.items() if name in served)

    def moved(self, name: str) -> list[Moved]:
        """Return what each rounding of a policy moves, over all batches that were run."""
        places = self._places[name]
        sums = [one.found(places.low) for one in self._sums[self.base(name)]]
        made = []
        for place, site in places.rounded.items():
            seen = zip(*(one.get(place, _NOTHING) for one in sums), strict=True)
            variance, signed, lost, below, updates, beyond = seen
            if place not in places.updates:  # of this policy, but of another one that is served
                lost, below = (0.0,) * len(sums), (0.0,)
            made.append(Moved(site, variance, signed, lost, sum(below) / max(sum(updates), 1.0), any(beyond)))
        return made


class Sums:
    """Sums V and S over one step that rounds nothing, at each place that a policy rounds.

    Args:
        served: the places of policies.
        nodes: the places that are nodes of the graphs that run; those of other casts are seen by their reads.
    """

    def __init__(self, served: Sequence[_Places], nodes: Collection[Place]) -> None:
        self._lows: dict[Place, dict[torch.dtype, None]] = {}
        self._by_read: dict[tuple[str, str], list[Place]] = {}
        self._updates = frozenset(place for places in served for place in places.updates)
        self._operands: tuple[str, list[Tensor]] = "", []  # of the node that is read for
        self._totals: dict[Place, Tensor] = {}  # what a kernel makes of a sum, until the sum is seen
        for places in served:
            for place in places.rounded:
                self._lows.setdefault(place, {})[places.low] = None
        for place in sorted(self._lows, key=len, reverse=True):  # casts for many readers before those for some of them
            for read in place[1:] if place[0] == "cast" and place not in nodes else ():
                self._by_read.setdefault(read, []).append(place)
        self._views: dict[tuple[Place, int], Tensor] = {}  # what is read by other casts, until its gradient is there
        self._found: dict[torch.dtype, dict[Place, Tensor]] = {}

    def at(self, site: Site, value: Tensor) -> Tensor:
        """Let the gradient of a value add to its sums."""
        if site.place not in self._lows:
            return value
        reader, operands = self._operands
        summed = site.place in self._updates and reader == site.key and len(operands) == 2 and not site.writes
        return self._hooked(site.place, value, writes=site.writes, operands=operands if summed else ())

    def total(self, site: Site, total: Tensor) -> None:
        """Note what a kernel makes of a sum in 16 bits, whose error is that and no rounding of the sum."""
        self._totals[site.place] = total

    def read(self, reader: str, source: str, value: Tensor) -> Tensor:
        """Let the gradient of a read add to the sums of the casts that it goes through, each a view for its readers."""
        if reader != self._operands[0]:
            self._operands = reader, []
        self._operands[1].append(value)
        for place in self._by_read.get((reader, source), ()):
            at = place, value.data_ptr()
            if at not in self._views:
                self._views[at] = self._hooked(place, value.view_as(value), at)
            value = self._views[at]
        return value

    def _hooked(
        self, place: Place, value: Tensor, view: Any = None, *, writes: bool = False, operands: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return a value whose gradient adds to sums; one that needs none gets one, since it is rounded too.

        The `operands` of a sum are results of other nodes, which are kept for their own sums in any case.
        """
        if not value.requires_grad:
            if writes:
                return value
            value = value.detach().requires_grad_()
        kept = [(
            value.detach().clone() if writes else value.detach(), [t.detach() for t in operands],
            self._totals.pop(place, None),
        )]  # fmt: skip

        def add(grad: Tensor | None) -> None:
            self._views.pop(view, None)
            if grad is not None and kept:  # an author's own backward may leave it out
                self._add(place, *kept.pop(), grad)  # freed here, as what autograd saves is

        value.register_hook(add)
        return value

    def _add(
        self, place: Place, held: Tensor, operands: Sequence[Tensor], total: Tensor | None, grad: Tensor
    ) -> None:  # fmt: skip
        read = [t.expand_as(held) for t in operands]
        for low in self._lows[place]:
            found = self._found.setdefault(low, {})
            if total is not None:
                apart = (total - held).mul_(grad).sum()
                found[place] = torch.stack((apart.square(), apart, *torch.zeros(4))) + found.get(place, 0.0)
                continue
            for t, g, *terms in blocks(held, grad, *read):
                off = error(t, low)
                unit = power(t, low)
                lost = _lost(t, g, terms, unit, low) if terms else torch.zeros(3, device=g.device)
                moved = variance(g, unit.mul_(off != 0), low)  # masks and zeros stay as they are
                beyond = (off.isinf() & (g != 0)).any().float()[None]
                sums = torch.cat((torch.stack((moved, off.mul_(g).sum())), lost, beyond))
                found[place] = sums if place not in found else found[place] + sums

    def end(self) -> None:
        """Let go of the values of a step: of what has got no gradient, and of what was read last."""
        self._views.clear()
        self._totals.clear()
        self._operands = "", []

    def found(self, low: torch.dtype) -> Mapping[Place, tuple[float, ...]]:
        """Return by place V, S, L, how many updates are lost, of how many, and whether values are beyond the dtype."""
        sums = self._found.get(low, {})
        read = torch.stack(tuple(sums.values())).tolist() if sums else []
        made = zip(sums, read, strict=True)
        # S is not a number where a value that moves nothing leaves the range.
        return {place: (v, *(s if math.isfinite(s) else 0.0 for s in more)) for place, (v, *more) in made}


def coherent(moved: Sequence[Moved]) -> float:
    """Return the mean square, over batches, by which lost updates move the loss beyond what they would as noise."""
    batches: list[tuple[float, ...]] = list(zip(*(m.lost for m in moved), strict=True))
    squares = [max(sum(lost) ** 2 - sum(e * e for e in lost), 0.0) for lost in batches]
    return float(sum(squares)) / max(len(squares), 1)


def _is_sum(site: Site) -> bool:
    """Say whether a value is the sum of two low values; one that is written in place cannot be looked at later."""
    operands = site.node.all_input_nodes
    low = [o.meta["val"].dtype in LOW_DTYPES for o in operands if isinstance(o.meta.get("val"), Tensor)]
    row = row_of(site.node)
    return row.free_backward and "arithmetic" in row.in_norm and not site.part and low == [True, True]


def _lost(total: Tensor, grad: Tensor, terms: Sequence[Tensor], unit: Tensor, low: torch.dtype) -> Tensor:
    """Return L of a sum of two terms, how many of its updates are lost, and how many there are.

    The update is the smaller term. `unit` is the power of two of the sum.
    """
    first, second = terms[0], total - terms[0]  # with its sign, and its factor alpha
    update = torch.where(first.abs() < second.abs(), first, second)
    lost = (update.abs() < unit * 2.0 ** (-BITS[low] - 1)) & (update != 0)
    return torch.stack((-(update * grad * lost).sum(), lost.sum(), (update != 0).sum()))


def moved_by(step: Step, name: str) -> Iterator[Moved]:
    """Yield how each rounding of a policy moves the loss, over all batches of a diagnostic."""
    steps = Unrounded(step, [name])
    for batch in step.batches:
        steps.run(name, batch, [])
    yield from steps.moved(name)
