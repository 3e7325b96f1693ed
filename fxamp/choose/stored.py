"""`fxamp.tune` of a compiled step: which of the values that its O2 stores in 16 bits to store so, by bytes moved.

    nothing, "saved", "backward", both     each compiled as the step would be, from a plan that names its values
    bytes, kernels, casts, peak            what Inductor counts of forward and backward, on the step's own device
    error, predicted                       of the graphs run node by node, in the arithmetic of Inductor's kernels
    error, measured                        of the gradients that the real kernels give, on the batches that were given

Of what is within the tolerance, and above O1 in no count, what moves the fewest bytes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim import SGD

from passes.contract.errors import FxampError, PolicyError
from passes.contract.plan import CERTIFICATE, Plan, Stored
from passes.contract.policy import Level, Policy

from ..convert import convert
from ..diagnose.batches import Batch
from ..diagnose.step import AUTOCAST, Outcome, Step
from ..error.measure import measured
from ..error.report import Errors
from ..errors import in_short
from ..measure.inductor import KEYS, Counts
from ..observe.snapshot import outside_of_regions
from ..observe.watch import run_instead
from ..observe.workload import copies
from ..train.at_rest import PARTS, emulation
from ..train.compiler import arguments_of
from ..train.step import TrainStep

OVER_AUTOCAST = 1.25  # the error of gradients that a compiled O2 may have, over autocast's
NOTHING = "nothing"
_MARGIN = 1.02  # by which a prediction has to be within the tolerance
_SURELY = 2.0  # by which a prediction may be off: what is predicted to be above that is not compiled


def stored_within(step: Step, policies: Policy | str | None, tolerance: float | str) -> Plan:
    """Return the plan of a compiled step that moves the fewest bytes with an error within a tolerance."""
    return _Search(step, _asked(step, policies)).plan(tolerance)


class _Search:
    """The search for one plan."""

    def __init__(self, step: Step, asked: Policy) -> None:
        def converted(**how: Any) -> Callable[[], Any]:
            return lambda: convert(step.author, check=False, **how)

        self._step, self._autocast, self._unpredicted = step, f"{AUTOCAST},dtype=bf16", ""
        self._every = _Candidate(step, converted(policy=asked))
        self._candidates = {NOTHING: _Candidate(step, converted(policy=replace(asked, level=Level.O1)))}
        self._stored: dict[str, tuple[Stored, ...]] = {NOTHING: ()}
        for name, stored in _parts_of(self._every.plan.stored).items():
            self._add(name, stored)

    def _add(self, name: str, stored: tuple[Stored, ...]) -> None:
        """Add a candidate that stores some of the values."""
        plan = self._every.plan
        less = replace(plan, stored=stored)
        self._stored[name] = stored
        self._candidates[name] = self._every if stored == plan.stored else _Candidate(
            self._step, lambda: convert(self._step.author, plan=less, check=False)
        )  # fmt: skip

    def plan(self, tolerance: float | str) -> Plan:
        """Return the plan."""
        step = self._step
        predicted, base = self._predicted()
        limit = OVER_AUTOCAST * base if tolerance == AUTOCAST else float(tolerance)
        if not math.isfinite(limit):
            raise PolicyError("torch.autocast itself is not finite here: give a tolerance, or see fxamp.find_overflow.")
        names = [n for n in self._candidates if n == NOTHING or predicted.get(n, 0.0) <= _SURELY * limit]
        names += self._some_of_backward(predicted, limit)
        errors = self._measured({name: self._candidates[name].run for name in names})
        counts = {name: self._candidates[name].counts for name in names}
        within = [
            name for name, found in counts.items()
            if (errors[name].per_parameter <= limit and _is_above_in_none(found, counts[NOTHING]))
            or (name == NOTHING and tolerance == AUTOCAST)
        ]  # fmt: skip
        if not within:
            raise PolicyError(_nothing_keeps(limit, {name: errors[name] for name in names}, counts))
        best = min(within, key=lambda name: counts[name].moved_bytes)
        numbers = {
            "tolerance": limit, "measured": errors[best].per_parameter, "gradient": errors[best].gradient,
            "loss": errors[best].loss, "autocast": base, "batches": len(step.batches), **asdict(counts[best]),
        }  # fmt: skip
        if best in predicted:
            numbers["predicted"] = predicted[best]
        plan = self._candidates[best].plan
        alone = len(self._candidates) == 1
        notes = (*_notes(best, errors, counts, limit, base, alone=alone), *self._of_others(names, predicted))
        return replace(
            plan, certificate=numbers, notes=(*plan.notes, *step.notes, *(f"{CERTIFICATE}: {note}" for note in notes))
        )  # fmt: skip

    def _some_of_backward(self, predicted: dict[str, float], limit: float) -> list[str]:
        """Add what stores as many of the values of backward, the last ones, as are predicted to be within a limit.

        What is rounded first in backward is in the gradients of all layers before it, and what is rounded last in few.
        """
        stored = self._every.plan.stored
        backward = [each for each in stored if each.part == "backward"]
        if not predicted or max(predicted.values()) * _MARGIN <= limit:
            return []
        within, high = 0, len(backward)  # so many of the last ones are within the limit, and above it
        chosen: tuple[Stored, ...] = ()
        while high - within > 1:
            count = (within + high) // 2
            some = tuple(each for each in stored if each not in backward[:-count])
            error = self._measured(self._emulated({NOTHING: (), "some": some}))["some"].per_parameter
            if error * _MARGIN > limit:
                high = count
            else:
                within, chosen, of_chosen = count, some, error
        if not chosen:
            return []
        name = "saved and " * (len(backward) < len(stored)) + f"the last {within} of {len(backward)} of backward"
        self._add(name, chosen)
        predicted[name] = of_chosen
        return [name]

    def _emulated(self, stored: Mapping[str, tuple[Stored, ...]]) -> dict[str, Callable[[Batch], Outcome]]:
        return {name: _Emulated(self._every, chosen).run for name, chosen in stored.items()}

    def _of_others(self, names: Sequence[str], predicted: Mapping[str, float]) -> Iterator[str]:
        """Yield how errors were found, and what of what was not compiled."""
        shown = ", ".join(f"{name} {error:.3g}" for name, error in predicted.items())
        yield f"predicted: {shown}" if predicted else f"not predicted: {self._unpredicted}"
        if left := [name for name in self._candidates if name not in names]:
            yield f"not compiled, since the error as predicted is far above: {', '.join(left)}"
        yield f"measured on {len(self._step.batches)} batches, with these weights: nothing is bounded for others"
        if self._step.draws:
            yield "it draws random numbers: what differs from O1 as compiled was added to autocast's error"

    def _predicted(self) -> tuple[dict[str, float], float]:
        """Return the errors of the candidates, emulated, by name; and that of autocast, which is measured."""
        found = dict[str, Errors]()
        try:
            found = self._measured(self._emulated(self._stored))
        except FxampError:
            raise
        except Exception as error:  # whatever an op raises that no interpreter can run
            self._unpredicted = in_short(error)
        autocast = found.get(self._autocast) or self._measured({})[self._autocast]
        return {n: found[n].per_parameter for n in self._stored if n in found}, autocast.per_parameter

    def _measured(self, runs: Mapping[str, Callable[[Batch], Outcome]]) -> dict[str, Errors]:
        """Return the errors of what runs batches, by name, and that of autocast.

        Of random numbers Inductor draws others: there what differs from O1 is added to what autocast gives.
        """
        step = self._step

        def beside_o1(run: Callable[[Batch], Outcome], batch: Batch) -> Outcome:
            ran = run(batch)
            if not step.draws:
                return ran
            base, o1 = step.run(batch, self._autocast), runs[NOTHING](batch)
            moved = {n: g + ran.gradients[n] - o1.gradients[n] for n, g in base.gradients.items()}
            return Outcome(base.loss + ran.loss - o1.loss, moved, None)

        others = {name: partial(beside_o1, run) for name, run in runs.items()}
        return {e.policy: e for e in measured(step, (self._autocast, *runs), others=others).policies}


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
        self._last: tuple[Batch, Outcome] | None = None
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
        if compiled is None or compiled.counts is None:
            raise PolicyError(
                "Inductor's kernels of this step are not counted, since an option of compile= takes the place of the "
                "pass that records them: leave it out."
            )
        return compiled.counts

    def _run_once(self) -> TrainStep:
        if self._train is None:
            self.run(self._step.batches[0])
        assert self._train is not None
        return self._train

    def run(self, batch: Batch) -> Outcome:
        """Run a window of one batch, and leave everything as it was."""
        if not self._last or self._last[0] is not batch:
            self._last = batch, self.window(batch)
        return self._last[1]

    def window(self, batch: Batch, instead: Callable[[TrainStep, GraphModule, Any], Any] | None = None) -> Outcome:
        """Run a window, in which something may run graphs in the place of what they were compiled to."""
        modes = torch.inference_mode(False), torch.enable_grad(), outside_of_regions()
        with modes[0], modes[1], modes[2], self._step.as_before(self._step.author):
            train = self._train = self._train or self._made()
            inputs, target = copies(batch)
            with contextlib.ExitStack() as stack:
                if instead is not None:
                    stack.enter_context(run_instead(lambda _, graph, args: instead(train, graph, args)))
                loss = float(train(inputs, target).loss)
        if train.compiled is not None and train.compiled.not_at_rest:
            raise PolicyError(f"this step stores nothing in 16 bits of its own: {train.compiled.not_at_rest}")
        return Outcome(loss, self._gradients, None)

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


class _Emulated:
    """A candidate that is not compiled: its graphs run node by node, in the arithmetic of kernels.

    It is a step that is compiled, in whose place they run.
    """

    def __init__(self, compiled: _Candidate, stored: tuple[Stored, ...]) -> None:
        self._compiled, self._stored = compiled, stored
        self._graphs: dict[int, tuple[GraphModule, Callable[..., Any]]] = {}
        self._last: tuple[Batch, Outcome] | None = None

    def run(self, batch: Batch) -> Outcome:
        """Run a window of one batch, and leave everything as it was."""
        if not self._last or self._last[0] is not batch:
            self._last = batch, self._compiled.window(batch, self._graph)
        return self._last[1]

    def _graph(self, step: TrainStep, graph: GraphModule, args: Any) -> Any:
        if id(graph) not in self._graphs:
            assert step.compiled is not None
            at = len(step.compiled.loss.kernels.ran) - 1
            self._graphs[id(graph)] = graph, emulation(self._stored, at, graph, args)
        return self._graphs[id(graph)][1](*args)


def _parts_of(stored: tuple[Stored, ...]) -> dict[str, tuple[Stored, ...]]:
    """Return what candidates store, by name: all of it, and each part alone."""
    parts = {part: chosen for part in PARTS if (chosen := tuple(s for s in stored if s.part == part))}
    return {" and ".join(parts): stored} | parts if stored else {}


def _is_above_in_none(counts: Counts, of_o1: Counts) -> bool:
    return all(getattr(counts, key) <= getattr(of_o1, key) for key in KEYS)


def _notes(
    best: str, errors: Mapping[str, Errors], counts: Mapping[str, Counts], limit: float, autocast: float, *, alone: bool
) -> Iterable[str]:
    """Yield what the search came to, in one sentence, and what was compared; O1 may have been the only candidate."""
    fewer = {name: 1 - found.moved_bytes / counts[NOTHING].moved_bytes for name, found in counts.items()}
    if best != NOTHING:
        yield (
            f"{best} in 16 bits moves {100 * fewer[best]:.1f} % fewer bytes than O1, with an error of "
            f"{errors[best].per_parameter:.3g} for {autocast:.3g} under autocast"
        )
    elif alone:
        yield "O1 stays: it stores nothing in FP32 that 16 bits are considered for"
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
    stored = "O1" if near == NOTHING else f"{near} in 16 bits"
    return (
        f"nothing keeps a tolerance of {limit:.3g}: the nearest is {stored}, {errors[near].per_parameter:.3g}, with "
        f"{counts[near].moved_bytes / 1e6:.2f} MB moved by forward and backward. Below it matrix products have to be "
        'FP32, as with policy="O2,modules.head=fp32".'
    )
