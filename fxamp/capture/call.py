"""The call of a view that is under way in a thread: what is called, why, and which of its graphs have run."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import nn


@dataclass(slots=True)
class Call:
    """One call of a view.

    Attributes:
        model: the model that runs: the view's, or a twin of it that is checked.
        code: the code object in whose frame the model is called; further out lies what does not belong to this call.
        does: "run"; "capture", where a graph of the whole call is captured and does not run; "first graph", where none
            runs; or "compare", where captured graphs run unconverted.
        outer: the call of another view in whose model this one is made.
        on_twin: `model` is a copy of the view's.
        nests: it counts as a region of autocast, so that its end, and no region inside, empties autocast's cache.
        ran: the numbers of the graphs with ops that ran, in order.
        whole: the graph that ran has all of the call.
        idle: of each graph without ops that ran, where and why Dynamo ended it early; "" where it did not.
        again: why frames were captured again, in Dynamo's words.
        refused: the code of the model that Python ran and that can compute, each with its place and the cause.
        attempted: the code that was refused in the call, or before it.
        read: the low values with gradients, by identity, that something else was computed from behind them.
        own: what graphs made low, by identity, and whether it is low without autocast too.
        made: what the graphs that ran have given, where one is not the whole of the call.
        low: casts of weights that several graphs read, or one repeatedly, each with what the weight was then.
        lock: what keeps other threads from their first call, until one graph has run.
        marked: the inputs of which dimension 0 was marked, to be a symbol.
        modes: dispatch modes that are off while Dynamo captures, and on while graphs run.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    code: CodeType
    does: str = "run"
    outer: Call | None = None
    on_twin: bool = False
    nests: bool = False
    ran: list[int] = field(default_factory=list)
    whole: bool = False
    idle: list[str] = field(default_factory=list)
    again: dict[str, None] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    attempted: set[CodeType] = field(default_factory=set)
    read: dict[int, torch.Tensor] = field(default_factory=dict)
    own: dict[int, tuple[torch.Tensor, bool]] = field(default_factory=dict)
    made: list[weakref.ref[Any]] = field(default_factory=list)
    low: dict[Any, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    modes: list[Any] = field(default_factory=list)
    lock: Any = None
    marked: list[torch.Tensor] = field(default_factory=list)

    def unlock(self) -> None:
        """Let other threads make their first call: what they would capture again is captured, or never will be."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def forget_casts_of(self, weight: torch.Tensor) -> None:
        """Have a weight that a graph has written be cast again; no version shows a write through `.data`."""
        self.low = {key: value for key, value in self.low.items() if key[0] != id(weight)}


class _OfThread(threading.local):
    """The call under way in a thread, and how many graphs have run in it."""

    call: Call | None = None
    graphs = 0


_THREAD = _OfThread()


def current() -> Call | None:
    """Return the call under way in this thread, None outside of all calls."""
    return _THREAD.call


def begin(call: Call | None) -> Call | None:
    """Make this the call under way; return the one before, with which to begin when it ends."""
    before, _THREAD.call = _THREAD.call, call
    return before


def count_graph() -> None:
    """Note that a graph runs in this thread."""
    _THREAD.graphs += 1


def graphs_run() -> int:
    """Return how many graphs have run in this thread."""
    return _THREAD.graphs
