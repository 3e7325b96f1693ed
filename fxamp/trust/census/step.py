"""Run one real step, forward, loss and backward, so that afterwards everything is as before."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from passes._torch import pytree
from passes.contract.errors import CaptureError, NotAModuleError, PolicyError
from passes.graph.values import no_autocast

from ..distance import floats
from ..preserved import fresh, same_attributes, same_random_state
from ..tensors import held, kept
from ..watch import Watch

MEAN = "the loss was the mean of the float outputs: no loss was given, and the output has none"
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


def model_of(model_or_step: Any) -> nn.Module:
    """Return the model of a TrainStep, or the model itself.

    Raises:
        NotAModuleError: it is neither.
        CaptureError: the model is on the meta device, where nothing runs.
    """
    model = model_or_step if isinstance(model_or_step, nn.Module) else getattr(model_or_step, "model", None)
    if not isinstance(model, nn.Module):
        raise NotAModuleError(
            f"a census is of a torch.nn.Module or of a TrainStep, not of {type(model_or_step).__name__}."
        )
    if any(p.is_meta for p in model.parameters()):
        raise CaptureError(
            f"{type(model).__name__} is on the meta device, where nothing runs: fxamp.plan decides for such a model; "
            "for a census make it on a device, with model.to_empty(device=...)."
        )
    return model


def run(model_or_step: Any, inputs: Any, target: Any, loss: Callable[..., Any] | None) -> Step:
    """Run and watch one step of a model, or one window of one micro-batch of a TrainStep.

    Raises:
        PolicyError: the inputs are of another kind, there is nothing to make a loss of, a TrainStep is given a loss, or
            its window is open.
    """
    model = model_of(model_or_step)
    given, target = _copies((inputs, target))
    if model_or_step is model:
        with _as_before(model):
            return _of_model(model, given, target, loss)
    if loss is not None:
        raise PolicyError("a TrainStep brings its own loss: leave out loss=.")
    return _of_step(model_or_step, given, target)


def _copies(values: Any) -> Any:
    """Copy tensors, one that is given twice once: Dynamo guards which inputs are the same."""
    made: dict[int, Any] = {}
    return pytree.tree_map(lambda v: made.setdefault(id(v), fresh(v)) if isinstance(v, Tensor) else v, values)


@contextlib.contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Restore random states, what the model holds, its parameters and their gradients, and attributes."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    everything = {id(t): t for t in (*held(model).values(), *parameters)}
    with same_random_state(), same_attributes(model), kept(everything.values()):
        for p in parameters:
            p.grad = None
        try:
            yield
        finally:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient


def _of_model(model: nn.Module, inputs: Any, target: Any, loss_fn: Callable[..., Any] | None) -> Step:
    watch = Watch(model, _of_model.__code__)
    with watch:
        loss, notes = _loss(_output(model, inputs), target, loss_fn)
        if loss.requires_grad:
            with no_autocast():  # where backward runs in a training loop
                loss.backward()
        else:
            notes = (*notes, _FORWARD_ALONE)
    return Step(watch, notes)


def _of_step(step: Any, inputs: Any, target: Any) -> Step:
    """Run one window of a TrainStep, with its optimizer, and give its state back."""
    state = copy.deepcopy(step.state_dict())
    gradients = [(p, p.grad) for p in step.model.parameters()]
    if state.get("position"):
        raise PolicyError("a window of this TrainStep is open: call flush() before a census.")
    watch = Watch(step.model, _of_step.__code__)
    try:
        with same_attributes(step.model), same_random_state(), kept(held(step.model).values()), watch:
            result = step(inputs, target)
            if result.reason == "accumulating":
                result = step.flush()
            skipped = result.reason == "overflow"
    finally:
        step.load_state_dict(state)
        for p, gradient in gradients:
            p.grad = gradient
    return Step(watch, (), step.scaler, skipped)


def _output(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence):
        return model(*inputs)
    if isinstance(inputs, (Tensor, PackedSequence)):
        return model(inputs)
    raise PolicyError(
        f"inputs is a tensor, a tuple for model(*inputs) or a mapping for model(**inputs), not {type(inputs).__name__}."
    )


def _loss(output: Any, target: Any, loss_fn: Callable[..., Any] | None) -> tuple[Tensor, tuple[str, ...]]:
    """Return the loss of an output, and what is to be said of it."""
    if loss_fn is not None:
        found = loss_fn(output) if target is None else loss_fn(output, target)
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise PolicyError(f"loss= gives a tensor of one element, not {_described(found)}.")
        return found, ()
    if target is not None:
        raise PolicyError("a target was given without loss=: give both, or leave out the target.")
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = output if found is None and isinstance(output, Tensor) and not output.dim() else found
    if isinstance(found, Tensor) and found.is_floating_point() and found.numel() == 1:
        return found, ()
    leaves = floats(output)
    if not leaves:
        raise PolicyError(
            f"the output ({type(output).__name__}) has no loss and no tensor of floats: give loss=, a function of it."
        )
    graded = [t for t in leaves if t.requires_grad] or leaves
    return torch.stack([t.float().mean() for t in graded]).mean(), (MEAN,)


def _described(value: Any) -> str:
    return f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
