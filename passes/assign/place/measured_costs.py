"""The cost of a placement in nanoseconds: the calls among which the cut chooses are timed on the device.

The timer belongs to the caller: it is given every distinct call at once, and returns the nanoseconds of each. A call
is an op with its literal arguments, and shapes, strides and dtypes of its tensors, so that equal layers are timed once.

Before: linear(x: f32[4, 8], w), low or FP32?    Asked: linear(bfloat16[4, 8], ...), linear(float32[4, 8], ...)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from ..._torch import OpOverload
from ...contract.devices import DEVICES
from ...contract.timing import Call, Filler, Timer
from ...graph.values import concrete_size
from ...ops import ops
from .costs import ByteCosts, Run, makes_view

ACCURACY = 0.05  # share of a measured time; an FP32 op stays FP32 unless low saves more than this
ROUND_TRIPS = 4  # of a cast; a single one would be lost in the time that a backward takes to start


class MeasuredCosts:
    """Costs in nanoseconds on the present device. Ops that cannot be measured are estimated by their bytes."""

    objective, measured = "takes the least time", True

    def __init__(self, device: str, low: torch.dtype, grad: frozenset[Node], timer: Timer) -> None:
        self.low, self.grad, self.timer = low, grad, timer
        self.bytes, self.speed = ByteCosts(device, grad), DEVICES[device].bytes_per_nanosecond

    def price(self, runs: Sequence[Run], casts: Sequence[Node]) -> tuple[list[int], list[int]]:
        """Time every distinct call once and return the nanoseconds of each."""
        run_calls = [None if makes_view(r.node) else self._run(r) for r in runs]
        cast_calls = [self._cast(n) for n in casts]
        taken = self.timer(list(dict.fromkeys(c for c in (*run_calls, *cast_calls) if c is not None)))
        unknown = {r.node for r, c in zip(runs, run_calls, strict=True) if c not in taken}  # in either dtype
        return (
            [
                self._of_run(r, taken.get(c) if c and r.node not in unknown else None)
                for r, c in zip(runs, run_calls, strict=True)
            ],
            [self._of_cast(n, taken.get(c) if c else None) for n, c in zip(casts, cast_calls, strict=True)],
        )

    def _of_run(self, run: Run, taken: int | None) -> int:
        if taken is None:
            return self.bytes.run(run.node, run.dtype.itemsize) // self.speed
        return int(taken * (1 + ACCURACY)) if run.dtype == self.low else taken

    def _of_cast(self, value: Node, taken: int | None) -> int:
        return self.bytes.cast(value) // self.speed if taken is None else taken // (2 * ROUND_TRIPS)

    def _run(self, run: Run) -> Call | None:
        """Return the call of a node with its operands in the dtypes given; None when an argument is not known."""
        operands = list(ops.operands(run.node))
        if run.node.op == "call_module" or any(o.node.meta.get("val") is None for o in operands):
            return None
        fillers = iter(
            [
                self._filler(o.node.meta["val"], run.operands.get((o.name, o.index)), o.node in self.grad)
                for o in operands
            ]
        )
        args, kwargs = map_arg((run.node.args, dict(run.node.kwargs)), lambda _: next(fillers))
        return _call(run.node.target, args, kwargs)

    def _cast(self, node: Node) -> Call | None:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return None
        return _call(round_trips, (self._filler(value, torch.float32, node in self.grad), self.low), {})

    def _filler(self, value: Any, dtype: Any, grad: bool) -> Any:
        """Return a Filler for a tensor, also inside a container, and for a symbolic number its example value."""
        if isinstance(value, (list, tuple)):
            return [self._filler(v, None, grad) for v in value]
        if isinstance(value, Tensor):
            made = dtype if isinstance(dtype, torch.dtype) else value.dtype
            shape, stride = tuple(map(concrete_size, value.shape)), tuple(map(concrete_size, value.stride()))
            return Filler(shape, stride, made, grad and made.is_floating_point)
        return concrete_size(value)


def round_trips(value: Tensor, low: torch.dtype) -> Tensor:
    """Cast a value down and up again, several times."""
    for _ in range(ROUND_TRIPS):
        value = value.to(low).to(value.dtype)
    return value


def _call(target: Any, args: Any, kwargs: Any) -> Call:
    if isinstance(target, str):
        name, function = f"Tensor.{target}", getattr(Tensor, target)
    else:
        name = str(target) if isinstance(target, OpOverload) else getattr(target, "__qualname__", "?")
        function = target
    given = [*map(_text, args), *(f"{k}={_text(v)}" for k, v in kwargs.items())]
    return Call(f"{name}({', '.join(given)})", function, args, kwargs)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)
