"""Make each model of the zoo once per run, convert it under many policies, and compare with what it must equal."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fxamp
from fxamp.measure.counts import StepCounts, step_counts
from fxamp.observe.workload import floats
from passes._torch import pytree
from tests.support.zoo import BY_NAME, Zoo

BATCH = 3


@dataclass
class Subject:
    """A model and its example inputs."""

    zoo: Zoo
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@functools.cache
def subject(name: str) -> Subject:
    """Return one model of the zoo, made once."""
    zoo = BY_NAME[name]
    model = zoo.build()
    args, kwargs = zoo.inputs(BATCH)
    return Subject(zoo, model, args, kwargs)


@functools.cache
def converted(name: str, policy: str = "O1") -> Any:
    """Return one model of the zoo converted under a policy, made once."""
    return compiled(subject(name), policy)


def compiled(found: Subject, policy: str) -> Any:
    """Return a subject converted under a policy."""
    return fxamp.convert(found.model, found.args, found.kwargs, policy=policy)


def run(
    module: nn.Module, found: Subject, *, seed: int = 0
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Run forward and backward; return outputs, gradients, buffers afterwards (restored then), and the RNG state."""
    with unchanged(found.model):
        torch.manual_seed(seed)
        output = module(*found.args, **found.kwargs)
        found.zoo.loss(output).backward()
        rng = torch.get_rng_state()
        gradients = {n: p.grad for n, p in found.model.named_parameters() if p.grad is not None}
        buffers = {n: b.clone() for n, b in found.model.named_buffers()}
    return [t.detach() for t in floats(output)], gradients, buffers, rng


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Start without gradients; leave buffers as they were, and no gradients."""
    before = {n: b.clone() for n, b in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for n, b in model.named_buffers():
                b.copy_(before[n])


def set_mode(found: Subject, module: nn.Module, training: bool) -> None:
    """Set both modules' mode; fused inference kernels of eager are off, for they round differently."""
    torch.backends.mha.set_fastpath_enabled(False)
    found.model.train(training)
    module.train(training)


def oracle(found: Subject) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return outputs and gradients of the model in float64, in the mode it is in."""
    double = copy.deepcopy(found.model).double()
    up: Callable[[Any], Any] = lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t  # noqa: E731
    args, kwargs = pytree.tree_map(up, (found.args, found.kwargs))
    output = double(*args, **kwargs)
    found.zoo.loss(output).backward()
    return [t.detach() for t in floats(output)], {n: p.grad for n, p in double.named_parameters() if p.grad is not None}


def training_counts(name: str, policy: str) -> tuple[StepCounts, StepCounts]:
    """Count a training step under autocast, the loss inside its region, and one of the converted model."""
    return counts_of(subject(name), converted(name, policy))


def counts_of(found: Subject, module: Any) -> tuple[StepCounts, StepCounts]:
    """Do the same for a subject that has no name."""
    set_mode(found, module, True)

    def under_autocast() -> Tensor:
        with torch.autocast("cpu", dtype=fxamp.plan_of(module).policy.dtype):
            return found.zoo.loss(found.model(*found.args, **found.kwargs))

    with unchanged(found.model):
        expected = step_counts(under_autocast)
    with unchanged(found.model):
        got = step_counts(lambda: found.zoo.loss(module(*found.args, **found.kwargs)))
    return expected, got
