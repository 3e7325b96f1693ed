"""The call of a view that is under way in a thread: what is called, why, and which of its graphs have run."""

from __future__ import annotations

import threading
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
        does: "run"; "capture", where graphs are captured and none of them runs; or "compare", where captured graphs run
            unconverted.
        ran: the numbers of the graphs that ran, in order; -1 for one without an op.
        read: the low values with gradients, by identity, that something else was computed from behind them.
        modes: dispatch modes that are off while Dynamo captures, and on while graphs run.
        regions: how many autocast regions are round the model's code; what is deeper in lies in one of the model's own.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    code: CodeType
    does: str = "run"
    ran: list[int] = field(default_factory=list)
    read: dict[int, torch.Tensor] = field(default_factory=dict)
    modes: list[Any] = field(default_factory=list)
    regions: int = 0


_CALLS = threading.local()


def regions_entered() -> int:
    """Return how many autocast regions this thread is in, for whatever device."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def current() -> Call | None:
    """Return the call under way in this thread, None outside of all calls."""
    return getattr(_CALLS, "call", None)


def begin(call: Call | None) -> Call | None:
    """Make this the call under way; return the one before, with which to begin when it ends."""
    before, _CALLS.call = getattr(_CALLS, "call", None), call
    return before
