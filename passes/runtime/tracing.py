"""How graphs that call the functions of this package are unpickled: torch traces their code again."""

from __future__ import annotations

import inspect

from torch.fx import Tracer

from . import casts, regions, rnn, sizes

FUNCTIONS = tuple(
    function
    for module in (casts, regions, rnn, sizes)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
)


class RuntimeTracer(Tracer):
    """Traces the code of a converted graph, in which calls of these functions stay whole."""

    def __init__(self) -> None:
        super().__init__(autowrap_functions=FUNCTIONS)
