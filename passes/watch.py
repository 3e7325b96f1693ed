"""Watchers that verify, time or print passes; each is called before and after every pass.

Before: fxamp.convert(model, (x,))
After:  with watched(timed := Timed()): fxamp.convert(model, (x,))        timed.seconds: {"legalize": 0.012, ...}
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from .casts.verify import verify
from .form import Ensures, Pass, Unit
from .ops import ops


class Watcher:
    """An object that is called before and after every pass over every graph; it may not change its arguments."""

    def before(self, step: Pass, unit: Unit) -> None:
        """Called before each pass."""

    def after(self, step: Pass, unit: Unit, edits: Mapping[str, int]) -> None:
        """Called after each pass, with how often each of its rewrites was made."""


class Verified(Watcher):
    """Verifies after each pass the properties that the pass ensures."""

    def after(self, step: Pass, unit: Unit, edits: Mapping[str, int]) -> None:
        """Raise VerificationError if a property does not hold."""
        if step.ensures is not Ensures.NOTHING_NEW:
            verify(unit.graph, unit.decided if step.ensures is Ensures.DTYPES else None)


@dataclass
class Timed(Watcher):
    """Adds up how long each pass takes, over all graphs, in seconds by the name of the pass.

    The clock is that of the processor, unless another is given, so that other programs do not count.
    """

    clock: Callable[[], float] = time.process_time
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = 0.0

    def before(self, step: Pass, unit: Unit) -> None:
        """Start the clock."""
        self.started = self.clock()

    def after(self, step: Pass, unit: Unit, edits: Mapping[str, int]) -> None:
        """Stop the clock, and add the time of the pass."""
        self.seconds[step.name] = self.seconds.get(step.name, 0.0) + self.clock() - self.started


@dataclass
class Printed(Watcher):
    """Writes every graph after the pass of a name: a line for each node and its dtype, and how often rewrites fired."""

    name: str
    write: Callable[[str], object]

    def after(self, step: Pass, unit: Unit, edits: Mapping[str, int]) -> None:
        """Write the graph if this is the pass to print."""
        if step.name == self.name:
            fired = ", ".join(f"{rule} {n}" for rule, n in edits.items())
            self.write(f"graph {unit.index} after {step.name}{': ' * bool(fired)}{fired}\n{listing(unit)}\n")


def listing(unit: Unit) -> str:
    """Return a graph as text: a line for each node, with the dtype that its value has been assigned."""
    dtypes = {} if unit.assignment is None else unit.assignment.dtypes
    lines = []
    for node in unit.graph.nodes:
        dtype = dtypes.get(node)
        shown = "" if dtype is None else f": {str(dtype).replace('torch.', '')}"
        what = {"placeholder": "input", "get_attr": str(node.target), "output": "return"}.get(node.op, ops.name(node))
        args = [*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
        call = f"{what}({', '.join(args)})" if node.op.startswith("call") else " ".join([what, *args])
        lines.append(f"  {call}" if node.op == "output" else f"  {node.name}{shown} = {call}")
    return "\n".join(lines)


_WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=(Verified(),))


def watchers() -> tuple[Watcher, ...]:
    """Return the present watchers; verification is always the first of them."""
    return _WATCHERS.get()


@contextlib.contextmanager
def watched(*more: Watcher) -> Iterator[None]:
    """Add these watchers for all passes that run inside this context, in this thread."""
    token = _WATCHERS.set((*_WATCHERS.get(), *more))
    try:
        yield
    finally:
        _WATCHERS.reset(token)
