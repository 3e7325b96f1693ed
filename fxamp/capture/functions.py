"""Keep a model's own `torch.autograd.Function`s whole while it is exported.

The exporter would inline `forward` and lose `backward`. Therefore, while a model is exported, each call of `apply` is
replaced by a call of a temporary operator; afterwards the operators are replaced by calls of the functions again:

    TimesHundred.apply(x, 2)  ->  ops.fxamp_export.TimesHundred_0(x)  ->  call(TimesHundred, x, 2)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
import torch.utils.checkpoint
from torch import library as operators
from torch.fx import Graph, GraphModule, Node

from passes._torch import APPLIES, TorchDispatchMode, pytree, storage_id, temporary_operators
from passes.graph.notes import note, note_of

from .model.patches import replaced
from .model.preflight import used_by_model
from .model.tensors import strided, written

_APPLY: Any = vars(torch.autograd.Function)["apply"]  # a descriptor of Python or, from torch 2.15 on, of C
_NAMESPACE = "fxamp_export"
_TYPES = {torch.Tensor: "Tensor", torch.SymInt: "SymInt"}


def call(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call an autograd function, as a node of a graph."""
    return function.apply(*args)


def call_under_autocast(function: type[torch.autograd.Function], device: str, dtype: torch.dtype, *args: Any) -> Any:
    """Call an autograd function under `torch.autocast`, so that it computes as its code decides."""
    with torch.autocast(device, dtype):
        return function.apply(*args)


def as_under_autocast(graph: Graph, device: str, dtype: torch.dtype) -> None:
    """Make autograd functions run under autocast, in place, where capture has seen their outputs under autocast.

    Before: call(TimesHundred, x, 2)    After: call_under_autocast(TimesHundred, "cpu", bfloat16, x, 2)
    """
    for node in graph.nodes:
        if node.target is call and note_of(node).autocast is not None:
            node.target, node.args = call_under_autocast, (node.args[0], device, dtype, *node.args[1:])
            note(node, under_autocast=True)


class _Lost(Exception):  # noqa: N818 - a signal inside this file, not an error
    """Raised if a call of an autograd function cannot be written as an operator."""


# Types of which the code of a graph holds a value by what it prints.
_WRITTEN_OUT = (
    bool, int, float, complex, str, bytes, range, type(None), type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


def _is_written_out(value: Any) -> bool:
    """Say whether the code of a graph can hold an argument. An object of any other class prints as something else."""
    if isinstance(value, tuple) or type(value) in (list, set, frozenset):
        return all(map(_is_written_out, value))
    if type(value) is dict:
        return all(map(_is_written_out, (*value, *value.values())))
    if isinstance(value, slice):
        return all(map(_is_written_out, (value.start, value.stop, value.step)))
    return isinstance(value, Enum) or type(value) in _WRITTEN_OUT


class _Writes(TorchDispatchMode):
    """Notes the storages that are written: without `mark_dirty` no version says so while a function is exported."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= {storage_id(t) for t in written(func, args, kwargs or {})}
        return func(*args, **(kwargs or {}))


class _Operator:
    """One call of an autograd function, as an operator over its tensors that returns a list of tensors."""

    def __init__(self, library: Any, name: str, apply: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.apply, self.args, self.single = apply, args, False
        self.writes: frozenset[int] = frozenset()  # the arguments that it writes to, counted from the last
        self.given = [i for i, a in enumerate(args) if isinstance(a, (torch.Tensor, torch.SymInt))]
        if len(self.given) < len([v for v in pytree.tree_leaves(args) if isinstance(v, (torch.Tensor, torch.SymInt))]):
            raise _Lost  # some are inside containers
        if not all(_is_written_out(v) for i, v in enumerate(args) if i not in self.given):
            raise _Lost
        kinds = [next(word for kind, word in _TYPES.items() if isinstance(args[i], kind)) for i in self.given]
        schema = ", ".join(f"{kind} a{i}" for kind, i in zip(kinds, self.given, strict=True))
        library.define(f"{name}({schema}) -> Tensor[]")
        operators.register_fake(f"{_NAMESPACE}::{name}", self._run, lib=library)
        self.target: Any = getattr(getattr(torch.ops, _NAMESPACE), name).default

    def __call__(self) -> Any:
        """Call the operator instead of the function."""
        made = self.target(*(self.args[i] for i in self.given))
        return made[0] if self.single else tuple(made)

    def _run(self, *tensors: Any) -> list[torch.Tensor]:
        versions = [t._version for t in tensors if isinstance(t, torch.Tensor)]
        with _Writes() as writes:
            made = self.apply(*self.with_operands(tensors))
        of = zip(self.given, tensors, strict=True)
        self.writes |= {i - len(self.args) for i, t in of if any(storage_id(s) in writes.found for s in strided(t))}
        if versions != [t._version for t in tensors if isinstance(t, torch.Tensor)]:
            raise _Lost  # an operator may not write to an operand that its schema does not mark
        self.single = isinstance(made, torch.Tensor)
        outputs = [made] if self.single else list(made)
        if not all(isinstance(t, torch.Tensor) for t in outputs):
            raise _Lost
        return outputs

    def with_operands(self, operands: Any) -> tuple[Any, ...]:
        """Return the arguments of the call with other operands."""
        args = list(self.args)
        for i, operand in zip(self.given, operands, strict=True):
            args[i] = operand
        return tuple(args)


class Functions:
    """The autograd functions that are called while one model is exported."""

    def __init__(self) -> None:
        self._scope = contextlib.ExitStack()
        self._library = self._scope.enter_context(temporary_operators(_NAMESPACE))
        self._called: dict[Any, tuple[type, _Operator]] = {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside this context, operators replace the autograd functions that the model calls."""

        def make(otherwise: Callable[..., Any]) -> Callable[..., Any]:
            def apply(cls: Any, *args: Any) -> Any:
                if cls.__module__ != torch.utils.checkpoint.__name__ and used_by_model():
                    name = f"{cls.__name__}_{id(self)}_{len(self._called)}"
                    with contextlib.suppress(_Lost):
                        made = _Operator(self._library, name, _APPLY.__get__(None, cls), args)
                        self._called[made.target] = (cls, made)
                        return made()
                return otherwise(cls, *args)

            return apply

        with contextlib.ExitStack() as patches:
            for owner in APPLIES:
                patches.enter_context(replaced(owner, "apply", make))
            try:
                yield
            except BaseException:
                self.free()
                raise

    def free(self) -> None:
        """Take the operators out of torch's registry."""
        self._scope.close()

    def restore(self, gm: GraphModule) -> None:
        """Replace the operators by calls of the functions, in every graph of a module, and free the operators.

        The code of the graphs is not generated again.
        """
        for module in gm.modules():
            if isinstance(module, GraphModule):
                for node in list(module.graph.nodes):
                    if node.target in self._called:
                        _restore(module, node, *self._called[node.target])
        self.free()


def _restore(gm: GraphModule, node: Node, cls: type, made: _Operator) -> None:
    name = cls.__name__
    while getattr(gm, name, cls) is not cls:
        name += "_"
    setattr(gm, name, cls)
    with gm.graph.inserting_before(node):
        function = gm.graph.create_node("get_attr", name)
        new = gm.graph.call_function(call, (function, *made.with_operands(node.args)))
    new.meta = dict(node.meta)
    note(new, writes=made.writes)
    if made.single:
        new.meta["val"] = node.meta["val"][0]
        for item in list(node.users):
            item.replace_all_uses_with(new)
            gm.graph.erase_node(item)
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
