"""Run a model or its graph so that afterwards its tensors and all random states are as before."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from passes.contract.devices import DEVICES

from .tensors import held, kept, reached, tables


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
    before = [(container, container.copy()) for container in reached(model)[0]]
    try:
        yield
    finally:
        for container, items in before:
            if len(container) != len(items) or any(
                a is not b for a, b in zip(_flat(container), _flat(items), strict=True)
            ):
                _put_back(container, items)


def _flat(container: Any) -> Iterable[Any]:
    return (*container, *container.values()) if isinstance(container, dict) else container


def _put_back(container: Any, items: Any) -> None:
    if isinstance(container, list):
        container[:] = items
    else:
        container.clear()
        (container.extend if hasattr(container, "rotate") else container.update)(items)


@contextlib.contextmanager
def same_objects(roots: Iterable[Any]) -> Iterator[None]:
    """Give back what some objects hold: attributes, lists, dicts and sets by reference, tensors bit for bit.

    It is kept before anything runs, and put back by assignment and by copy, so that nothing can refuse it: a
    `load_state_dict` may, as that of a scaler which was chosen inside. Modules are followed into their parameters,
    gradients and buffers; other objects only if they are among the roots, an optimizer, a scheduler or a scaler.
    """
    state = _State()
    for root in roots:
        state.add(root, root=True)
    with kept(state.tensors):
        try:
            yield
        finally:
            state.restore()


class _State:
    """The containers and tensors that are reached from some objects, and what they held."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._seen: dict[int, Any] = {}
        self._containers: list[tuple[Any, Any]] = []
        self._gradients: list[tuple[Tensor, Tensor | None, bool]] = []

    def add(self, value: Any, *, root: bool = False) -> None:
        """Keep an object, and what is reached from it."""
        if id(value) in self._seen:
            return
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, nn.Module):
            self._add_module(value)
        elif isinstance(value, (dict, list, set)) or (hasattr(value, "maxlen") and hasattr(value, "rotate")):
            self._add_container(value, value.values() if isinstance(value, dict) else value)
        elif isinstance(value, (tuple, frozenset)):
            for one in value:
                self.add(one)
        elif root or isinstance(value, (Optimizer, LRScheduler, torch.amp.GradScaler)):
            self._seen[id(value)] = value
            attributes = vars(value) if hasattr(value, "__dict__") else {}
            self._add_container(attributes, attributes.values())

    def _add_tensor(self, tensor: Tensor) -> None:
        self._seen[id(tensor)] = tensor
        self.tensors.append(tensor)
        if tensor.is_leaf:
            self._gradients.append((tensor, tensor.grad, tensor.requires_grad))
            self.add(tensor.grad)

    def _add_module(self, module: nn.Module) -> None:
        self._seen[id(module)] = module
        for one in (*module.parameters(), *held(module).values()):
            self.add(one)
        for table in (table for inner in module.modules() for table in tables(inner)):
            self._add_container(table, ())

    def _add_container(self, container: Any, values: Iterable[Any]) -> None:
        self._seen[id(container)] = container
        self._containers.append((container, container.copy()))
        for one in values:
            self.add(one)

    def restore(self) -> None:
        """Put containers and gradients back; tensors are those of `kept`."""
        for container, before in self._containers:
            _put_back(container, before)
        for tensor, gradient, requires_grad in self._gradients:
            tensor.grad = gradient
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
