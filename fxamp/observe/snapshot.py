"""Run a model or its graph so that afterwards its tensors and all random states are as before."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from passes.contract.devices import DEVICES

from .tensors import held, kept, reached


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


@contextlib.contextmanager
def outside_of_regions() -> Iterator[None]:
    """Run as a training loop does behind its `torch.autocast`: no region is open, and its cache of weights is empty.

    A region inside the caller's would leave the cache as it is at its end, and what is recomputed in backward would
    find casts of weights there that a loop makes again.
    """
    on = [device for device in DEVICES if torch.is_autocast_enabled(device)]
    depth = 0
    while torch.autocast_decrement_nesting() >= 0:
        depth += 1
    torch.autocast_increment_nesting()
    torch.clear_autocast_cache()
    for device in on:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for device in on:
            torch.set_autocast_enabled(device, True)
        for _ in range(depth):
            torch.autocast_increment_nesting()


def fresh(value: Any) -> Any:
    """Copy an input, so that a model that writes to it, or draws from it, does so once for each run."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value.clone_state() if isinstance(value, torch.Generator) else value


@contextlib.contextmanager
def same_attributes(model: nn.Module) -> Iterator[None]:
    """Give back, by reference, what a model's modules hold, and the containers and objects that are reached from there.

    A model may add hooks at its first call, and note in an attribute that it has: without the hooks' tables it would
    add them twice.
    """
    with same_containers(reached(model)[0]):
        yield


@contextlib.contextmanager
def same_objects(roots: Iterable[Any]) -> Iterator[None]:
    """Give back what some objects hold: attributes, lists, dicts and sets by reference, tensors bit for bit.

    It is kept before anything runs, and put back by assignment and by copy, so that nothing can refuse it: a
    `load_state_dict` may, as that of a scaler which was chosen inside.
    """
    roots = tuple(roots)
    containers, tensors = reached(*roots)
    tensors |= {id(p): p for root in roots if isinstance(root, nn.Module) for p in root.parameters()}
    leaves = [(t, t.grad, t.requires_grad) for t in tensors.values() if t.is_leaf]
    tensors |= {id(gradient): gradient for _, gradient, _ in leaves if gradient is not None}
    with kept(tensors.values()), same_containers(containers):
        try:
            yield
        finally:
            for tensor, gradient, requires_grad in leaves:
                tensor.grad = gradient
                if tensor.requires_grad != requires_grad:
                    tensor.requires_grad_(requires_grad)


@contextlib.contextmanager
def same_containers(containers: Iterable[Any]) -> Iterator[None]:
    """Give back what lists, dicts, sets and queues hold, by reference."""
    before = [(container, container.copy()) for container in containers]
    try:
        yield
    finally:
        for container, items in before:
            now, then = ((*c, *c.values()) if isinstance(c, dict) else tuple(c) for c in (container, items))
            if len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True)):
                continue
            if isinstance(container, list):
                container[:] = items
            else:
                container.clear()
                (container.extend if hasattr(container, "rotate") else container.update)(items)
