"""Run a model or its graph so that afterwards its tensors and all random states are as before."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .tensors import held, kept, tables


def random_state() -> dict[str, Any]:
    """Return the random states of torch, of its devices, of Python and, if it is loaded, of NumPy, as plain values."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "cuda": cuda, "python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, words, *rest = numpy.random.get_state()
        state["numpy"] = [kind, words.tolist(), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the random states that `random_state` returned."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(tuple(state["numpy"]))


@contextlib.contextmanager
def same_random_state() -> Iterator[None]:
    """Restore all random states."""
    if torch.cuda.is_available():
        torch.cuda.init()  # what is not initialized before has no state to restore
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore random states and the model's tensors, parameters too: nobody knows which of them forward() writes."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # a fused kernel in eager eval rounds differently
    tensors = {id(t): t for t in (*held(model).values(), *model.parameters())}
    try:
        with same_random_state(), kept(tensors.values()):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


def fresh(value: Any) -> Any:
    """Copy an input, so that a model that writes to it, or draws from it, does so once for each run."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value.clone_state() if isinstance(value, torch.Generator) else value


@contextlib.contextmanager
def same_attributes(model: nn.Module) -> Iterator[None]:
    """Give back the attributes of a model's modules that are rebound inside, and what torch keeps of each in tables.

    A model may add hooks at its first call, and note in an attribute that it has: without the hooks' tables it would
    add them twice.
    """
    before = [(table, dict(table)) for module in model.modules() for table in tables(module)]
    try:
        yield
    finally:
        for now, held in before:
            if len(now) != len(held) or any(now.get(name) is not value for name, value in held.items()):
                now.clear()
                now.update(held)
