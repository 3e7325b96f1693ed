"""The values that a model's forward() reads during capture, and that become constants of the graph.

A front end runs a model's Python once. What the code reads of the model (`self.scale`, a dropout's `p`, the layer that
it calls, `self.config.eps`, whether a weight requires gradients) becomes a constant of the graph. `module/baked.py`
compares these constants with the model at every call.

Before: self.norm(x) * self.scale
After:  attributes = {("", "norm"), ("", "scale"), ("norm", "eps"), ("norm", "forward"), ...}
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from . import frames
from .patches import as_torch_is, is_capturing, replaced

HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
_HEAP_TYPE = 1 << 9  # bit of the __flags__ of a class made in Python, whose attributes can be set
_WALK = nn.Module.named_modules.__code__  # tracers call it to find names of modules
_AUTOGRAD = ("requires_grad", "grad_fn", "is_leaf")


def held_attribute(modules: Mapping[str, nn.Module], name: str) -> tuple[int, str]:
    """Return an identity of an attribute of an object that a module holds: several modules may hold the same object.

    Args:
        modules: those of the model, by path.
        name: "path.holder.attribute".
    """
    owner, _, attribute = name.rpartition(".")
    path, _, holder = owner.rpartition(".")
    return id(vars(modules[path]).get(holder)) if path in modules else 0, attribute


@dataclass
class Reads:
    """The reads of forward(), in all states that it was captured in.

    Attributes:
        attributes: module path and name.
        objects: module path, attribute that holds an object of the user's, such as a configuration, and name in it.
        assigned: "path.name" of what forward() itself assigns, which is not compared.
        opaque: paths of modules that run as they are.
        gradients: parameters whose `requires_grad` was read, by name, and where; "" for a computed value, which depends
            on all of them.
        hooks: names of the hooks that forward() itself installs at its first call.
        inputs: whether inputs required gradients, by their place among the tensors, and where that was read.
    """

    attributes: set[tuple[str, str]] = field(default_factory=set)
    objects: set[tuple[str, str, str]] = field(default_factory=set)
    assigned: set[str] = field(default_factory=set)
    opaque: set[str] = field(default_factory=set)
    gradients: dict[str, str] = field(default_factory=dict)
    inputs: dict[int, tuple[bool, str]] = field(default_factory=dict)
    hooks: set[str] = field(default_factory=set)

    def may_read(self, names: Iterable[str], model: nn.Module) -> tuple[str, ...]:
        """Return those names of changed state (`snapshot.py`) that forward() may read; it surely does not the others.

        Reads of modules and of the objects in their attributes are recorded, and those of all other state are not.
        """
        modules = dict(model.named_modules())
        read = {held_attribute(modules, ".".join(filter(None, found))) for found in self.objects}

        def unread(name: str) -> bool:
            owner, _, attribute = name.rpartition(".")
            if owner in modules:
                return (owner, attribute) not in self.attributes
            path, _, holder = owner.rpartition(".")
            return (path, holder) in self.attributes and held_attribute(modules, name) not in read

        return tuple(name for name in names if "[" in name or not unread(name))

    def add_opaque(self, path: str, leaf: nn.Module) -> None:
        """Count all attributes of an opaque module as read."""
        for inner, module in leaf.named_modules(prefix=path):
            self.opaque.add(inner)
            self.attributes |= {(inner, name) for name in (*module.__dict__, "forward", "_modules")}


class Recorder:
    """Context manager that records what this thread reads.

    Args:
        model: model whose forward is called inside.
        reads: where the reads are recorded.
        asked: called with the lines where `requires_grad` of a computed value is read, which depends on the grad mode
            too.
    """

    def __init__(self, model: nn.Module, reads: Reads, asked: list[str]) -> None:
        self._model, self._reads, self._asked = model, reads, asked

    @contextlib.contextmanager
    def __call__(self, inputs: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        """Record reads inside this context, in which forward() is called with these tensors."""
        modules = dict(self._model.named_modules())
        held = {(path, name): v for path, m in modules.items() for name, v in vars(m).items() if _looked_into(v)}
        kinds = {nn.Module, *map(type, held.values())}
        # Their tables identify modules: the proxies that torch.export makes of shared modules have the module's own.
        note = self._noting({id(vars(m)): p for p, m in modules.items()}, {id(vars(v)): at for at, v in held.items()})
        note_gradient = self._noting_gradients(inputs)
        patches = contextlib.ExitStack()

        def patch() -> None:
            for kind in kinds:
                with contextlib.suppress(TypeError, AttributeError):  # a class whose attributes cannot be set
                    patches.enter_context(replaced(kind, "__getattribute__", note))
            for name in _AUTOGRAD:
                patches.enter_context(mock.patch.object(torch.Tensor, name, _noted_property(name, note_gradient)))

        def unpatched(compile: Callable[..., Any]) -> Callable[..., Any]:
            def compiling(*args: Any, **kwargs: Any) -> Any:
                with as_torch_is():
                    compiled = compile(*args, **kwargs)

                def call(*args: Any, **kwargs: Any) -> Any:
                    patches.close()
                    try:
                        with as_torch_is():
                            return compiled(*args, **kwargs)
                    finally:
                        patch()

                return call

            return compiling

        # Higher-order ops such as torch.while_loop compile their bodies by Dynamo, which would trace these patches too.
        with patches, replaced(torch, "compile", unpatched):
            patch()
            yield
        for module in modules.values():
            for table in HOOKS:
                self._reads.hooks |= set(map(label, vars(module)[table].values()))

    def _noting(self, paths: dict[int, str], held: dict[int, tuple[str, str]]) -> Callable[..., Any]:
        attributes, objects = self._reads.attributes, self._reads.objects

        def noting(get: Callable[..., Any]) -> Callable[..., Any]:
            def read(owner: Any, name: str) -> Any:
                table = id(get(owner, "__dict__"))
                if table in paths and not (name == "_modules" and sys._getframe(2).f_code is _WALK):
                    attributes.add((paths[table], name))
                elif table in held:
                    objects.add((*held[table], name))
                return get(owner, name)

            return read

        return noting

    def _noting_gradients(self, inputs: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], None]:
        reads = self._reads
        parameters = {id(p): name for name, p in self._model.named_parameters()}
        buffers = {id(b) for b in self._model.buffers()}
        places = {id(t): i for i, t in enumerate(inputs)}
        required, ambient = [t.requires_grad for t in inputs], torch.is_grad_enabled()

        def note(tensor: torch.Tensor) -> None:
            asker = frames.caller(("user", "nn", "torch"))
            if asker is None or frames.kind(asker.f_code.co_filename) == "torch" or id(tensor) in buffers:
                return
            place = frames.place()
            if id(tensor) in parameters:
                reads.gradients.setdefault(parameters[id(tensor)], place)
            elif id(tensor) in places:
                at = places[id(tensor)]
                reads.inputs.setdefault(at, (required[at], place))
            elif torch.is_grad_enabled() is ambient:  # else in the program's own grad-mode region, which decides alone
                reads.gradients.setdefault("", place)
                for at, flag in enumerate(required):
                    reads.inputs.setdefault(at, (flag, place))
                self._asked.append(place)

        return note


def label(hook: Any) -> str:
    """Return the name of a hook for an error."""
    return str(getattr(hook, "__qualname__", type(hook).__name__))


def _looked_into(value: Any) -> bool:
    """Say whether a value is an object of the user's whose attributes forward() may read, such as a configuration."""
    kind = type(value)
    return (
        bool(kind.__flags__ & _HEAP_TYPE)
        and hasattr(value, "__dict__")
        and not isinstance(value, (nn.Module, torch.Tensor, type))
        and not kind.__module__.startswith(("torch.", "collections", "functools", "enum"))
    )


def _noted_property(name: str, note: Callable[[torch.Tensor], object]) -> Any:
    own: Any = getattr(torch.Tensor, name)

    def get(self: torch.Tensor) -> Any:
        if is_capturing():
            note(self)
        return own.__get__(self)

    def put(self: torch.Tensor, value: Any) -> None:
        own.__set__(self, value)

    return property(get, put)
