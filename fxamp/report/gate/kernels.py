"""Counts of kernels and bytes of a target, for budgets: of its forward and backward as a compiled TrainStep runs them.

For "cuda" they are counted by scheduling for an H100, which need not be there; on a CPU the step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import AdamW

from passes.contract.policy import Policy

from ...capture.inputs import as_inputs
from ...convert import convert, converted_in
from ...errors import MeasureError
from ...measure.fake_cuda.count import count
from ...measure.inductor import Counts
from ...target import load_target
from ...train.step import TrainStep
from .budget import COUNTS


def counts_of(target: str, policy: Policy) -> dict[str, float]:
    """Return the counts of a target by name, on the device of the policy; by default on the CPU.

    Raises:
        FxampError: The target cannot be called, or its model has no loss.
        MeasureError: Inductor does not compile it as a whole; or, for "cuda", something for counting is missing here.
    """
    if policy.device == "cuda":
        found = count(target, f"{__name__}:train", run_options={"policy": str(policy)})
        counts = replace(found.forward + found.backward, peak=found.peak)
    else:
        counts = _run(target, policy)
    return {key: getattr(counts, key) for key in COUNTS}


def train(model: nn.Module, args: Any, kwargs: Any, policy: str) -> Callable[[], TrainStep]:
    """Return what runs a step of a model; `fxamp.measure.fake_cuda` asks for it by name."""
    if converted_in(model):
        raise MeasureError("the target is converted already: kernels are counted of a model that is not")
    view = convert(model, policy=policy)
    step = TrainStep(view, None, AdamW(model.parameters(), fused=True), compile={"dynamic": False})
    inputs: Mapping[str, Any] | tuple[Any, ...] = kwargs or args
    if args and kwargs:
        raise MeasureError("the target returns both args and kwargs: a step takes all inputs as kwargs, or as args")

    def run() -> TrainStep:
        step(inputs)
        return step

    return run


def _run(target: str, policy: Policy) -> Counts:
    made, args, kwargs = load_target(target)
    if isinstance(made, TrainStep):
        step = made
        step(args)
    else:
        inputs = as_inputs(args, kwargs)
        if not isinstance(made, nn.Module) or inputs is None:
            raise MeasureError(f"{target!r} returns no model with its inputs, of which kernels could be counted")
        step = train(made, *inputs, str(policy))()
    compiled = step.compiled
    if compiled is None or compiled.loss.fallbacks or compiled.counts is None:
        why = "its TrainStep has no compile=True" if compiled is None else "; ".join(compiled.loss.fallbacks[:1])
        raise MeasureError(
            f"Inductor does not compile {target!r}, so that it has no kernels to count: {why or 'no graph'}"
        )
    return compiled.counts
