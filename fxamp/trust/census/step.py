"""Run one real step, forward, loss and backward, so that afterwards everything is as before.

And what it did about the range of FP16: whether its loss was scaled, its gradients unscaled, and its step taken.

A watch sees converted graphs that are modules too: each runs node by node meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from passes.contract.errors import PolicyError

from ...capture.emitted import record_on
from ...capture.graph import Graph
from ...capture.user_graph import flat_inputs
from ...observe.snapshot import outside_of_regions, same_objects, same_random_state
from ...observe.watch import Watch, observed
from ...observe.workload import GivenStep, copies, loss_of, model_of, output_of
from .differences import Difference
from .rows import Row

_FORWARD_ALONE = "only the forward ran: the loss requires no gradient"


@dataclass(frozen=True)
class Step:
    """One step that was watched.

    Attributes:
        watch: what was seen.
        notes: what is to be said of the step.
        scaler: the loss scaler of a TrainStep; None for a model.
        skipped: the optimizer did not step, since gradients were not finite.
        ended: the window of the TrainStep came to its end.
    """

    watch: Watch
    notes: tuple[str, ...]
    scaler: Any = None
    skipped: bool = False
    ended: bool = True


def run(model_or_step: Any, inputs: Any, target: Any, loss: Callable[..., Any] | None) -> Step:
    """Run and watch one step of a model, or one window of one micro-batch of a TrainStep.

    Raises:
        PolicyError: the inputs are of another kind, there is nothing to make a loss of, a TrainStep is given a loss, or
            its window is open.
    """
    model = model_of(model_or_step)
    given, target = copies((inputs, target))
    if model_or_step is model:
        with GivenStep(model, (), loss).as_before(model):
            return _of_model(model, given, target, loss)
    if loss is not None:
        raise PolicyError("a TrainStep brings its own loss: leave out loss=.")
    return _of_step(model_or_step, given, target)


def _of_model(model: nn.Module, inputs: Any, target: Any, loss_fn: Callable[..., Any] | None) -> Step:
    watch = Watch(model, _of_model.__code__)
    torch.clear_autocast_cache()  # of the caller's region: a step of a loop begins with none
    with watch:
        loss, notes = loss_of(output_of(model, inputs), target, loss_fn, any_will_do=True)
        if loss.requires_grad:
            with outside_of_regions():
                loss.backward()
        else:
            notes = (*notes, _FORWARD_ALONE)
    return Step(watch, notes)


def _of_step(step: Any, inputs: Any, target: Any) -> Step:
    """Run one window of a TrainStep, with its optimizer, and give back all that it has written."""
    if step.position:
        raise PolicyError("a window of this TrainStep is open: call flush() before a census.")
    watch = Watch(step.model, _of_step.__code__)
    with same_random_state(), same_objects(step.written()):
        with watch:
            result = step(inputs, target)
            if result.reason == "accumulating":
                result = step.flush()
        return Step(watch, (), step.scaler, result.reason == "overflow")


@dataclass(frozen=True)
class Scaling:
    """The facts of loss scaling in one step.

    Attributes:
        low_gradients: Gradients were computed in FP16, so small ones become zero without a loss scale.
        scaler: "enabled", "disabled", or "" where none was seen.
        scaled: A gradient scaler has scaled the loss.
        unscaled: How often gradients were unscaled.
        skipped: The optimizer did not step, since gradients were not finite.
    """

    low_gradients: bool
    scaler: str
    scaled: bool
    unscaled: int
    skipped: bool

    def __str__(self) -> str:
        if not self.low_gradients:
            return "not needed: no gradient was computed in FP16"
        loss = "the loss was scaled" if self.scaled else "the loss was NOT scaled"
        scaler = f"the scaler is {self.scaler}" if self.scaler else "no scaler was seen"
        after = ", the step was skipped: gradients were not finite" if self.skipped else ""
        return f"gradients in FP16; {scaler}; {loss}; gradients were unscaled {self.unscaled} times{after}"


def scaling_of(step: Step, rows: Iterable[Row]) -> Scaling:
    """Return the facts of loss scaling of a step."""
    low = any(row.phase == "backward" and "float16" in row.operands for row in rows)
    scaler = "" if step.scaler is None else "enabled" if step.scaler.is_enabled() else "disabled"
    return Scaling(low, scaler, step.watch.scaled and scaler != "disabled", step.watch.unscaled, step.skipped)


def scaling_differences(scaling: Scaling, step: Step) -> list[Difference]:
    """Return what of the scaling of a TrainStep is wrong; of a model alone the loop is not known."""
    if step.scaler is None:
        return []
    found = []
    if scaling.low_gradients and not scaling.scaled:
        why = "gradients below 6e-8 become zero; give the TrainStep a LossScaler that is enabled"
        found.append(Difference("scaling", "loss", "scaled", f"unscaled, with a scaler that is {scaling.scaler}", why))
    if step.ended and scaling.scaled and not scaling.skipped and not scaling.unscaled:
        found.append(Difference("scaling", "gradients", "unscaled once", "scaled gradients into the optimizer"))
    return found


@contextlib.contextmanager
def watched_graphs(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Put what a watch can see in the place of the `forward` of converted graphs."""
    changed = [part for part in parts if isinstance(part, GraphModule) and record_on(part) is not None]
    for part in changed:
        part.__dict__["forward"] = _by_node(part, Graph(part, (record_on(part) or {})["plan"], part))
    try:
        yield
    finally:
        for part in changed:
            del part.__dict__["forward"]


def _by_node(part: GraphModule, given: Graph) -> Callable[..., Any]:
    run = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        inputs = tuple(flat_inputs(part, args, kwargs))
        return part.graph.process_outputs(observed(given, part, "eager", run, inputs))

    return forward
