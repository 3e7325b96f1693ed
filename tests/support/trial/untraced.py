"""What random programs call that Dynamo does not trace."""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_turns = itertools.count()


def turn() -> int:
    """Return another number at each call."""
    return next(_turns)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def outside(make: Callable[[], Any]) -> Any:
    """Call a function where the author has told Dynamo to stay away."""
    return make()


def generated(make: Callable[[], Any]) -> Iterator[Any]:
    """Yield the result of a function behind a break, in a generator, which Dynamo does not resume."""
    torch._dynamo.graph_break()
    yield make()


def deep(make: Callable[[], Any], depth: int) -> Any:
    """Call a function at the end of a recursion that is deeper than Dynamo goes."""
    return make() if not depth else deep(make, depth - 1)


def called(make: Callable[[], Any]) -> Any:
    """Call a function from code in C, which Dynamo does not see into."""
    return contextvars.copy_context().run(make)
