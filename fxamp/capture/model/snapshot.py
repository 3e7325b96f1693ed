"""The Python state that a model's `forward` can reach: what it was before a run, and what the run changed.

It is the attributes of the modules, and what those lead to: containers in containers, objects of the user's classes,
and random generators. Outside the model it is the attributes of the user's classes, and the global variables that
their methods name. What is written into tensors is restored by `tensors.py`.
"""

from __future__ import annotations

import collections
import contextlib
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from passes._torch import pytree, without_modes

_OWN = frozenset(nn.Module().__dict__)  # torch's tables of parameters, buffers, children and hooks
_CONTAINERS = (
    dict, list, set, collections.OrderedDict, collections.defaultdict, collections.Counter, collections.deque,
)  # fmt: skip
_PLAIN = (bool, int, float, str, bytes, type(None), torch.Size, torch.dtype, torch.device)
# What is larger is not a model's state but, for example, a data set that a trainer holds, which the model holds.
_MOST = 100_000


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Restore the Python state that a model's forward() can reach, whatever happens inside.

    Yields a dict. Afterwards it holds what had changed, as `Snapshot.changes` returns it.
    """
    before = Snapshot(model)
    changed: dict[str, Any] = {}
    try:
        yield changed
    finally:
        changed |= before.changes()
        before.restore()


@dataclass(frozen=True)
class _Names:
    """Names with values: attributes of a module, an object or a class, or global variables."""

    where: str
    now: Callable[[], Mapping[str, Any]]
    before: dict[str, Any]
    put: Callable[[str, Any], None]
    drop: Callable[[str], None]
    by_torch: bool = False  # attributes of a module of torch's, which sets private ones itself


@dataclass(frozen=True)
class _Container:
    where: str
    container: Any
    before: Any


@dataclass(frozen=True)
class _Generator:
    where: str
    generator: Any
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    before: Any


class Snapshot:
    """The state that a model's forward() can reach, at the time when this is made."""

    def __init__(self, model: nn.Module) -> None:
        self._names: list[_Names] = []
        self._containers: dict[int, _Container] = {}
        self._generators: list[_Generator] = []
        self._seen: set[int] = set()
        self._classes: dict[type, None] = {}
        for path, module in model.named_modules():
            self._of_object(path, module)
        for kind in list(self._classes):
            self._of_class(kind)

    def changes(self) -> dict[str, Any]:
        """Return what has changed since, by name, with the present values, of which containers are copies.

        Attributes of a module are named "path.name", a buffer "path._buffers.name" (without its value), an attribute of
        an object "path.name.its_name", an item "path.name[key]"; those of a class and of a file begin with its name.
        """
        out: dict[str, Any] = {}
        for names in self._names:
            now = names.now()
            for name in now.keys() | names.before.keys():
                if not _by_torch(name, names.by_torch) and not self._unchanged(names.before.get(name), now.get(name)):
                    out[f"{names.where}.{name}".lstrip(".")] = _copied(now.get(name))
        for saved in self._containers.values():
            now, (_, _, name) = _copied(saved.container), saved.where.rpartition(".")
            if name == "_buffers":
                out |= {f"{saved.where}.{n}": None for n in _differing(saved.before, now)}
            elif not name.endswith("_hooks") and not same_state(saved.before, now):
                out[saved.where] = now
        out |= {source.where: source.generator for source in self._generators if source.get() != source.before}
        return dict(sorted(out.items()))

    def restore(self) -> None:
        """Undo the changes, and write nothing else: other threads may use the same objects."""
        for names in self._names:
            now = dict(names.now())
            for name in now.keys() - names.before.keys():
                names.drop(name)
            for name, value in names.before.items():
                if name not in now or now[name] is not value:
                    names.put(name, value)
        for saved in self._containers.values():
            if not _identical(_copied(saved.container), saved.before):
                saved.container.clear()
                (saved.container.extend if hasattr(saved.container, "extend") else saved.container.update)(saved.before)
        for source in self._generators:
            if source.get() != source.before:
                source.put(source.before)

    def _unchanged(self, old: Any, new: Any) -> bool:
        if old is new:  # a container has an entry of its own
            return True
        saved = self._containers.get(id(old))
        return same_state(old if saved is None else saved.before, _copied(new))

    def _of_object(self, where: str, owner: Any) -> None:
        table, kind = vars(owner), type(owner)
        by_torch = isinstance(owner, nn.Module) and not _is_users(kind)
        self._names.append(_Names(where, lambda: table, dict(table), table.__setitem__, table.__delitem__, by_torch))
        self._classes |= dict.fromkeys(k for k in kind.__mro__ if _is_users(k))
        for name, value in list(table.items()):
            at = f"{where}.{name}".lstrip(".")
            if name not in _OWN or not isinstance(owner, nn.Module):
                self._walk(at, value)
            elif type(value) in _CONTAINERS:
                self._containers[id(value)] = _Container(at, value, _copied(value))

    def _of_class(self, kind: type) -> None:
        def now() -> dict[str, Any]:
            return {n: v for n, v in vars(kind).items() if not n.startswith(("__", "_abc_"))}

        before, where = now(), kind.__qualname__
        self._names.append(
            _Names(where, now, before, lambda n, v: setattr(kind, n, v), lambda n: delattr(kind, n))
        )  # fmt: skip
        for name, value in before.items():
            self._walk(f"{where}.{name}", value)
        self._of_globals([value for value in vars(kind).values() if isinstance(value, types.FunctionType)])

    def _of_globals(self, functions: list[types.FunctionType]) -> None:
        """Add the global variables that functions name, and those that functions of the same file that they call do."""
        while functions:
            function = functions.pop()
            variables = function.__globals__
            if id(function) in self._seen:
                continue
            self._seen.add(id(function))
            found = {n: variables[n] for n in function.__code__.co_names if n in variables}
            where = str(variables.get("__name__", ""))

            def now(names: tuple[str, ...] = tuple(found), variables: dict[str, Any] = variables) -> dict[str, Any]:
                return {n: variables[n] for n in names if n in variables}

            self._names.append(_Names(where, now, found, variables.__setitem__, variables.__delitem__))
            for name, value in found.items():
                if not isinstance(value, types.FunctionType):
                    self._walk(f"{where}.{name}", value)
                elif value.__globals__ is variables:
                    functions.append(value)

    def _walk(self, where: str, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN or id(value) in self._seen or len(self._seen) > _MOST:
            return
        if kind in _CONTAINERS:
            self._containers[id(value)] = _Container(where, value, _copied(value))
        if kind in _CONTAINERS or isinstance(value, tuple):
            self._seen.add(id(value))
            items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
            for key, item in items:
                self._walk(f"{where}[{key!r}]", item)
        elif methods := _state_methods(value):
            self._seen.add(id(value))
            self._generators.append(_Generator(where, value, *methods, methods[0]()))
        elif _is_users(kind) and not issubclass(kind, (nn.Module, torch.Tensor, type)) and _has_table(value):
            self._seen.add(id(value))
            self._of_object(where, value)


def _has_table(value: Any) -> bool:
    with contextlib.suppress(Exception):  # a class may make what it likes of the name
        return type(vars(value)) is dict
    return False


def _is_users(kind: type) -> bool:
    """Say whether a class is neither Python's nor torch's."""
    package = kind.__module__.partition(".")[0]
    return kind is types.SimpleNamespace or not (package == "torch" or package in sys.stdlib_module_names)


def _state_methods(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return functions that get and set the state of a random generator, which can be compared; else None."""
    kind, numpy = type(value), sys.modules.get("numpy")
    if kind is torch.Generator:
        return lambda: _state_of(value), lambda state: _put(value, state)
    if kind is random.Random:
        return value.getstate, value.setstate
    if numpy is not None and kind is numpy.random.RandomState:
        return lambda: pickle.dumps(value.get_state()), lambda s: value.set_state(pickle.loads(s))
    if numpy is not None and kind is numpy.random.Generator:
        bits = value.bit_generator
        return lambda: pickle.dumps(bits.state), lambda s: setattr(bits, "state", pickle.loads(s))
    return None


def _state_of(generator: torch.Generator) -> bytes:
    with without_modes():  # a trace would make a node of it
        return bytes(generator.get_state().numpy())


def _put(generator: torch.Generator, state: bytes) -> None:
    with without_modes():
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def is_generator(value: Any) -> bool:
    """Say whether a value is a random generator, whose state is part of a snapshot."""
    return _state_methods(value) is not None


def outline(value: Any) -> Any:
    """Return what can be compared of a value that a call left: its containers, and its plain values."""
    leaves, spec = pytree.tree_flatten(value)
    return spec, [v if isinstance(v, _PLAIN) else type(v) for v in leaves]


def _by_torch(name: str, by_torch: bool) -> bool:
    """Say whether torch sets an attribute itself, for example fx while it traces."""
    return name.startswith("_tensor_constant") or name.endswith("_hooks") or (by_torch and name.startswith("_"))


def _copied(value: Any) -> Any:
    if type(value) not in _CONTAINERS:
        return value
    return dict(value) if isinstance(value, dict) else list(value)


def _differing(before: Any, now: Any) -> list[str]:
    return [n for n in sorted(before.keys() | now.keys()) if before.get(n) is not now.get(n)]


def _identical(a: Any, b: Any) -> bool:
    left, right = ([*c.keys(), *c.values()] if isinstance(c, dict) else c for c in (a, b))
    return len(left) == len(right) and all(x is y for x, y in zip(left, right, strict=True))


def same_state(a: Any, b: Any) -> bool:
    """Say whether two values are the same: tensors and objects by identity, plain values by equality."""
    (left, spec), (right, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return spec == other and all(
        x is y or (type(x) in _PLAIN and type(y) in _PLAIN and bool(x == y)) for x, y in zip(left, right, strict=True)
    )
