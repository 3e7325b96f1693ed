"""The cost of a placement, in the unit in which the cut compares casts with running an op in FP32.

ByteCosts      bytes moved, forward and backward, and a launch as so many bytes, by kind of device; the default
UnitCosts      one for every cast, where no sizes are known
MeasuredCosts  nanoseconds on the device at hand; in `measured_costs.py`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.fx import Node

from ...contract.devices import DEVICES
from ...graph.values import concrete_size
from ...ops import ops
from ...ops.rules import row_of


class Run(NamedTuple):
    """One op in one dtype: the node, the dtype, and the dtype of each operand (argument, index)."""

    node: Node
    dtype: torch.dtype
    operands: Mapping[tuple[str, int], Any]


class Costs(Protocol):
    """Costs for one graph; all are requested at once, so that everything to be measured is known beforehand.

    Attributes:
        objective: the phrase by which reasons of decisions describe the optimum, such as "moves the fewest bytes".
        measured: costs are times, not counts of bytes or casts.
    """

    objective: str
    measured: bool

    def price(self, runs: Sequence[Run], casts: Sequence[Node]) -> tuple[list[int], list[int]]:
        """Return the cost of each run of an op, and of a cast of each value: forward, and backward where it flows."""


class ByteCosts:
    """Bytes moved by casts and by ops of one graph, forward and backward.

    A cast reads and writes, as it does in eager. Inductor fuses most casts into the kernels on either side, where they
    cost nothing. With casts at no cost, O2 of one layer of BERT, GPT-2 and Llama moved 0.4, 0.3 and 2.1 % fewer bytes
    in Inductor's graphs, but they summed the residual stream in low. So casts cost the same for eager and Inductor.
    """

    objective, measured = "moves the fewest bytes", False

    def __init__(self, device: str, grad: frozenset[Node]) -> None:
        self.launch = DEVICES[device].launch
        self.grad = grad

    def price(self, runs: Sequence[Run], casts: Sequence[Node]) -> tuple[list[int], list[int]]:
        """Return the bytes that each run, and each cast, moves."""
        return [self.run(r.node, r.dtype.itemsize) for r in runs], [self.cast(n) for n in casts]

    def cast(self, node: Node) -> int:
        """Return the cost of one cast: it reads and writes the value, and in backward its gradient."""
        return (self.launch + 6 * numel(node.meta.get("val"))) * (2 if node in self.grad else 1)

    def run(self, node: Node, size: int) -> int:
        """Return the cost of running an op on elements of `size` bytes; a view moves nothing."""
        if is_view(node):
            return 0
        moved = numel(node.meta.get("val")) + sum(numel(o.node.meta.get("val")) for o in ops.operands(node))
        backward = 2 if node in self.grad and not row_of(node).free_backward else 0
        return size * moved * (1 + backward)


class UnitCosts:
    """A cost of one for every cast, and none for ops: without sizes, the fewest casts are best."""

    objective, measured = "takes the fewest casts", False

    def price(self, runs: Sequence[Run], casts: Sequence[Node]) -> tuple[list[int], list[int]]:
        """Return a cost of one for each cast, and of zero for each op."""
        return [0] * len(runs), [1] * len(casts)


def numel(value: Any) -> int:
    """Return the number of floating elements of a value; symbolic sizes count as in the example inputs."""
    if isinstance(value, Tensor):
        out = 1
        for size in value.shape:
            out *= concrete_size(size)
        return out if value.is_floating_point() else 0
    if isinstance(value, (tuple, list)):
        return sum(numel(v) for v in value)
    return 0


def is_view(node: Node) -> bool:
    """Say whether an op only makes a new view of its operand, always or in most cases."""
    return row_of(node).view or makes_view(node)


def makes_view(node: Node) -> bool:
    """Say whether an op makes a view for all operands."""
    schema = ops.schema_of(node)
    return row_of(node).asks == "item" or (schema is not None and any(r.alias_info is not None for r in schema.returns))
