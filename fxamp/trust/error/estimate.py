"""`fxamp.estimate_error`: the errors of policies, predicted from steps in FP32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..given_step import Batch, Loss, given_step
from .emulation import Site
from .report import PREDICTED, ErrorReport, Errors, NodeError, Tally, degenerate, living, squared
from .rounding import Rounded
from .runs import POLICIES, Ran, Subject, policies_of, refuse_infinite
from .variances import Moved, Sums


def estimate_error(
    model_or_step: Any, inputs: Any = None, target: Any = None, *, loss: Loss = None,
    batches: Iterable[Any] | None = None, policies: Sequence[str] | str = POLICIES, gradients: bool = True,
) -> ErrorReport:  # fmt: skip
    """Predict the errors of policies before anything is trained, and say which roundings they come from.

    The error of the loss comes from a forward and backward that round nothing, and is the root of a sum over all values
    that are rounded: see `fxamp.trust.error.variances`. The error of the gradient comes from one more step a batch, in
    which all of these are rounded at random (stochastic rounding has twice the variance of rounding to nearest). Both
    are RMS values, for these batches and these weights, to first order. Everything is as before afterwards.

    Args:
        model_or_step: A module, a view, or a TrainStep, which brings its own loss.
        inputs: A tensor or a tuple for `model(*inputs)`, or a mapping for `model(**inputs)`.
        target: The second argument of the loss.
        loss: A function of the output, or, with a target, of output and target, that gives one element; None takes the
            output's `.loss`, or a 0-dim output.
        batches: Inputs, or pairs (inputs, target), in the place of `inputs`; two to four are enough.
        policies: Policy strings, or "autocast", which rounds what O1 rounds.
        gradients: Predict errors of gradients too.

    Raises:
        PolicyError: There is no loss, no such policy, a part of the model is converted, or FP32 itself is not finite on
            a batch; the message names the node.
        CaptureError: Nothing of the model was captured, or it is on the meta device.

    Example:
        >>> found = fxamp.estimate_error(model, x, y, loss=nn.functional.cross_entropy, policies="O1")
        >>> found["O1"].nodes[0].key, found["O1"].nodes[0].what
        ('2/linear#0', ...)
    """
    subject = Subject(given_step(model_or_step, inputs, target, loss=loss, batches=batches))
    return estimated(subject, policies_of(subject, policies), gradients=gradients)


def estimated(subject: Subject, names: Sequence[str], *, gradients: bool = True) -> ErrorReport:
    """Predict the errors of policies; of those that round the same, once.

    Args:
        subject: the model and its batches.
        names: of the policies.
        gradients: predict errors of gradients too.
    """
    found: dict[str, Errors] = {}
    estimates = {}
    for name in names:
        same = str(subject.policy(name))
        if same not in estimates:
            estimates[same] = _Estimate(subject, name, gradients)
        found[name] = replace(estimates[same].errors, policy=name)
    first = next(iter(estimates.values()))
    mean = sum(first.losses) / len(first.losses)
    dead = tuple(sorted(first.norms.keys() - set(living(first.norms))))
    return ErrorReport(
        type(subject.model).__name__, False, "", len(first.losses), mean, 2.0**-24 * abs(mean), dead,
        tuple(found.values()), (PREDICTED, *degenerate(first.norms)),
    )  # fmt: skip


class _Estimate:
    """The errors of one policy over all batches.

    Attributes:
        losses: by batch.
        norms: squared norms of the gradients, by name.
        errors: what is predicted.
    """

    def __init__(self, subject: Subject, name: str, gradients: bool) -> None:
        self._subject, self._name = subject, name
        self._low = subject.policy(name).dtype or torch.bfloat16
        self._sums, self._flips = Sums(self._low), dict[str, float]()
        self._generator = torch.Generator(subject.device).manual_seed(0)
        self.losses, self.norms = list[float](), dict[str, float]()
        tally = Tally()
        for number, batch in enumerate(subject.given.batches):
            plain, choices = self._plain(batch)
            refuse_infinite(subject, plain, batch, number)
            self.losses.append(plain.loss)
            squared(plain.gradients, self.norms)
            probe = self._probe(batch, choices) if gradients else plain
            tally.add(0.0, probe.gradients, plain.gradients, 2.0)
        moved = self._sums.found()
        square = sum(m.square for m in moved) + (2.0**-24 * sum(self.losses) / len(self.losses)) ** 2
        self.errors = tally.errors(
            name, self.norms, loss=square**0.5, increase=square / 2, nodes=_nodes(moved),
            flips={key: value / len(self.losses) for key, value in self._flips.items() if value > 1e-3},
        )  # fmt: skip

    def _plain(self, batch: Batch) -> tuple[Ran, list[Tensor]]:
        """Run a step that rounds nothing; return it, and the operands of its choices, in order."""
        choices: list[Tensor] = []
        self._sums.begin()

        def decides(key: str, operand: Tensor, count: int, dim: int | None) -> None:
            choices.append(operand.clone())

        return self._subject.emulated(self._name, batch, self._sums, decides=decides), choices

    def _probe(self, batch: Batch, choices: list[Tensor]) -> Ran:
        """Run a step that rounds at random, and count the choices that it would change."""
        low, generator = self._low, self._generator
        before = iter(choices)

        def at(site: Site, value: Tensor) -> Tensor:
            return rounded(value, low, generator, forward=site.part != "scores") if site.rounds else value

        def edge(value: Tensor) -> Tensor:
            return rounded(value, low, generator, forward=False)

        def decides(key: str, operand: Tensor, count: int, dim: int | None) -> None:
            self._flips[key] = self._flips.get(key, 0.0) + _expected_flips(next(before), operand, count, dim)

        return self._subject.emulated(self._name, batch, at, edge, decides=decides)


def rounded(value: Tensor, low: torch.dtype, generator: torch.Generator, *, forward: bool = True) -> Tensor:
    """Return a value rounded at random, whose gradient is rounded at random in backward."""
    made: Tensor = Rounded.apply(value, low, generator, forward, True)  # type: ignore[no-untyped-call]
    return made


def _expected_flips(true: Tensor, probed: Tensor, count: int, dim: int | None) -> float:
    """Return how many choices of the `count` largest are expected to change.

    The difference m of the last that is chosen and the first that is not has the noise s * root 2, where s is that of
    one value: it changes sign with the probability of a normal variable below -m / (s * root 2).
    """
    rows = true.flatten()[None] if dim is None else true.movedim(dim, -1).flatten(0, -2)
    if rows.shape[-1] <= count:
        return 0.0
    largest = rows.topk(count + 1, -1).values
    margin = (largest[:, count - 1] - largest[:, count]).double()
    noise = float((probed - true).double().square().mean().sqrt()) / math.sqrt(2)
    return float(torch.special.ndtr(-margin / (noise * math.sqrt(2))).sum()) if noise else 0.0


def _nodes(moved: Sequence[Moved]) -> tuple[NodeError, ...]:
    """Return what moves the loss, the largest share first."""
    whole = sum(m.square for m in moved) or 1.0
    rows = [
        NodeError(m.site.key, m.site.what, m.site.module, m.site.line, m.square / whole, m.bias)
        for m in moved if m.square
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda node: -node.share))
