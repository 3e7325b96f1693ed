"""Run one real step, forward, loss and backward, so that afterwards everything is as before.

And what it did about the range of FP16: whether its loss was scaled, its gradients unscaled, and its step taken.

A watch sees converted graphs that are modules too: each runs node by node meanwhile. What ran are rows of plain data:
where, in which dtypes, and what it cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from passes.contract.errors import PolicyError
from passes.graph.notes import is_inserted

from ..diagnose.step import Step
from ..observe.snapshot import outside_of_regions, same_objects, same_random_state
from ..observe.watch import Dtypes, Sum, Watch, dtype_of
from ..observe.workload import copies, loss_of, output_of
from .differences import Difference, is_cast, planned_dtypes

_FORWARD_ALONE = "only the forward ran: the loss requires no gradient"


@dataclass(frozen=True)
class Row:
    """Ops of one kind at one place."""

    where: str  # the key of a node in the plan; for code outside of all graphs the line, or the path of the module
    phase: str  # "forward", "backward", or "optimizer and scaling"
    op: str  # what was dispatched; in a row that is planned, the op of the decision
    operands: Dtypes  # dtypes of its floating operands
    results: Dtypes  # dtypes of its floating results
    count: int = 1  # how often it ran
    flops: int = 0  # floating-point operations, by torch's formulas
    bytes: int = 0  # bytes that it read and wrote
    casts: int = 0  # how many of them were casts
    cast_bytes: int = 0  # bytes that these read and wrote
    graph: int = -1  # which graph of the plan it is in, -1 outside of all
    product: bool = False  # it is a matrix product, a convolution or an attention
    module: str = ""  # the path of the module, where it is known
    line: str = ""  # the user's line, for code outside of all graphs

    @property
    def dtype(self) -> str:
        """The dtype that it ran in: that of its operands, and of a product that of the first."""
        return dtype_of(self.operands or self.results, self.product)


def rows_of(watch: Watch) -> tuple[Row, ...]:
    """Return what was seen; ops that one place runs alike are one row."""
    merged: dict[Row, Sum] = {}
    for seen, s in watch.sums.items():
        place = seen.place
        phase = "loss, scaling and optimizer" if place.kind == "own" else "forward"
        row = Row(
            watch.where(place), "backward" if place.backward else phase, seen.op, seen.operands, seen.results,
            graph=place.graph, product=seen.product, module=place.module,
            line=place.where if place.kind == "outside" else "",
        )  # fmt: skip
        merged.setdefault(row, Sum()).add(s)
    return tuple(replace(row, **vars(s)) for row, s in merged.items())


def planned_rows(watch: Watch) -> tuple[Row, ...]:
    """Return what was planned for the graphs that ran: a row for each decision, and for each cast."""
    made: list[Row] = []
    for ran in watch.graphs:
        at, calls = ran.number, ran.calls
        for name, node in ran.emitted.items():
            key, dtypes = ran.key(name), planned_dtypes(node)
            decision = ran.decisions.get(key)
            if is_inserted(node):
                casts = calls if is_cast(node) else 0
                made.append(Row(key, "forward", "cast", *dtypes, calls, casts=casts, graph=at))
            elif decision is not None:
                module = decision.module_path
                made.append(Row(key, "forward", decision.op, *dtypes, calls, graph=at, module=module))
    return tuple(made)


@dataclass(frozen=True)
class Observation:
    """One step that was watched."""

    watch: Watch  # what was seen
    notes: tuple[str, ...]  # what is to be said of the step
    scaler: Any = None  # the loss scaler of a TrainStep; None for a model
    skipped: bool = False  # the optimizer did not step, since gradients were not finite
    ended: bool = True  # the window of the TrainStep came to its end

    def scaling(self, rows: Iterable[Row]) -> Scaling:
        """Return the facts of loss scaling."""
        low = any(row.phase == "backward" and "float16" in row.operands for row in rows)
        scaler = "" if self.scaler is None else "enabled" if self.scaler.is_enabled() else "disabled"
        return Scaling(low, scaler, self.watch.scaled and scaler != "disabled", self.watch.unscaled, self.skipped)

    def scaling_differences(self, scaling: Scaling) -> Iterator[Difference]:
        """Yield what of the scaling of a TrainStep is wrong; of a model alone the loop is not known."""
        if self.scaler is not None and scaling.low_gradients and not scaling.scaled:
            why = "gradients below 6e-8 become zero; give the TrainStep a LossScaler that is enabled"
            yield Difference("scaling", "loss", "scaled", f"unscaled, with a scaler that is {scaling.scaler}", why)
        if self.scaler is not None and self.ended and scaling.scaled and not scaling.skipped and not scaling.unscaled:
            yield Difference("scaling", "gradients", "unscaled once", "scaled gradients into the optimizer")


def observe(step: Step) -> Observation:
    """Run and watch a step of each batch: of a model, or of a TrainStep a window of one micro-batch.

    Raises:
        PolicyError: the inputs are of another kind, there is nothing to make a loss of, or the window of a TrainStep is
            open.
    """
    return _of_model(step) if step.train_step is None else _of_train_step(step.train_step, step)


def _of_model(step: Step) -> Observation:
    watch, said = Watch(step.model, _of_model.__code__), list[str]()
    torch.clear_autocast_cache()  # of the caller's region: a step of a loop begins with none
    for batch in step.batches:
        inputs, target = copies(batch)
        with step.as_before(step.model), watch:
            loss, notes = loss_of(output_of(step.model, inputs), target, step.loss, any_will_do=True)
            if loss.requires_grad:
                with outside_of_regions():
                    loss.backward()
        said += notes if loss.requires_grad else (*notes, _FORWARD_ALONE)
    return Observation(watch, tuple(dict.fromkeys(said)))


def _of_train_step(train_step: Any, step: Step) -> Observation:
    """Run windows of a TrainStep, with its optimizer, and give back all that it has written."""
    if train_step.position:
        raise PolicyError("a window of this TrainStep is open: call flush() before a census.")
    watch, skipped = Watch(step.model, _of_train_step.__code__), False
    for batch in step.batches:
        inputs, target = copies(batch)
        with same_random_state(), same_objects(train_step.written()):
            with watch:
                result = train_step(inputs, target)
                if result.reason == "accumulating":
                    result = train_step.flush()
            skipped |= result.reason == "overflow"
            scaler = train_step.scaler
    return Observation(watch, (), scaler, skipped)


@dataclass(frozen=True)
class Scaling:
    """The facts of loss scaling in one step."""

    low_gradients: bool  # gradients were computed in FP16, so small ones become zero without a loss scale
    scaler: str  # "enabled", "disabled", or "" where none was seen
    scaled: bool  # a gradient scaler has scaled the loss
    unscaled: int  # how often gradients were unscaled
    skipped: bool  # the optimizer did not step, since gradients were not finite

    def __str__(self) -> str:
        if not self.low_gradients:
            return "not needed: no gradient was computed in FP16"
        loss = "the loss was scaled" if self.scaled else "the loss was NOT scaled"
        scaler = f"the scaler is {self.scaler}" if self.scaler else "no scaler was seen"
        after = ", the step was skipped: gradients were not finite" if self.skipped else ""
        return f"gradients in FP16; {scaler}; {loss}; gradients were unscaled {self.unscaled} times{after}"
