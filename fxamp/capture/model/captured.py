"""The result of a capture: one flat graph, and the states of the model that it holds for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from passes.contract.errors import CaptureError

from .call import CallSpec
from .reads import Reads


@dataclass(frozen=True)
class Autocast:
    """The `torch.autocast` to capture under.

    Attributes:
        device: the device of the model's tensors, whose autocast it is.
        dtype: its low dtype.
        wanted: the device that the model is converted for.
    """

    device: str
    dtype: torch.dtype
    wanted: str

    @property
    def oracle(self) -> bool:
        """Whether its dtypes are those of the device that the model is converted for."""
        return self.device == self.wanted

    def context(self) -> torch.autocast:
        """Return the context manager, without autocast's cache, which would keep fake copies of the weights."""
        return torch.autocast(self.device, self.dtype, cache_enabled=False)


@dataclass(frozen=True)
class State:
    """The states of a model that a graph is valid for.

    Attributes:
        flags: the training flag that each module has, by path; None for a graph that follows every flag.
        grad: whether gradients are on; None where that makes no difference.
    """

    flags: Mapping[str, bool] | None = None
    grad: bool | None = None

    def __str__(self) -> str:
        words = []
        if self.flags is not None:
            kinds = set(self.flags.values())
            words.append("mixed training flags" if len(kinds) > 1 else "training" if True in kinds else "evaluation")
        if self.grad is not None:
            words.append("with gradients" if self.grad else "without gradients")
        return " ".join(words) or "every state"


@dataclass(frozen=True, eq=False)
class Captured:
    """A flat graph, and the values of its get_attr and call_module targets that the model does not hold.

    A stage that adds something returns a new one. The graph itself is changed in place when it is compiled: `copied`
    gives one for each time.

    Attributes:
        graph: the graph to compile. Its values have the dtypes that the model gives without autocast; what autocast
            says of them is in their meta (`relate.py`).
        call: how arguments bind to it.
        front_end: "fx" or "export".
        opaque: modules that stay as they are, by path.
        constants: tensors and inner graphs that were lifted, by name.
        notes: sentences for the plan.
        state: the states of the model that it holds for.
        without: the capture without autocast, if `graph` was captured under autocast because the ops differ.
        plain: whether the model runs without autocast too; if not, results cannot be compared, and O0 is refused.
        grad_reads: lines where the program read the grad mode.
        model: what was captured.
        left: names of the other state that forward() changed, as `snapshot.py` names it.
        again: those of them that forward() may read in its next call.
    """

    graph: Graph
    call: CallSpec
    front_end: str
    opaque: Mapping[str, nn.Module] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    state: State = field(default_factory=State)
    without: Captured | None = None
    plain: bool = True
    grad_reads: tuple[str, ...] = ()
    model: nn.Module = field(default_factory=nn.Module)
    left: tuple[str, ...] = ()
    again: tuple[str, ...] = ()

    def noting(self, *more: str) -> Captured:
        """Return the capture with more notes."""
        return replace(self, notes=(*self.notes, *more))

    @property
    def unrounded(self) -> Captured:
        """Return the capture that computes what the model computes without autocast."""
        return self if self.without is None else self.without


@dataclass(frozen=True, eq=False)
class Captures:
    """All graphs of a model.

    Attributes:
        graphs: one for each state in which the model computes something different, that of its present state first.
        missing: the states that could not be captured, and why.
        reads: what forward() read of the model, in any of them.
    """

    graphs: tuple[Captured, ...]
    missing: tuple[tuple[State, str], ...] = ()
    reads: Reads = field(default_factory=Reads)


def as_inputs(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Normalise example inputs; None when there are none."""
    if args is None and kwargs is None:
        return None
    if isinstance(args, torch.Tensor):
        args = (args,)
    if args is None:
        args = ()
    if not isinstance(args, (tuple, list)):
        way_out = "pass kwargs=" if isinstance(args, Mapping) else "write (x,) for one input"
        raise CaptureError(f"args is a tuple of example inputs, not {type(args).__name__}; {way_out}.")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise CaptureError(f"kwargs is a dict of example inputs, not {type(kwargs).__name__}.")
    return tuple(args), dict(kwargs or {})
