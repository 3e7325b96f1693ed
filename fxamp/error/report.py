"""The errors of a model under several policies, predicted or measured, as data and as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from passes.contract.errors import public
from passes.contract.policy import Policy

from ..results import Result, named, some, table
from .rounding import blocks

_SHOWN = 5  # nodes of a policy in the text
_DEAD = 1e-6  # of the largest gradient's norm: below it a gradient is what FP32 leaves of zero
PREDICTED = "Predicted to first order, for these batches and these weights: an RMS, not a bound."


@dataclass(frozen=True)
class NodeError:
    """How much the roundings at one node move the loss."""

    key: str  # the key of its decision; for a cast, that of the node that reads it
    what: str  # what is rounded: the op, or "cast of NAME"
    module: str  # the path of its module
    line: str  # the line of your code
    share: float  # its share of the variance of the loss
    # the mean of its signed error over the batches, in standard errors; above 5 it is no noise. 0 for fewer than
    # eight batches, which cannot tell.
    bias: float = 0.0
    # its share of the variance of the gradients, along a direction in which each parameter counts alike; None where
    # that was not asked for
    gradient: float | None = None


@dataclass(frozen=True)
class Errors:
    """The errors of one policy."""

    policy: str  # as it was asked for; "FP32" is the model without conversion
    loss: float  # RMS error of the loss, absolute, over batches
    # predicted: by how much the loss rises on average over roundings, which have no mean: half of the sum over values
    # of ulp^2 / 12 times the second derivative. One draw a batch: few examples give it to a factor of two. It
    # supposes that gradients are the derivative of the loss (nothing in it is detached). None where errors are
    # measured, or gradients not predicted.
    increase: float | None
    gradient: float  # norm of the error of the whole gradient over the norm of the gradient
    per_parameter: float  # root of the mean square of `parameters`. `fxamp.tune` keeps this one within its tolerance.
    parameters: Mapping[str, float]  # the same for each parameter alone, by name; without dead ones
    nodes: tuple[NodeError, ...] = ()  # what moves the loss, the largest share first; empty where errors are measured
    # measured: the relative distance of each node's value from FP32, by key
    values: Mapping[str, float] = field(default_factory=dict)
    outputs: tuple[float, ...] = ()  # measured: the relative distance of each float output
    # predicted: how many choices of each top-k or argmax a batch are expected to change, by key. They are beside the
    # variance, never in it.
    flips: Mapping[str, float] = field(default_factory=dict)
    # predicted: the share of the updates of a sum that are lost, since they are below half an ulp of the low value
    # that they are added to, by key; of sums that lose most. Losses of many steps add up.
    swamped: Mapping[str, float] = field(default_factory=dict)
    # measured: how many casts a step makes, forward and backward; of batches given in several ways, the most
    casts: int | None = None
    cast_bytes: int | None = None  # measured: the bytes that these read and write

    @property
    def flagged(self) -> tuple[str, ...]:
        """The parameters whose gradient is below root 3 times its noise (arXiv 2505.19115)."""
        return tuple(name for name, error in self.parameters.items() if error * 3**0.5 > 1)

    @property
    def biased(self) -> tuple[NodeError, ...]:
        """The nodes with a share of at least a hundredth whose error has one sign over the batches."""
        return tuple(node for node in self.nodes if node.bias > 5 and node.share >= 0.01)

    def by(self, what: str, of: str = "share") -> dict[str, float]:
        """Return the shares by "module", "line" or "what", the largest first: `share`, or `gradient`."""
        found: dict[str, float] = {}
        for node in self.nodes:
            found[getattr(node, what)] = found.get(getattr(node, what), 0.0) + (getattr(node, of) or 0.0)
        return dict(sorted(found.items(), key=lambda item: -item[1]))


@public
@dataclass(frozen=True, repr=False)
class ErrorReport(Result):
    """The errors of a model under several policies.

    Attributes:
        name: The class of the model.
        measured: The errors are measured, and not predicted.
        reference: What they are measured against: "float64", or "FP32" and the cause.
        batches: How many batches there were.
        loss: The mean loss.
        floor: The RMS error of the loss in FP32 itself: below it nothing can be said.
        dead: The parameters whose true gradient is zero, such as biases of keys; no error is relative to these.
        policies: The errors of each policy.
        notes: What is to be said of them.

    Example:
        >>> found = fxamp.estimate_error(model, x, y, loss=nn.functional.cross_entropy, policies=("O1", "O2"))
        >>> [errors.policy for errors in found.policies], found["O1"].gradient < 0.05
        (['O1', 'O2'], True)
    """

    name: str
    measured: bool
    reference: str
    batches: int
    loss: float
    floor: float
    dead: tuple[str, ...]
    policies: tuple[Errors, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, policy: str) -> Errors:
        """Return the errors of one policy.

        Raises:
            PolicyError: The report has no such policy.
        """
        return named({errors.policy: errors for errors in self.policies}, policy, "report")

    @property
    def policy(self) -> Policy | None:
        """The policy that rounds most with an error per parameter of at most twice autocast's.

        Where autocast is none of the rows it is the smallest error; None if no policy is among them.

        Example:
            >>> found = fxamp.measure_error(model, x, y, loss=nn.functional.cross_entropy, policies=("autocast", "O1"))
            >>> found.policy.level.value
            'O1'
        """
        rows = [e for e in self.policies if e.policy != "FP32" and math.isfinite(e.per_parameter)]
        beside = [e.per_parameter for e in rows if e.policy.startswith("autocast")]
        limit = 2 * min(beside or [e.per_parameter for e in rows], default=0.0)
        near = [e.policy for e in rows if e.per_parameter <= limit and not e.policy.startswith("autocast")]
        found = [Policy.of(name.partition(" by a plan")[0]) for name in near]
        return max(found, key=lambda policy: policy.level.value, default=None)

    def beyond(self, tolerance: float) -> tuple[str, ...]:
        """Return the policies whose error per parameter is above a tolerance, or is not a number.

        Example:
            >>> fxamp.measure_error(model, x, y, loss=nn.functional.cross_entropy, policies="O1").beyond(0.5)
            ()
        """
        return tuple(e.policy for e in self.policies if e.policy != "FP32" and not e.per_parameter <= tolerance)

    def _data(self) -> dict[str, Any]:
        data = asdict(self)
        for row, errors in zip(data["policies"], self.policies, strict=True):
            row["flagged"] = errors.flagged
        return data

    def __repr__(self) -> str:
        kind = "measured" if self.measured else "predicted"
        rows = ", ".join(f"{e.policy} {e.gradient:.2g}" for e in self.policies)
        return f"<fxamp errors of {self.name}, {kind}: gradient {rows}>"

    def _text(self, style: str) -> str:
        against = f"measured against {self.reference}" if self.measured else "predicted"
        head = (
            f"Errors of {self.name}, {against}, on {self.batches} batches; loss {self.loss:.4g}, which FP32 gives "
            f"within {self.floor:.1g}."
        )
        columns = ("policy", "loss", "increase", "gradient", "per parameter", "noisy", "casts", "MB cast")
        rows: dict[tuple[Any, ...], list[str]] = {}  # what policies that round the same have in common
        for e in self.policies:
            cast = None if e.cast_bytes is None else f"{e.cast_bytes / 1e6:.2f}"
            of_loss = _number(e.loss, self.floor), _number(e.increase, self.floor)
            numbers = *of_loss, _number(e.gradient), _number(e.per_parameter)
            cells = (*numbers, len(e.flagged), e.casts, cast)
            rows.setdefault(cells, []).append(e.policy)
        parts = [head, table(columns, [(", ".join(names), *cells) for cells, names in rows.items()], style)]
        shared: dict[tuple[NodeError, ...], list[Errors]] = {}
        for e in self.policies:
            if e.nodes:
                shared.setdefault(e.nodes, []).append(e)
        parts += [self._nodes(", ".join(e.policy for e in alike), alike[0], style) for alike in shared.values()]
        if self.dead:
            parts.append(f"{len(self.dead)} parameters have no gradient but rounding: {some(self.dead)}.")
        return "\n\n".join([*parts, *self.notes]) + "\n"

    def _nodes(self, names: str, errors: Errors, style: str) -> str:
        rows = [
            (f"{n.share:.0%}", None if n.gradient is None else f"{n.gradient:.0%}", n.key, n.what,
             n.line.partition(": ")[0])
            for n in errors.nodes[:_SHOWN]
        ]  # fmt: skip
        said = [table((f"{names}: of the loss", "of gradients", "node", "what", "line"), rows, style)]
        if errors.flips:
            said.append(
                f"{sum(errors.flips.values()):.2g} choices a batch are expected to change: {some(errors.flips)}."
            )
        if errors.swamped:
            said.append(f"Most updates are lost, below half an ulp of what they are added to: {some(errors.swamped)}.")
        if errors.biased:
            said.append(f"Not noise, since it has one sign over all batches: {some([n.key for n in errors.biased])}.")
        if errors.flagged:
            said.append(f"Gradients below their noise: {some(errors.flagged)}.")
        return "\n".join(said)


def _number(value: float | None, floor: float = 0.0) -> str | None:
    return None if value is None else f"{value:.2e}" + (" (floor)" if value < floor else "")


class Tally:
    """Collects squares of the errors of one policy over batches, and of what they are relative to."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._squares: dict[str, float] = {}

    def add(self, loss: float, gradients: Mapping[str, Any], reference: Mapping[str, Any], scale: float = 1.0) -> None:
        """Add a batch: the error of its loss, and its gradients beside the reference; `scale` divides the squares."""
        self.losses.append(loss)
        sums = {name: _square(expected, gradients.get(name)) for name, expected in reference.items()}
        _add(sums, self._squares, scale)

    def errors(self, policy: str, norms: Mapping[str, float], **more: Any) -> Errors:
        """Return the errors, from the sums over batches of the gradients' squared norms, and `more` fields of them."""
        live = living(norms)
        parameters = {name: (self._squares.get(name, 0.0) / norms[name]) ** 0.5 for name in live}
        whole = sum(norms[name] for name in self._squares)
        loss = (sum(e * e for e in self.losses) / max(len(self.losses), 1)) ** 0.5
        made = Errors(
            policy, loss, None, (sum(self._squares.values()) / whole) ** 0.5 if whole else 0.0,
            (sum(e * e for e in parameters.values()) / len(parameters)) ** 0.5 if parameters else 0.0, parameters,
        )  # fmt: skip
        return replace(made, **more)


def living(norms: Mapping[str, float]) -> tuple[str, ...]:
    """Return the parameters whose gradient is more than what rounding leaves of zero, from squared norms by name."""
    largest = max(norms.values(), default=0.0)
    return tuple(name for name, norm in norms.items() if norm > _DEAD**2 * largest)


def squared(gradients: Mapping[str, Any], into: dict[str, float]) -> None:
    """Add the squared norms of gradients to those by name."""
    _add({name: _square(gradient) for name, gradient in gradients.items()}, into)


def _square(expected: Tensor, got: Tensor | None = None) -> Tensor:
    """Return the squared norm of a gradient, or of its difference from another one, on its device and in float64."""
    total = torch.zeros((), dtype=torch.float64, device=expected.device)
    for e, *g in blocks(expected) if got is None else blocks(expected, got):
        total += ((g[0].to(e.dtype) - e) if g else e).double().square().sum()
    return total


def _add(sums: Mapping[str, Tensor], into: dict[str, float], scale: float = 1.0) -> None:
    """Add sums by name, of which all are read from the device at once."""
    first = next(iter(sums.values()), torch.zeros(()))
    read = torch.stack([s.to(first.device) for s in sums.values()] or [first]).tolist()
    for name, value in zip(sums, read, strict=False):
        into[name] = into.get(name, 0.0) + value / scale


def degenerate(norms: Mapping[str, float]) -> tuple[str, ...]:
    """Return a note if most of a model gets no gradient, as with constant logits at initialisation."""
    dead = len(norms) - len(living(norms))
    if dead * 2 <= len(norms):
        return ()
    return (f"{dead} of {len(norms)} parameters get no gradient, as at a degenerate initialisation (constant outputs, "
            "zero weights): this says nothing of training. Warm up first, for some steps, and ask again.",)  # fmt: skip
