"""`fxamp.tune` of a compiled step: which of the values that its O2 stores in 16 bits to store so, by bytes moved.

    nothing, "saved", "backward", both     each compiled as the step would be, from a plan that names its values
    bytes, kernels, casts, peak            what Inductor counts of forward and backward, on the step's own device
    error                                  of the gradients that the real kernels give, on the batches that were given

Of what is within the tolerance, and above O1 in no count, what moves the fewest bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.optim import SGD

from passes.contract.errors import PolicyError
from passes.contract.plan import CERTIFICATE, Plan
from passes.contract.policy import Level, Policy

from ..convert import convert
from ..diagnose.batches import Batch
from ..diagnose.step import AUTOCAST, Outcome, Step
from ..error.measure import measured
from ..error.report import Errors
from ..measure.inductor import KEYS, Counts
from ..observe.snapshot import outside_of_regions
from ..observe.workload import copies
from ..train.at_rest import PARTS
from ..train.compiler import arguments_of
from ..train.step import TrainStep

OVER_AUTOCAST = 1.25  # the error of gradients that a compiled O2 may have, over autocast's
NOTHING = "nothing"


def stored_within(step: Step, policies: Policy | str | None, tolerance: float | str) -> Plan:
    """Return the plan of a compiled step that moves the fewest bytes with an error within a tolerance."""
    asked = _asked(step, policies)
    every = _Candidate(step, lambda: convert(step.author, policy=asked, check=False))
    o1 = _Candidate(step, lambda: convert(step.author, policy=replace(asked, level=Level.O1), check=False))
    candidates = {NOTHING: o1} | _parts_of(step, every)
    autocast = f"{AUTOCAST},dtype=bf16"

    def run(candidate: _Candidate) -> Callable[[Batch], Outcome]:
        """Of random numbers Inductor draws others: there what differs from O1 is added to what autocast gives."""

        def outcome(batch: Batch) -> Outcome:
            ran = candidate.run(batch)
            if not step.draws:
                return ran
            base, beside = step.run(batch, autocast), o1.run(batch)
            moved = {n: g + ran.gradients[n] - beside.gradients[n] for n, g in base.gradients.items()}
            return Outcome(base.loss + ran.loss - beside.loss, moved, None)

        return outcome

    others = {name: run(candidate) for name, candidate in candidates.items()}
    found = {e.policy: e for e in measured(step, (autocast, *candidates), others=others).policies}
    base = found.pop(autocast).per_parameter
    limit = OVER_AUTOCAST * base if tolerance == AUTOCAST else float(tolerance)
    if not math.isfinite(limit):
        raise PolicyError("torch.autocast itself is not finite here: give a tolerance, or see fxamp.find_overflow.")
    counts = {name: candidate.counts for name, candidate in candidates.items()}
    within = [
        name for name, found_of in counts.items()
        if (found[name].per_parameter <= limit and _is_above_in_none(found_of, counts[NOTHING]))
        or (name == NOTHING and tolerance == AUTOCAST)
    ]  # fmt: skip
    if not within:
        raise PolicyError(_nothing_keeps(limit, {name: found[name] for name in counts}, counts))
    best = min(within, key=lambda name: counts[name].moved_bytes)
    numbers = {
        "tolerance": limit, "measured": found[best].per_parameter, "gradient": found[best].gradient,
        "loss": found[best].loss, "autocast": base, "batches": len(step.batches), **asdict(counts[best]),
    }  # fmt: skip
    plan = candidates[best].plan
    notes = [*_notes(best, found, counts, limit, base), f"measured on {len(step.batches)} batches, these weights"]
    if step.draws:
        notes.append("it draws random numbers: what differs from O1 as compiled was added to autocast's error")
    return replace(
        plan, certificate=numbers, notes=(*plan.notes, *step.notes, *(f"{CERTIFICATE}: {note}" for note in notes))
    )  # fmt: skip


def _asked(step: Step, policies: Policy | str | None) -> Policy:
    """Return the policy of a step that can be tuned so."""
    train_step: TrainStep = step.train_step
    name = type(train_step.model).__name__
    if policies is not None:
        raise PolicyError(f"a TrainStep has the policy of its model: leave out policies=, or give tune the {name}.")
    if train_step.position:
        raise PolicyError("a window of this TrainStep is open: call flush() before tune.")
    settings = train_step.options.compile
    assert settings is not None
    if settings.backend != "inductor":
        raise PolicyError(
            f"tune chooses what Inductor stores between kernels, and '{settings.name}' is asked to compile this step: "
            "make it with compile=True, or give tune the model, for a plan of decisions."
        )
    step.author  # noqa: B018 - refuses a model of which parts are converted
    if step.view_policy is None:
        raise PolicyError(f"{name} is not converted: give TrainStep what fxamp.convert(model, policy='O2') returned.")
    asked = step.policy(step.name)
    if not asked.level.stores_low or asked.level.rounds_sensitive:
        raise PolicyError(
            f"this step follows {asked.level}: what a compiled step stores in 16 bits is chosen at O2. Convert its "
            "model by policy='O2', or give tune the model, for a plan of decisions."
        )
    if asked.dtype != torch.bfloat16:
        raise PolicyError(
            "FP16 does not have the range of values that are stored in FP32, so that a compiled step stores none of "
            "them in 16 bits: convert the model with dtype=bf16."
        )
    return asked


class _Candidate:
    """A step of its own over the same weights, whose optimizer changes none of them."""

    def __init__(self, step: Step, make: Callable[[], Any]) -> None:
        self._step, self._make = step, make
        self._runs: list[tuple[Batch, Outcome]] = []  # the last one
        self._gradients: dict[str, torch.Tensor] = {}
        self._train: TrainStep | None = None

    @property
    def plan(self) -> Plan:
        """The plan of what it stores."""
        return self._run_once().plan()

    @property
    def counts(self) -> Counts:
        """What Inductor made of its forward and backward."""
        compiled = self._run_once().compiled
        if compiled is None or compiled.counts is None or compiled.loss.fallbacks:
            why = "; ".join(compiled.loss.fallbacks[:1]) if compiled is not None else ""
            raise PolicyError(
                f"there is no count of the kernels of this step: {why or 'an option of its own records in their place'}"
            )
        return compiled.counts

    def _run_once(self) -> TrainStep:
        if self._train is None:
            self.run(self._step.batches[0])
        assert self._train is not None
        return self._train

    def run(self, batch: Batch) -> Outcome:
        """Run a window of one batch, and leave everything as it was."""
        if self._runs and self._runs[0][0] is batch:
            return self._runs[0][1]
        author = self._step.author
        contexts = torch.inference_mode(False), torch.enable_grad(), outside_of_regions()
        with contexts[0], contexts[1], contexts[2], self._step.as_before(author):
            train = self._train = self._train or self._made()
            inputs, target = copies(batch)
            loss = float(train(inputs, target).loss)
        if train.compiled is not None and train.compiled.not_at_rest:
            raise PolicyError(f"this step stores nothing in 16 bits of its own: {train.compiled.not_at_rest}")
        self._runs = [(batch, Outcome(loss, self._gradients, None))]
        return self._runs[0][1]

    def _made(self) -> TrainStep:
        author, asked = self._step.author, self._step.train_step.options
        parameters = {id(p): n for n, p in author.named_parameters()}

        def keep(trained: list[torch.Tensor]) -> None:
            grads = {parameters[id(p)]: p.grad for p in trained}
            self._gradients = {n: g.detach().clone() for n, g in grads.items() if g is not None}

        return TrainStep(
            self._make(), asked.loss_fn, SGD((p for p in author.parameters() if p.requires_grad), lr=0.0),
            compile=arguments_of(asked.compile), on_gradients=keep, output=asked.output, weights=asked.weights,
            scaler=None, check_finite=False,
        )  # fmt: skip


def _parts_of(step: Step, every: _Candidate) -> dict[str, _Candidate]:
    """Return the candidates that store something, by name: all of it, and each part alone."""
    plan = every.plan
    parts = [part for part in PARTS if any(each.part == part for each in plan.stored)]
    if not parts:
        return {}

    def alone(part: str) -> _Candidate:
        chosen = replace(plan, stored=tuple(each for each in plan.stored if each.part == part))
        return _Candidate(step, lambda: convert(step.author, plan=chosen, check=False))

    single: dict[str, _Candidate] = {part: alone(part) for part in parts} if len(parts) > 1 else {}
    return {" and ".join(parts): every} | single


def _is_above_in_none(counts: Counts, of_o1: Counts) -> bool:
    return all(getattr(counts, key) <= getattr(of_o1, key) for key in KEYS)


def _notes(
    best: str, errors: Mapping[str, Errors], counts: Mapping[str, Counts], limit: float, autocast: float
) -> Iterable[str]:
    """Yield what the search came to, in one sentence, and what was compared."""
    fewer = {name: 1 - found.moved_bytes / counts[NOTHING].moved_bytes for name, found in counts.items()}
    if best != NOTHING:
        yield (
            f"{best} in 16 bits moves {100 * fewer[best]:.1f} % fewer bytes than O1, with an error of "
            f"{errors[best].per_parameter:.3g} for {autocast:.3g} under autocast"
        )
    else:
        said = f"O1 stays: nothing that moves fewer bytes is within {limit:.3g}, and above O1 in no other count"
        cheaper = [name for name in counts if fewer[name] > 0]
        near = min(cheaper, key=lambda name: errors[name].per_parameter, default="")
        yield said + (
            f"; the nearest, {near} in 16 bits, moves {100 * fewer[near]:.1f} % fewer bytes with an error of "
            f"{errors[near].per_parameter:.3g}" if near else ""
        )  # fmt: skip
    tried = (f"{name} {errors[name].per_parameter:.3g} at {c.moved_bytes} bytes" for name, c in counts.items())
    yield f"compared: {', '.join(tried)}"


def _nothing_keeps(limit: float, errors: Mapping[str, Errors], counts: Mapping[str, Counts]) -> str:
    near = min(errors, key=lambda name: errors[name].per_parameter)
    stored = f"{near} stored in 16 bits beside"
    return (
        f"nothing keeps a tolerance of {limit:.3g}: the nearest is {stored}, {errors[near].per_parameter:.3g}, with "
        f"{counts[near].moved_bytes / 1e6:.2f} MB moved by forward and backward. Below it matrix products have to be "
        'FP32, as with policy="O2,modules.head=fp32".'
    )
