"""The interface of a cost model: what the cut asks the price of, and how it is answered.

The cut chooses in which of two dtypes, low or FP32, each free op runs. A model prices each of them in both, and the
casts that become necessary where an op reads a value in the other dtype.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch.fx import Node

from .errors import PolicyError


class Run(NamedTuple):
    """One op in one dtype: the node, the dtype, and the dtype of each operand (argument, index)."""

    node: Node
    dtype: torch.dtype
    operands: Mapping[tuple[str, int], Any]


@dataclass(frozen=True)
class Candidate:
    """An op that may run in either dtype."""

    low: Run  # the op in the low dtype; likewise `fp32`
    fp32: Run
    grad: frozenset[Node]  # the values of the graph through which gradients flow
    rounds: bool  # in low it rounds a result of its own; an op that only moves values, or a cast, does not
    returned: bool  # its result leaves the graph in FP32, moved on the way or not

    @property
    def node(self) -> Node:
        """The op; `meta["val"]` is a fake tensor with its shape."""
        return self.low.node


class Read(NamedTuple):
    """How an op reads a value."""

    times: int  # how many of its operands the value is
    # The casts of the value and of its gradient that are left where it casts the value up by itself; else None.
    left: tuple[int, int] | None


@dataclass(frozen=True)
class PricedNet:
    """A value and its readers, which share a cast of it; casts up and casts down are priced separately."""

    value: Hashable  # what is cast
    readers: tuple[Hashable, ...]  # which pay together if they need the other dtype
    up: int  # the price of the casts to FP32, where the value is low
    down: int  # that of the casts to low, where it is FP32
    # For each reader what it pays if it casts the value up by itself; None if it does not. Readers that do pay this, or
    # `up` together if that is less.
    alone: tuple[int | None, ...] = ()
    # What is read is FP32, whatever dtype the value is stored in: the cast of an output that is handed out.
    wide: bool = False

    def times(self, factor: int) -> PricedNet:
        """Return the net at so many times its price."""
        alone = tuple(None if n is None else n * factor for n in self.alone)
        return replace(self, up=self.up * factor, down=self.down * factor, alone=alone)

    def cost(self, low: Container[Hashable]) -> int:
        """Return what its casts cost, given all that is low."""
        is_low = self.value in low
        other = [i for i, reader in enumerate(self.readers) if (reader in low) != is_low]
        if not is_low or not other:
            return self.down if other else 0
        alone = [self.alone[i] if self.alone else None for i in other]
        return min(self.up, sum(x for x in alone if x is not None)) if None not in alone else self.up


@dataclass(frozen=True)
class Net:
    """The reads of a value that share its casts, as the emitted graph does."""

    value: Node  # what is cast; an input, a parameter or the result of an op
    reads: Mapping[Node, Read]  # who reads it, and how
    # How many casts there are of the value, and of its gradient, if a reader needs the other dtype.
    casts: tuple[int, int]
    low: torch.dtype  # the low dtype
    grad: bool  # gradients flow through the value
    runs: tuple[int, int] = (1, 1)  # how often the value is cast, and its gradient, in the time that prices are for
    wide: bool = False  # the reads are of the FP32 in which an output is handed out, also where the value is low

    def at(self, forward: int, backward: int) -> PricedNet:
        """Return the net at the price of one cast of the value, and of one of its gradient."""
        forward, backward = forward * self.runs[0], backward * self.runs[1]
        total = forward * self.casts[0] + backward * self.casts[1]
        lefts = [read.left for read in self.reads.values()]
        alone = tuple(None if n is None else forward * n[0] + backward * n[1] for n in lefts)
        return PricedNet(self.value, tuple(self.reads), total, total, alone, self.wide)


@dataclass(frozen=True)
class Prices:
    """The answer of a cost model: integers of at least 0, in any unit, but all in the same."""

    nodes: Sequence[tuple[int, int]]  # for each op, in order, what it costs in low and in FP32
    nets: Sequence[PricedNet]  # what casts cost; of the values asked for, and of readers of these
    # Nanoseconds that were measured for it, by key of the call.
    timings: Mapping[str, int] = field(default_factory=dict)

    def times(self, factor: int) -> Prices:
        """Return all prices in a unit that is so much smaller."""
        nodes = [(low * factor, fp32 * factor) for low, fp32 in self.nodes]
        return replace(self, nodes=nodes, nets=[net.times(factor) for net in self.nets])


class CostModel(Protocol):
    """Says what the ops and casts among which the cut chooses cost."""

    @property
    def objective(self) -> str:
        """The phrase by which reasons describe the cheapest placement, such as "moves the fewest bytes"."""

    def price(self, nodes: Sequence[Candidate], nets: Sequence[Net]) -> Prices:
        """Price everything in one graph at once."""


def priced(costs: CostModel, nodes: Sequence[Candidate], nets: Sequence[Net]) -> Prices:
    """Return the prices of a cost model.

    Raises:
        PolicyError: they are not one pair of integers of at least 0 for each node, and one for each net of these reads.
    """
    prices, name = costs.price(nodes, nets), type(costs).__name__
    if len(prices.nodes) != len(nodes):
        raise PolicyError(f"{name} prices {len(prices.nodes)} of {len(nodes)} nodes: each has a pair, low and FP32.")
    reads = {(net.value, reader) for net in nets for reader in net.reads}
    numbers: list[tuple[Any, Sequence[Any]]] = [(n.node, p) for n, p in zip(nodes, prices.nodes, strict=True)]
    for net in prices.nets:
        if strange := [r for r in net.readers if (net.value, r) not in reads]:
            raise PolicyError(f"{name} prices a read of {net.value} by {strange[0]}, which it was not asked for.")
        numbers.append((net.value, (net.up, net.down, *(n for n in net.alone if n is not None))))
    for node, of in numbers:
        for number in of:
            if type(number) is not int or number < 0:
                raise PolicyError(f"{name} prices {node} at {number!r}: a price is an integer of at least 0.")
    return prices
