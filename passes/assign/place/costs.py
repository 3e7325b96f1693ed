"""The cost of a placement, in the unit in which the cut compares casts with running an op in FP32.

ByteCosts      bytes moved, forward and backward, and a launch as so many bytes, by kind of device; the default
MeasuredCosts  nanoseconds on the device at hand: the calls among which the cut chooses are timed

The timer belongs to the caller: it is given every distinct call at once, and returns the nanoseconds of each. A call
is an op with its literal arguments, and shapes, strides and dtypes of its tensors, so that equal layers are timed once.

Before: linear(x: f32[4, 8], w), low or FP32?    Asked: linear(bfloat16[4, 8], ...), linear(float32[4, 8], ...)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from ..._torch import OpOverload
from ...contract.costs import Call, Filler, Timer
from ...contract.devices import DEVICES
from ...graph.values import concrete_size
from ...ops import ops
from ...ops.rules import row_of

ACCURACY = 0.05  # share of a measured time; an FP32 op stays FP32 unless low saves more than this
ROUND_TRIPS = 4  # of a cast; a single one would be lost in the time that a backward takes to start


class Run(NamedTuple):
    """One op in one dtype: the node, the dtype, and the dtype of each operand (argument, index)."""

    node: Node
    dtype: torch.dtype
    operands: Mapping[tuple[str, int], Any]


class ByteCosts:
    """Bytes moved by casts and by ops of one graph, forward and backward.

    A cast reads and writes, as it does in eager. Inductor fuses most casts into the kernels on either side, where they
    cost nothing. With casts at no cost, O2 of one layer of BERT, GPT-2 and Llama moved 0.4, 0.3 and 2.1 % fewer bytes
    in Inductor's graphs, but they summed the residual stream in low. So casts cost the same for eager and Inductor.

    Attributes:
        objective: the phrase by which reasons of decisions describe the optimum.
        measured: costs are times, not counts of bytes.
    """

    objective, measured = "moves the fewest bytes", False

    def __init__(self, device: str, grad: frozenset[Node]) -> None:
        self.launch = DEVICES[device].launch
        self.grad = grad

    def price(self, runs: Sequence[Run], casts: Sequence[Node]) -> tuple[list[int], list[int]]:
        """Return the cost of each run of an op, and of a cast of each value: forward, and backward where it flows.

        All are asked for at once, so that everything to be measured is known beforehand.
        """
        return [self.run(r.node, r.dtype.itemsize) for r in runs], [self.cast(n) for n in casts]

    def cast(self, node: Node) -> int:
        """Return the bytes of one cast: it reads and writes the value, and in backward its gradient."""
        return (self.launch + 6 * numel(node.meta.get("val"))) * (2 if node in self.grad else 1)

    def run(self, node: Node, size: int) -> int:
        """Return the bytes of running an op on elements of `size` bytes; a view moves nothing, a cast is no op."""
        if row_of(node).view or makes_view(node) or row_of(node).is_cast:
            return 0
        moved = numel(node.meta.get("val")) + sum(numel(o.node.meta.get("val")) for o in ops.operands(node))
        backward = 2 if node in self.grad and not row_of(node).free_backward else 0
        return size * moved * (1 + backward)


class MeasuredCosts(ByteCosts):
    """Costs in nanoseconds on the present device. Ops that cannot be measured are estimated by their bytes."""

    objective, measured = "takes the least time", True

    def __init__(self, device: str, low: torch.dtype, grad: frozenset[Node], timer: Timer) -> None:
        super().__init__(device, grad)
        self.low, self.timer, self.speed = low, timer, DEVICES[device].bytes_per_nanosecond

    def price(self, runs: Sequence[Run], casts: Sequence[Node]) -> tuple[list[int], list[int]]:
        """Time every distinct call once and return the nanoseconds of each."""
        run_calls = [None if makes_view(r.node) or row_of(r.node).is_cast else self._run_call(r) for r in runs]
        cast_calls = [self._cast_call(n) for n in casts]
        times = self.timer(list(dict.fromkeys(c for c in (*run_calls, *cast_calls) if c is not None)))
        unknown = {r.node for r, c in zip(runs, run_calls, strict=True) if c not in times}  # in either dtype
        of_runs, of_casts = [], []
        for r, call in zip(runs, run_calls, strict=True):
            if call is None or r.node in unknown:
                of_runs.append(self.run(r.node, r.dtype.itemsize) // self.speed)
            else:
                of_runs.append(int(times[call] * (1 + ACCURACY)) if r.dtype == self.low else times[call])
        for value, call in zip(casts, cast_calls, strict=True):
            known = call is not None and call in times
            of_casts.append(times[call] // (2 * ROUND_TRIPS) if known else self.cast(value) // self.speed)  # type: ignore[index]
        return of_runs, of_casts

    def _run_call(self, run: Run) -> Call | None:
        """Return the call of a node with its operands in the dtypes given; None when an argument is not known."""
        operands = list(ops.operands(run.node))
        if run.node.op == "call_module" or any(o.node.meta.get("val") is None for o in operands):
            return None
        fillers = [self._filler(o.node.meta["val"], run.operands.get(o.place), o.node in self.grad) for o in operands]
        inputs = iter(fillers)
        args, kwargs = map_arg((run.node.args, dict(run.node.kwargs)), lambda _: next(inputs))
        return _call(run.node.target, args, kwargs)

    def _cast_call(self, node: Node) -> Call | None:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return None
        return _call(round_trips, (self._filler(value, torch.float32, node in self.grad), self.low), {})

    def _filler(self, value: Any, dtype: Any, grad: bool) -> Any:
        """Return a Filler for a tensor, also inside a container, and for a symbolic number its example value."""
        if isinstance(value, (list, tuple)):
            return [self._filler(v, None, grad) for v in value]
        if not isinstance(value, Tensor):
            return concrete_size(value)
        dtype = dtype if isinstance(dtype, torch.dtype) else value.dtype
        shape, stride = tuple(map(concrete_size, value.shape)), tuple(map(concrete_size, value.stride()))
        return Filler(shape, stride, dtype, grad and dtype.is_floating_point)


def round_trips(value: Tensor, low: torch.dtype) -> Tensor:
    """Cast a value down and up again, several times."""
    for _ in range(ROUND_TRIPS):
        value = value.to(low).to(value.dtype)
    return value


def _call(target: Any, args: Any, kwargs: Any) -> Call:
    function = getattr(Tensor, target) if isinstance(target, str) else target
    name = getattr(target, "__qualname__", "?")
    if isinstance(target, (str, OpOverload)):
        name = f"Tensor.{target}" if isinstance(target, str) else str(target)
    words = [*map(_text, args), *(f"{k}={_text(v)}" for k, v in kwargs.items())]
    return Call(f"{name}({', '.join(words)})", function, args, kwargs)


def _text(value: Any) -> str:
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, (list, tuple)) else str(value)


def numel(value: Any) -> int:
    """Return the number of floating elements of a value; symbolic sizes count as in the example inputs."""
    if isinstance(value, (tuple, list)):
        return sum(numel(v) for v in value)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return 0
    return math.prod(concrete_size(size) for size in value.shape)


def makes_view(node: Node) -> bool:
    """Say whether an op makes a view for all operands."""
    schema = ops.schema_of(node)
    return row_of(node).asks == "item" or (schema is not None and any(r.alias_info is not None for r in schema.returns))
