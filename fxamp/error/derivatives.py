"""How much each rounding moves the gradients, to first order, from two runs that round nothing.

The gradients' error is looked at along a random direction v of the parameters, in which each of them counts alike. To
first order the variance of v.dg is the sum over values t, with the gradients g, of gdot^2 ulp(t)^2/12 for rounding t in
forward, and of tdot^2 ulp(g)^2/12 for rounding g in backward, where a dot is the derivative along v. Both derivatives
are differences of a run ahead and one behind. These are as far away as roundings move values, so that masks of ReLU
flip as they do. Its mean over directions is the sum over parameters of their squared relative errors.

A sum hands its gradient on to both terms as it is. What is rounded once does not change when it is rounded again, so
such a gradient counts once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..diagnose.batches import Batch
from ..diagnose.step import Step
from ..observe.emulation import Observer, Site
from ..observe.tensors import dense
from .report import living, squared
from .rounding import error, power, rounded, variance

Pair = tuple[Tensor, Tensor]


class Derivatives:
    """V of the loss and of the gradients, for any colouring: of every value, and of every read of one.

    The values and gradients of one run are held, which takes more memory than a training step does.

    Args:
        step: the model and its batches.
        name: the policy whose graphs are run.
        norms: squared norms of the gradients, by the name of the parameter, summed over all batches: errors are
            relative to their means. None takes those of the batches that are looked at.
        most: how many batches are looked at.
    """

    def __init__(self, step: Step, name: str, norms: Mapping[str, float] | None = None, most: int = 2) -> None:
        self._step, self._name = step, name
        self._low = step.policy(name).dtype or torch.bfloat16
        self._generator = torch.Generator(step.device).manual_seed(0)
        # The variance of the loss, and of v.dg by rounding in forward and in backward, summed over batches. Keys are
        # those of nodes, for their results; pairs of the keys of a reader and of a value, for the cast of the value for
        # this reader; and places inside of kernels.
        self.losses, self.forward, self.backward = dict[Any, float](), dict[Any, float](), dict[Any, float]()
        self.handed: dict[Any, Any] = {}  # by key, the first one with the same gradient
        looked_at, count = step.batches[:most], len(step.batches)
        if norms is None:
            norms, count = dict[str, float](), len(looked_at)
            for batch in looked_at:
                squared(step.run(batch, name, Observer()).gradients, norms)
        self._sizes = {name: (norms[name] / count) ** 0.5 for name in living(norms)}  # of gradients, RMS over batches
        for batch in looked_at:
            direction, size = self._direction(batch)
            with _moved(step, direction, size):
                ahead = self._pairs(batch)
            first: dict[Any, Any] = {}
            for at, (_, gradient) in ahead.items():  # in the order of backward
                self.handed[at] = first.setdefault((gradient.data_ptr(), gradient.numel()), at)
            with _moved(step, direction, -size):
                behind = self._pairs(batch)
            for at in [at for at in ahead if at in behind]:
                self._add(at, ahead.pop(at), behind.pop(at), size)

    def gradients(self, places: Iterable[Iterable[Any]]) -> list[float]:
        """Return the variance of v.dg that a policy adds at each of the places that it rounds, given by their keys."""
        found, counted = [], set[Any]()
        for keys in map(tuple, places):
            backward = {self.handed[at]: self.backward[at] for at in keys if at in self.backward}
            new = (v for at, v in backward.items() if at not in counted)
            found.append(sum(self.forward.get(at, 0.0) for at in keys) + sum(new))
            counted |= backward.keys()
        return found

    def _direction(self, batch: Batch) -> tuple[dict[str, Tensor], float]:
        """Return a random direction in which each parameter's gradient counts alike, and how far to go along it."""
        values = self._values(batch)
        direction = {
            name: torch.randn(p.shape, generator=self._generator, device=p.device) / self._sizes[name]
            for name, p in self._step.parameters.items() if name in self._sizes
        }  # fmt: skip
        size = sum(float(p.detach().square().sum()) for p in self._step.parameters.values()) ** 0.5
        first = 1e-4 * size / max(sum(float(v.square().sum()) for v in direction.values()) ** 0.5, 1e-30)
        with _moved(self._step, direction, first):
            moved = self._values(batch)
        noisy = self._values(batch, random=True)
        known = values.keys() & moved.keys() & noisy.keys()  # others: a graph was captured again
        ratios = [(noisy[key] - values[key]).norm() / (moved[key] - values[key]).norm() for key in known]
        read = torch.stack(ratios).tolist() if ratios else []
        finite = sorted(r for r in read if 0 < r < math.inf)  # a mask has no distance, and some values do not move
        return direction, first * (finite[len(finite) // 2] if finite else 1.0) / math.sqrt(2)

    def _values(self, batch: Batch, *, random: bool = False) -> dict[Node, Tensor]:
        """Run a forward; return the value of each node that rounds; rounded at random where that is asked."""
        values: dict[Node, Tensor] = {}

        def at(site: Site, value: Tensor) -> Tensor:
            if random and site.rounds and site.part != "scores":
                value = rounded(value, self._low, self._generator)
            if site.rounds and not site.part:
                values[site.node] = value.detach().clone() if site.writes else value.detach()
            return value

        self._step.run(batch, self._name, Observer(at), backward=False)
        return values

    def _pairs(self, batch: Batch) -> dict[Any, Pair]:
        """Run a step that rounds nothing; return each value, and each read of one, with its gradient."""
        found: dict[Any, Pair] = {}

        def keep(key: Any, value: Tensor, writes: bool) -> None:
            held = value.detach().clone() if writes else value.detach()
            value.register_hook(lambda g: None if g is None else found.update({key: (held, dense(g.detach()))}))

        def at(site: Site, value: Tensor) -> Tensor:
            if value.requires_grad and site.part not in ("cast", "clamp"):
                (key,) = keys_of(site)
                keep(key, value, site.writes)
            return value

        def read(reader: str, source: str, value: Tensor) -> Tensor:
            value = torch.ops.aten.alias(value) if value.requires_grad else value.detach().requires_grad_()
            keep((reader, source), value, False)
            return value

        self._step.run(batch, self._name, Observer(at, read), everywhere=True)
        return found

    def _add(self, at: Any, ahead: Pair, behind: Pair, size: float) -> None:
        """Add what one rounding moves, by the two runs on either side.

        A gradient is rounded as it is with the scale of the loss.
        """
        (t, g), (t0, g0) = ahead, behind
        if t.shape != t0.shape or g.shape != g0.shape:
            return  # a choice has changed a size
        scale = self._step.scale(self._name)
        value, gradient = t / 2 + t0 / 2, (g + g0) / 2
        along = torch.where(t == t0, 0.0, t - t0)  # a mask's infinity is the same on both sides
        forward, backward = power(value, self._low), power(gradient.contiguous() * scale, self._low) / scale
        forward.mul_(error(value, self._low) != 0)  # masks stay as they are
        if at[-1] == "scores":
            forward.zero_()  # they round in backward alone
        sums = (gradient, forward.clone()), ((g - g0) / (2 * size), forward), (along / (2 * size), backward)
        for into, (weights, unit) in zip((self.losses, self.forward, self.backward), sums, strict=True):
            into[at] = into.get(at, 0.0) + float(variance(weights, unit, self._low))


def keys_of(site: Site) -> tuple[Any, ...]:
    """Return where the errors of a site are kept: for a cast, at each of its reads; a clamp has none of its own."""
    if site.part == "cast":
        return site.reads
    return () if site.part == "clamp" else (site.place,) if site.part else (site.key,)


@contextlib.contextmanager
def _moved(step: Step, direction: Mapping[str, Tensor], size: float) -> Iterator[None]:
    """Move the parameters along a direction inside: they get other memory, so that no graph of autograd is broken."""
    before = {name: p.data for name, p in step.parameters.items()}
    try:
        for name, v in direction.items():
            step.parameters[name].data = before[name].add(v, alpha=size)
        yield
    finally:
        for name, data in before.items():
            step.parameters[name].data = data
