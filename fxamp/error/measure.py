"""`fxamp.measure_error`: the errors of policies and plans as they are, measured against float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..diagnose.batches import Batch
from ..diagnose.step import AUTOCAST, FP32, Outcome, Step, diagnostic, step_of
from ..observe.emulation import Observer, Site
from ..observe.reference import eight_bit_modules, listed
from ..observe.workload import Loss, floats
from .report import ErrorReport, Tally, degenerate, living, squared


@diagnostic
def measure_error(
    model_or_step: Any, inputs: Any = None, target: Any = None, *, kwargs: Mapping[str, Any] | None = None,
    loss: Loss = None, batches: Iterable[Any] | None = None, policies: Sequence[str] | str | None = None,
) -> ErrorReport:  # fmt: skip
    """Measure the errors of policies on given batches: real kernels against the same model in float64.

    The loss, the whole gradient, each parameter's gradient and each output are compared, and the values of nodes
    with those in FP32. Where float64 does not run, as where the model's code names FP32, FP32 is the reference, and the
    report says so. An FP16 loss is scaled by as much as stays finite. One batch is one draw: errors of the loss need
    about eight. Everything is as before afterwards.

    Args:
        policies: Policy strings, or "autocast". None is the policy of the view that is given, or autocast, O1, O2, O3.

    Raises:
        PolicyError: There is no loss, no such policy, a part of the model is converted, or FP32 itself is not finite on
            a batch.
        CaptureError: The model is on the meta device.

    Example:
        >>> found = fxamp.measure_error(converted, x, y, loss=nn.functional.cross_entropy)
        >>> found.reference, [errors.policy for errors in found.policies]
        ('float64', ['FP32', 'O1,dtype=bf16'])
    """
    step = step_of(model_or_step, inputs, target, kwargs=kwargs, loss=loss, batches=batches)
    return measured(step, step.policies(policies), values=True)


def measured(
    step: Step, names: Sequence[str], *, values: bool = False, others: Mapping[str, Callable[[Batch], Outcome]] = {},
) -> ErrorReport:  # fmt: skip
    """Measure the errors of policies; with `values` that of each node's value too, on the first batch.

    What `others` run a batch by is measured as they are, under their names.
    """
    names = (FP32, *names)
    runs = {name: partial(step.run, how=name) for name in names} | dict(others)
    tallies = {name: Tally() for name in names}
    outputs: dict[str, list[list[float]]] = {name: [] for name in names}
    norms: dict[str, float] = {}
    losses = []
    for number, batch in enumerate(step.batches):
        plain = step.run(batch, FP32)
        step.refuse_infinite(plain, batch, number)
        true = step.true(batch, plain)
        losses.append(true.loss)
        squared(true.gradients, norms)
        for name in names:
            ran = plain if name == FP32 else runs[name](batch)
            tallies[name].add(ran.loss - true.loss, ran.gradients, true.gradients)
            outputs[name].append(_distances(ran, true))
    made = []
    for name in names:
        errors = tallies[name].errors(name, norms, outputs=_rms(outputs[name]))
        with contextlib.suppress(NotImplementedError):  # an op with bodies that a dispatch mode cannot see into
            casts, moved = step.casts(name) if name not in (FP32, *others) else (None, None)
            errors = replace(errors, casts=casts, cast_bytes=moved)
        if values and not name.startswith((FP32, AUTOCAST)):
            errors = replace(errors, values=_values(step, name))
        made.append(errors)
    dead = tuple(sorted(norms.keys() - set(living(norms))))
    mean = sum(losses) / len(losses)
    floor = max(made[0].loss, 2.0**-24 * abs(mean))
    return ErrorReport(
        type(step.author).__name__, True, step.reference, len(losses), mean, floor, dead, tuple(made),
        (*step.notes, *degenerate(norms), *_in_eight_bits(step)),
    )  # fmt: skip


def _in_eight_bits(step: Step) -> tuple[str, ...]:
    modules = eight_bit_modules(step.author)
    if not modules:
        return ()
    return (f"{listed(modules)} compute in 8 bits in each row but FP32, where they compute as what they were made of.",)


def _distances(ran: Outcome, true: Outcome) -> list[float]:
    """Return the relative distance of each float output from its reference."""
    pairs = zip(floats(ran.output), floats(true.output), strict=False)
    return [float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)) for a, b in pairs]


def _rms(batches: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(float((sum(v * v for v in of) / len(of)) ** 0.5) for of in zip(*batches, strict=False))


def _values(step: Step, name: str) -> dict[str, float]:
    """Return how far the value of each node is from that of FP32, on the first batch, by key."""
    held: dict[Any, Tensor] = {}
    found: dict[str, float] = {}

    def keep(site: Site, value: Tensor) -> Tensor:
        if not site.part:
            held.setdefault(site.node, value.detach().to("cpu", torch.float32, copy=True))
        return value

    def compare(site: Site, value: Tensor) -> None:
        expected = held.get(site.node)
        if expected is not None and expected.shape == value.shape and site.key not in found:
            distance = (value.detach().cpu().float() - expected).norm() / expected.norm().clamp_min(1e-30)
            found[site.key] = float(distance)

    batch = step.batches[0]
    step.run(batch, name, Observer(keep), backward=False)
    step.look(batch, name, compare)
    return {key: value for key, value in found.items() if value == value}
