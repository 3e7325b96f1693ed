"""How a converted graph is traced again when it is unpickled.

Torch pickles a graph as code, and traces that again. Calls without a traced value would then run instead of being
recorded: switches of modes would be lost, and random numbers frozen. `RuntimeTracer` records all calls.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch.fx import Graph, Tracer
from torch.overrides import is_tensor_method_or_property

from .._torch import HigherOrderOperator, TorchFunctionMode
from . import casts, norms, regions, rnn, sizes

FUNCTIONS = tuple(
    function
    for module in (casts, norms, regions, rnn, sizes)
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
