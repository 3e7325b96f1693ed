"""`fxamp.estimate_error`: the errors of policies, predicted from steps in FP32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from passes.contract.errors import PolicyError
from passes.contract.policy import dtype_name

from ..diagnose.batches import Batch
from ..diagnose.step import POLICIES, Outcome, Step, diagnostic, step_of
from ..observe.emulation import Observer, Site
from ..observe.reference import eight_bit_modules, listed
from ..observe.workload import Loss
from ..results import some
from .derivatives import Derivatives, keys_of
from .report import PREDICTED, ErrorReport, Errors, NodeError, Tally, degenerate, living, squared
from .rounding import Curvature, rounded
from .variances import Moved, Unrounded, coherent


@diagnostic
def estimate_error(
    model_or_step: Any, inputs: Any = None, target: Any = None, *, kwargs: Mapping[str, Any] | None = None,
    loss: Loss = None, batches: Iterable[Any] | None = None, policies: Sequence[str] | str | None = POLICIES,
    gradients: bool | str = True,
) -> ErrorReport:  # fmt: skip
    """Predict the errors of policies before anything is trained, and say which roundings they come from.

    The error of the loss comes from a forward and backward that round nothing, and is the root of a sum over all values
    that are rounded: see `fxamp.error.variances`. The error of the gradient comes from one more step a batch, in
    which all of these are rounded at random (stochastic rounding has twice the variance of rounding to nearest). Both
    are RMS values, for these batches and these weights, to first order. That step gives the second order of the loss,
    its expected increase, too: see `fxamp.error.rounding.Curvature`. An FP16 loss is scaled in that step, as
    `fxamp.LossScaler` does at first, by as much as stays finite. Two to four batches are enough. Everything is as
    before afterwards.

    Args:
        policies: Policy strings, or "autocast", which rounds what O1 rounds.
        gradients: Predict errors of gradients too; with "nodes" also say which roundings they come from, by
            derivatives along a random direction, which takes five steps for each of two batches, and more memory.

    Raises:
        PolicyError: There is no loss, no such policy or another `gradients`, a part of the model is converted, no
            parameter requires a gradient, or FP32 itself is not finite on a batch; the message names the node.
        CaptureError: Nothing of the model was captured, or it is on the meta device.

    Example:
        >>> found = fxamp.estimate_error(model, x, y, loss=nn.functional.cross_entropy, policies="O1")
        >>> found["O1"].nodes[0].key, found["O1"].nodes[0].what
        ('2/linear#0', ...)
    """
    if gradients not in (True, False, "nodes"):
        raise PolicyError(f'gradients is True, False or "nodes", not {gradients!r}.')
    step = step_of(model_or_step, inputs, target, kwargs=kwargs, loss=loss, batches=batches)
    if not step.parameters:
        raise PolicyError(
            f"no parameter of {type(step.author).__name__} requires a gradient, and errors are predicted from "
            "gradients: measure them with fxamp.measure_error."
        )
    return estimated(step, step.policies(policies), gradients=gradients)


def estimated(step: Step, names: Sequence[str], *, gradients: bool | str = True) -> ErrorReport:
    """Predict the errors of policies; of those that round the same, once.

    Args:
        step: the model and its batches.
        names: of the policies.
        gradients: predict errors of gradients too, and, with "nodes", where they come from.
    """
    first = dict[str, str]()  # of the names of a policy
    for name in names:
        first.setdefault(str(step.policy(name)), name)
    made = _Estimate(step, tuple(first.values()), gradients)
    errors = {name: replace(made.errors(first[str(step.policy(name))]), policy=name) for name in names}
    mean = sum(made.losses) / len(made.losses)
    dead = tuple(sorted(made.norms.keys() - set(living(made.norms))))
    return ErrorReport(
        type(step.author).__name__, False, "", len(made.losses), mean, 2.0**-24 * abs(mean), dead,
        tuple(errors.values()),
        (PREDICTED, *step.notes, *made.beyond(), *degenerate(made.norms), *_unseen(step)),
    )  # fmt: skip


def _unseen(step: Step) -> tuple[str, ...]:
    """Return notes on roundings that are not seen: in modules of 8 bits, and where code runs outside of all graphs."""
    modules = eight_bit_modules(step.author)
    if modules:
        return (f"{listed(modules)} round to 8 bits inside, which is in no row: see fxamp.measure_error.",)
    names = some(sorted(step.uncaptured))
    return (f"Not all of it was captured: errors made by what reads {names} are not among these.",) if names else ()


class _Estimate:
    """The errors of policies over all batches: of each, one step that rounds nothing, and one that does a policy."""

    def __init__(self, step: Step, names: Sequence[str], gradients: bool | str) -> None:
        self._step, self._generator = step, torch.Generator(step.device)
        self._plain = Unrounded(step, names)
        self._tallies = {name: Tally() for name in names}
        self._flips = {name: dict[str, float]() for name in names}
        self._increases = {name: list[float]() for name in names}  # by batch
        self.losses, self.norms = list[float](), dict[str, float]()  # by batch; squared, of gradients, by name
        for number, batch in enumerate(step.batches):
            for at, (base, served) in enumerate(self._plain.runs.items()):
                choices: list[tuple[str, Tensor]] = []
                plain = self._plain.run(base, batch, choices)
                if not at:
                    step.refuse_infinite(plain, batch, number)
                    self.losses.append(plain.loss)
                    squared(plain.gradients, self.norms)
                for name in served if gradients else ():  # of one policy after the other, so that they are held once
                    probe = self._probe(name, batch, choices, plain.loss)
                    self._tallies[name].add(0.0, probe.gradients, plain.gradients, 2.0)
        runs = self._plain.runs if gradients == "nodes" else ()
        self._derivatives = {base: Derivatives(step, base, self.norms) for base in runs}

    def errors(self, name: str) -> Errors:
        """Return what is predicted of a policy."""
        moved, count = self._plain.moved(name), len(self.losses)
        square = sum(m.square for m in moved) + coherent(moved) + (2.0**-24 * sum(self.losses) / count) ** 2
        flips = {key: value / count for key, value in self._flips[name].items() if value > 1e-3}
        swamped = {m.site.key: m.swamped for m in moved if m.swamped > 0.5}
        derived = self._derivatives.get(self._plain.base(name))
        nodes = _nodes(moved, None if derived is None else derived.gradients(keys_of(m.site) for m in moved))
        increases = self._increases[name]
        return self._tallies[name].errors(
            name, self.norms, loss=square**0.5, increase=sum(increases) / count if increases else None, nodes=nodes,
            flips=flips, swamped=swamped,
        )  # fmt: skip

    def beyond(self) -> tuple[str, ...]:
        """Return a note on each policy whose low dtype does not hold values that move the loss."""
        notes = []
        for name in self._tallies:
            if keys := dict.fromkeys(m.site.key for m in self._plain.moved(name) if m.beyond):
                low = dtype_name(self._step.policy(name).dtype or torch.bfloat16)
                notes.append(
                    f"{name}: {low} does not hold the values of {some([*keys])}, on which the loss depends, so that "
                    "this prediction does not hold: fxamp.find_overflow says what cures it."
                )
        return tuple(notes)

    def _probe(self, name: str, batch: Batch, choices: Sequence[tuple[str, Tensor]], loss: float) -> Outcome:
        """Run a step that rounds at random, count the choices that it would change, and note the increase of `loss`."""
        changed: dict[str, float] = {}
        increase = 0.0

        def run(scale: float) -> Outcome:
            nonlocal increase
            changed.clear()
            curvature = Curvature()
            ran = self._rounded(name, batch, scale, iter(choices), changed, curvature)
            increase = curvature.of(ran.loss - loss, scale) / 4  # half of e.He, with half the variance of the draw
            return ran

        ran, flips = self._step.scaled(name, run), self._flips[name]
        for key, count in changed.items():
            flips[key] = flips.get(key, 0.0) + count
        self._increases[name].append(increase)
        return ran

    def _rounded(
        self, name: str, batch: Batch, scale: float, before: Iterator[tuple[str, Tensor]], flips: dict[str, float],
        curvature: Curvature,
    ) -> Outcome:  # fmt: skip
        """Run a step that rounds at random; add to `flips` how many of the choices `before` it changes."""
        low, generator = self._step.policy(name).dtype or torch.bfloat16, self._generator
        generator.manual_seed(len(self.losses))

        def at(site: Site, value: Tensor) -> Tensor:
            forward = site.part != "scores"
            return rounded(value, low, generator, forward=forward, into=curvature) if site.rounds else value

        def edge(value: Tensor) -> Tensor:
            return rounded(value, low, generator, forward=False)

        def choice(key: str, operand: Tensor, count: int, dim: int | None) -> None:
            true = next((t for at, t in before if at == key), None)
            if true is not None:
                flips[key] = flips.get(key, 0.0) + _expected_flips(true, operand, count, dim)

        return self._step.run(batch, name, Observer(at, edge=edge, kernels=True, choice=choice), scale=scale)


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


def _nodes(moved: Sequence[Moved], gradients: Sequence[float] | None) -> tuple[NodeError, ...]:
    """Return what moves the loss, the largest share first, and what it adds to the error of the gradients."""
    loss, gradient = sum(m.square for m in moved) or 1.0, sum(gradients or ()) or 1.0
    shares = [None] * len(moved) if gradients is None else [v / gradient for v in gradients]
    rows = [
        NodeError(m.site.key, m.site.what, m.site.module, m.site.line, m.square / loss, m.bias, share)
        for m, share in zip(moved, shares, strict=True) if m.square or share
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda node: -node.share))
