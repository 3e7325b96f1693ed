"""Python's in-place operators, such as `x += y`, as functions that a graph calls.

`operator.iadd` writes to a tensor, but returns a new number if a traced value turns out to be a number. The code that
fx generates then assigns the new number to the old name too, which other nodes still read.

Before: x += 1;  iadd = x
After:  iadd = fxamp_in_place_iadd(x, 1)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Graph, Node

from passes.ops import ops


def _called(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a function that does the same, but that generated code calls by name."""

    def call(a: Any, b: Any) -> Any:
        return function(a, b)

    call.__name__ = call.__qualname__ = function.__name__
    return call


_CALLED = {function: _called(function) for function in ops.IN_PLACE}


@contextlib.contextmanager
def called_by_name(graph: Graph) -> Iterator[None]:
    """Inside this context, generated code writes in-place operators as calls; afterwards the graph is as before."""
    found: list[tuple[Node, Any]] = [(n, n.target) for n in graph.nodes if n.target in _CALLED]
    for node, function in found:
        node.target = _CALLED[function]
    try:
        yield
    finally:
        for node, function in found:
            node.target = function
