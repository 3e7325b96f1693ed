"""The class of converted graphs: what a call of one leaves as it was, and how one is pickled.

Torch pickles a graph as code, and traces that again. Calls without a traced value would then run instead of being
recorded: switches of modes would be lost, and random numbers frozen. `RuntimeTracer` records all calls.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch.fx import Graph, GraphModule, Tracer
from torch.fx.graph_module import reduce_graph_module
from torch.overrides import is_tensor_method_or_property

from .._torch import HigherOrderOperator, TorchFunctionMode
from ..contract.devices import DEVICES
from . import casts, regions, rnn, sizes

FUNCTIONS = tuple(
    function
    for module in (casts, regions, rnn, sizes)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
)


class _Recording(TorchFunctionMode):
    """Records every call of a function of torch, with a traced value among its arguments or without."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if is_tensor_method_or_property(func):
            return func(*args, **(kwargs or {}))
        return self._tracer.create_proxy("call_function", func, args, kwargs or {})


class RuntimeTracer(Tracer):
    """Traces the code of a converted graph, in which calls of these functions stay whole."""

    def __init__(self) -> None:
        super().__init__(autowrap_functions=FUNCTIONS)

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> Graph:
        """Record a graph."""

        def record(op: Any, *args: Any, **kwargs: Any) -> Any:
            return self.create_proxy("call_function", op, args, kwargs)

        with contextlib.ExitStack() as stack:
            stack.enter_context(_Recording(self))
            for name in type(root).forward.__code__.co_names:
                # Before any mode sees the call of a higher-order op, its class may check the types of the operands.
                if isinstance(op := getattr(torch.ops.higher_order, name, None), HigherOrderOperator):
                    stack.enter_context(mock.patch.object(type(op), "__call__", record))
            return super().trace(root, concrete_args)


class Emitted(GraphModule):
    """A converted graph: ambient autocast changes nothing in it, and an error in it leaves no mode switched.

    A graph keeps the mode, train or eval, that it was captured in. Where an op has it as an argument, `meta["mode"]`
    holds it, and names that op; then `train` and `eval` warn about another mode.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph."""
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return self(*args, **kwargs)
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        with regions.ModesKeptOnError():
            return super().__call__(*args, **kwargs)

    def train(self, mode: bool = True) -> Emitted:
        """Set the flag of the module; the graph computes what it did."""
        captured, op = self.meta.get("mode", (mode, ""))
        if captured is not mode:
            has, asked = ("train" if m else "eval" for m in (captured, mode))
            warnings.warn(
                f"fxamp: this graph was captured in {has} mode and keeps it, {op} for example. For {asked} mode, "
                "export or trace the model in that mode, and convert what comes out.",
                stacklevel=2 if mode else 3,  # `eval` calls this
            )
        super().train(mode)
        return self

    def __reduce__(self) -> Any:
        _, (fields, imports) = super().__reduce__()
        return _unpickled, (fields, imports)

    def __copy__(self) -> Emitted:
        return _again(super().__copy__(), self.__dict__)


def _unpickled(fields: dict[str, Any], imports: str) -> Emitted:
    return _again(reduce_graph_module(fields, imports), fields)


def _again(made: Any, fields: dict[str, Any]) -> Emitted:
    """Return a graph as one of this class, with what is kept on it."""
    emitted = Emitted(made, made.graph, type(made).__name__)
    for name, value in fields.items():
        if not hasattr(emitted, name):
            setattr(emitted, name, value)
    emitted.meta, emitted.training = dict(fields["meta"]), made.training
    return emitted
