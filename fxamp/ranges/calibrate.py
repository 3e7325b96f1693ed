"""`fxamp.calibrate`: how large each value and each gradient of a model gets, in a run that rounds nothing.

What is measured stays on the device, a few numbers for each value, and is read once at the end.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from passes.contract.policy import Policy
from passes.graph.notes import is_inserted
from passes.ops import ops
from passes.ops.rules import row_of

from ..calibration import Calibration, Range, checksums
from ..diagnose.step import diagnostic, one_policy, step_of
from ..observe.emulation import Observer, Site
from ..observe.places import wiring
from ..observe.workload import Loss

_SAMPLE = 1024  # elements of a tensor that are counted
_FLUSHED, _NORMAL = 2.0**-25, 2.0**-14  # FP16 rounds what is at most this to 0; what is below this has fewer bits


@diagnostic
def calibrate(
    model_or_step: Any, inputs: Any = None, target: Any = None, *, kwargs: Mapping[str, Any] | None = None,
    loss: Loss = None, batches: Iterable[Any] | None = None, policies: Policy | str | None = None,
    scale: float | None = None, policy: Policy | str | None = None,
) -> Calibration:  # fmt: skip
    """Measure the range of every value and gradient of a model in FP32, for a conversion to FP16.

    `fxamp.convert(..., calibration=found)` then runs in FP32 what came within a factor of 8 of FP16's largest number,
    65504. The ranges hold for these batches and these parameters. Everything is as before afterwards.

    Args:
        policies: The policy whose graph is measured; None is that of the view, else O1. From O2 on losses are split
            into ops.
        scale: The loss scale with which gradients are counted that FP16 rounds to 0; None is that of the TrainStep,
            else 1.
        policy: The name of `policies` before; accepted until 1.0.

    Raises:
        PolicyError: There is no loss, or there are no inputs; a part of the model is converted; the policy rounds
            nothing.
        CaptureError: Nothing of the model was captured.
        NotAModuleError: It is neither a module nor a TrainStep.

    Example:
        >>> found = fxamp.calibrate(model, x, y, loss=nn.functional.cross_entropy)
        >>> found.values["1/relu#0"].fits, found.gradients["1/relu#0"].not_finite
        (True, 0)
    """
    step = step_of(model_or_step, inputs, target, kwargs=kwargs, loss=loss, batches=batches)
    ranges = _Ranges(step.loss_scale(scale), dict(step.author.named_parameters()))
    asked = str(one_policy(policies if policies is not None else policy) or step.name or "O1")
    for batch in step.batches:
        step.run(batch, asked, Observer(ranges))
        ranges.end_batch()
    values, gradients = ranges.read()
    readers, numbers = ranges.wiring()
    return Calibration(
        values, gradients, readers, len(step.batches), ranges.scale, checksums(step.author), numbers,
        step.author.training,
    )  # fmt: skip


class _Ranges:
    """Adds up what is seen of each value, and of its gradient with a loss scale: the `value` of an observer."""

    def __init__(self, scale: float, parameters: Mapping[str, Tensor]) -> None:
        self.scale, self._parameters = scale, parameters
        self._seen: list[tuple[str, bool, Tensor, Tensor, Tensor]] = []  # key, backward, least, largest, and a sample
        self._measured: list[tuple[list[tuple[str, bool]], Tensor]] = []
        self._bounds: dict[str, Tensor | float | None] = {}
        self._nodes: dict[str, Node] = {}

    def __call__(self, site: Site, value: Tensor) -> Tensor:
        """Look at the value of a site, and at its gradient when it is there."""
        readers = dict.fromkeys(reader for reader, _ in site.reads)  # of a cast
        readers = readers or {site.key: None}
        for key in readers:
            self._look(key, False, value)
            if value.requires_grad:
                value.register_hook(functools.partial(self._look, key, True))
        if site.part == "":
            self._nodes.setdefault(site.key, site.node)
            if site.key not in self._bounds:
                self._bounds[site.key] = self._bound(site)
        else:
            self._bounds |= readers
        return value

    def _bound(self, site: Site) -> Tensor | float | None:
        """Return the largest absolute value that a node gives, whatever it is given; None where nothing proves one.

        n normalised numbers have the mean square 1 at most, so that none is above root n.
        """
        node, row = site.node, row_of(site.node)
        sizes = ops.argument(node, row.normalizes) if row.normalizes else None
        if sizes is None or not all(isinstance(size, int) for size in sizes):
            return row.at_most
        bound: Any = math.sqrt(math.prod(sizes))
        for name, applied in (("weight", operator.mul), ("bias", operator.add)):
            held = ops.argument(node, name)
            while isinstance(held, Node) and is_inserted(held):
                held = held.args[0]
            if isinstance(held, Node):
                parameter = self._parameters.get(site.names.get(held.name, ""))
                if parameter is None:
                    return None  # it is computed, or a buffer
                bound = applied(bound, parameter.detach().abs().max())
        return bound  # type: ignore[no-any-return]

    def _look(self, key: str, backward: bool, t: Tensor | None) -> None:
        if t is None or not t.numel():  # an author's own backward may leave a gradient out
            return
        t = t.detach()
        if not backward:  # -inf masks, and FP16 holds it
            t = t.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0)
        # In the order of memory, so that a transposed value is not copied.
        t = t.permute(sorted(range(t.dim()), key=t.stride, reverse=True)).reshape(-1)
        sample = t[:: -(-t.numel() // _SAMPLE)]
        self._seen.append((key, backward, *torch.aminmax(t), sample.clone() if sample.numel() < t.numel() else sample))

    def end_batch(self) -> None:
        """Add up what was seen of a batch, for all values at once: their samples need not be kept."""
        if not self._seen:
            return
        names, backward, least, largest, samples = zip(*self._seen, strict=True)
        size = torch.cat(samples).abs()
        lengths = torch.tensor([len(sample) for sample in samples], device=size.device)
        factors = torch.where(torch.tensor(backward, device=size.device), self.scale, 1.0)
        scaled = size * factors.repeat_interleave(lengths, output_size=len(size))
        counted = ((size > 0), (scaled < _NORMAL) & (size > 0), (scaled <= _FLUSHED) & (size > 0))
        counts = [torch.segment_reduce(c.float(), "sum", lengths=lengths) for c in counted]
        peaks = torch.maximum(-torch.stack(least), torch.stack(largest))
        self._measured.append((list(zip(names, backward, strict=True)), torch.stack((peaks, *counts), 1)))
        self._seen = []

    def wiring(self) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
        """Return the nodes that read the value of each node, and the numbers that it computes with, by key."""
        graphs = dict.fromkeys(node.graph for node in self._nodes.values())
        known = {key: one for graph in graphs for key, one in wiring(graph).items() if key in self._nodes}
        return {key: readers for key, (readers, _) in known.items()}, {k: n for k, (_, n) in known.items() if n}

    def read(self) -> tuple[dict[str, Range], dict[str, Range]]:
        """Return the ranges of values and of gradients, by key."""
        found: tuple[dict[str, Range], dict[str, Range]] = {}, {}
        by: dict[tuple[str, bool], list[list[float]]] = {}
        rows = torch.cat([told for _, told in self._measured]).tolist() if self._measured else []
        for at, row in zip((at for names, _ in self._measured for at in names), rows, strict=True):
            by.setdefault(at, []).append(row)
        for (key, backward), seen in by.items():
            bound = None if backward else self._bounds.get(key)
            found[backward][key] = _range(seen, None if bound is None else float(bound))
        return found


def _range(seen: Sequence[Sequence[float]], bound: float | None) -> Range:
    """Return a range from rows of: the largest, and how many of a sample are not 0, not normal, and rounded to 0."""
    bad = sum(not math.isfinite(row[0]) for row in seen)
    count, small, none = (sum(row[i] for row in seen) for i in (1, 2, 3))
    count = count or 1.0
    return Range(None if bad else max(row[0] for row in seen), none / count, (small - none) / count, bad,
                 None if bad else bound)  # fmt: skip
