"""Cost models for the cut of the compiler, beside its own, which counts bytes.

MeasuredCosts  nanoseconds on the device at hand: the calls among which the cut chooses are timed
Penalties      other costs, and the errors of roundings

The timer is given every distinct call of a graph at once, and returns the nanoseconds of each. A call is an op with its
literal arguments, and shapes, strides and dtypes of its tensors, so that equal layers are timed once.

Before: linear(x: f32[4, 8], w), low or FP32?    Asked: linear(bfloat16[4, 8], ...), linear(float32[4, 8], ...)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from passes import ByteCosts
from passes._torch import OpOverload
from passes.contract.costs import Candidate, CostModel, Net, PricedNet, Prices, Run, priced
from passes.contract.devices import DEVICES
from passes.contract.policy import dtype_name
from passes.graph.aliases import makes_view
from passes.graph.values import concrete_size, keys
from passes.ops import ops
from passes.ops.rules import row_of

ACCURACY = 0.05  # share of a measured time; an FP32 op stays FP32 unless low saves more than this
PARTS = 1024  # of a unit, in which penalties are added: most are smaller than a byte
ROUND_TRIPS = 4  # of a cast; a single one would be lost in the time that a backward takes to start


@dataclass(frozen=True)
class Filler:
    """A tensor to run an op on; it has strides, since the time of an op depends on them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        """Write it short: `float32[4, 8]/[8, 1]`, with a `'` where gradients flow."""
        name = dtype_name(self.dtype)
        return f"{name}{list(self.shape)}/{list(self.stride)}{chr(39) * self.requires_grad}"


@dataclass(frozen=True)
class Call:
    """One call to be timed, forward and backward.

    Attributes:
        key: all that its time depends on, apart from the machine, as text; calls with equal keys take equally long.
        args: its arguments, with a Filler for every tensor; likewise `kwargs`.
    """

    key: str
    function: Callable[..., Any] = field(compare=False)
    args: Any = field(compare=False)
    kwargs: Any = field(compare=False)


# Gives the nanoseconds of each call, forward and backward together; leaves out those that cannot run.
Timer = Callable[[Sequence[Call]], Mapping[Call, int]]


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs in nanoseconds on the present device. Ops that cannot be measured are estimated by their bytes.

    Attributes:
        timer: measures calls; it is given every distinct call of a graph at once.
    """

    device: str
    timer: Timer
    objective = "takes the least time"

    def price(self, nodes: Sequence[Candidate], nets: Sequence[Net]) -> Prices:
        """Time every distinct call once and return the nanoseconds of each."""
        timed = [n for n in nodes if not makes_view(n.node) and not row_of(n.node).is_cast]
        runs = {n.node: [_run_call(run, n.grad) for run in (n.low, n.fp32)] for n in timed}
        casts = [_cast_call(net) for net in nets]
        calls = [*itertools.chain.from_iterable(runs.values()), *casts]
        times = self.timer(list(dict.fromkeys(c for c in calls if c is not None)))
        estimate, speed = ByteCosts(self.device), DEVICES[self.device].bytes_per_nanosecond
        of_nodes, of_nets = list[tuple[int, int]](), list[PricedNet]()
        for n in nodes:
            low, fp32 = (None if call is None else times.get(call) for call in runs.get(n.node, (None, None)))
            if low is None or fp32 is None:  # in either dtype
                of_nodes.append((estimate.run(n.low, n.grad) // speed, estimate.run(n.fp32, n.grad) // speed))
            else:
                of_nodes.append((int(low * (1 + ACCURACY)), fp32))
        for net, call in zip(nets, casts, strict=True):
            both = 1 + net.grad
            taken = None if call is None else times.get(call)
            cost = both * estimate.cast(net.value) // speed if taken is None else taken // (2 * ROUND_TRIPS)
            of_nets.append(net.at(cost - cost // 2 * net.grad, cost // 2))
        return Prices(of_nodes, of_nets, {call.key: taken for call, taken in times.items()})


@dataclass(frozen=True)
class Penalties:
    """Adds to other costs what each rounding costs, in their unit.

    Attributes:
        costs: the others.
        values: by key of a node: rounding its result.
        casts: by key of a reader and of what it reads: the cast down of an FP32 value, for this reader alone. An input
            of a graph has its name for a key.
    """

    costs: CostModel
    values: Mapping[str, float]
    casts: Mapping[tuple[str, str], float]

    @property
    def objective(self) -> str:
        """That of the other costs."""
        return self.costs.objective

    def price(self, nodes: Sequence[Candidate], nets: Sequence[Net]) -> Prices:
        """Return the other prices and the penalties, all of them in parts of a unit."""
        prices = priced(self.costs, nodes, nets).times(PARTS)
        names = keys(nodes[0].node.graph.nodes)
        of_nodes = [
            (low + n.rounds * round(self.values.get(names[n.node], 0.0) * PARTS), fp32)
            for n, (low, fp32) in zip(nodes, prices.nodes, strict=True)
        ]
        reads = {(net.value, reader): read.times for net in nets for reader, read in net.reads.items()}
        of_reads = [
            PricedNet(value, (reader,), 0, charge)
            for (value, reader), n in reads.items()
            if (charge := n * round(self.casts.get((names.get(reader, ""), names.get(value, value.name)), 0.0) * PARTS))
        ]
        return replace(prices, nodes=of_nodes, nets=[*prices.nets, *of_reads])


def _run_call(run: Run, grad: frozenset[Node]) -> Call | None:
    """Return the call of an op with its operands in the dtypes given; None when an argument is not known."""
    operands = list(ops.operands(run.node))
    if run.node.op == "call_module" or any(o.node.meta.get("val") is None for o in operands):
        return None
    fillers = [_filler(o.node.meta["val"], run.operands.get(o.place), o.node in grad) for o in operands]
    inputs = iter(fillers)
    args, kwargs = map_arg((run.node.args, dict(run.node.kwargs)), lambda _: next(inputs))
    return _call(run.node.target, args, kwargs)


def _cast_call(net: Net) -> Call | None:
    value = net.value.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    return _call(round_trips, (_filler(value, torch.float32, net.grad), net.low), {})


def _filler(value: Any, dtype: Any, grad: bool) -> Any:
    """Return a Filler for a tensor, also inside a container, and for a symbolic number its example value."""
    if isinstance(value, (list, tuple)):
        return [_filler(v, None, grad) for v in value]
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
