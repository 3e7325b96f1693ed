"""Which values the low dtype cannot hold: out of its range, too small for it, or positions.

A position is a float computed from integers. BF16 represents integers exactly up to 256, FP16 up to 2048; beyond that
two positions may be equal. Whatever is computed from a position stays FP32 until an op bounds its range: a sine, a
softmax, a norm, or a division that brings it into [-1, 1]. A matrix product with a learned weight rounds it, as under
autocast.

Before: angles = arange(n).float()[:, None] * inv_freq; angles.cos()
After:  the same, angles FP32; cos is free
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...graph.literals import FP32_MAX, has_tiny, is_extreme, numbers
from ...graph.notes import note_of
from ...graph.values import ANY, LOW_DTYPES, Dtypes, ValueDtype, is_floating, mutated_operands
from ...ops import ops
from ...ops.rules import Rule, row_of

_ONE: tuple[tuple[str, ...], ...] = (("float",), ("first",))  # the output is one floating tensor


class Extremes:
    """The known ranges of the values of one graph, learned node by node.

    Attributes:
        values: values that must be read in FP32.
        lowest: those of them that are out of range only because of `finfo(float32).min`, as in the fill of a mask.
        fixed: values computed only from buffers, constants and integers.
        constants: tensors of no dimension that hold a known number.
    """

    def __init__(self, graph: Graph, low: torch.dtype) -> None:
        self.low = low
        self.values: set[Node] = set()
        self.lowest: set[Node] = set()
        self.fixed: set[Node] = set()
        self.constants: dict[Node, float] = {}
        self._tiny: set[Node] = set()  # values such as x + eps, and copies of them, but not 1 / (x + eps)
        self._largest: dict[Node, float] = {}  # the last number of a torch.arange
        for node in graph.nodes:
            held = note_of(node)
            if held.role == "buffer":
                self.fixed.add(node)
            if held.constant is not None:
                self._is_constant(node, held.constant)

    def _is_constant(self, node: Node, number: float) -> None:
        self.constants[node] = number
        if is_extreme(number, self.low):
            self.values.add(node)
            if abs(number) == FP32_MAX:
                self.lowest.add(node)

    def visit(self, node: Node, name: str, row: Rule, dtypes: Dtypes) -> None:
        """Record what is known about the result of a call, from its operands."""
        operands, found = [o.node for o in ops.operands(node)], list(numbers(node))
        passed_on = _passed_on(row, operands)
        if all(n in self.fixed or not (is_floating(dtypes[n]) or dtypes[n] is ANY) for n in operands):
            self.fixed.add(node)
        self._count(node, name, operands, found, passed_on)
        if not is_floating(dtypes[node]) or dtypes[node] in LOW_DTYPES:
            return  # the value is low already, so FP32 would preserve nothing
        number = self._number(node, passed_on, found)
        if number is not None:
            self._is_constant(node, number)
        elif has_tiny(name, found, self.low) or (passed_on and not self._tiny.isdisjoint(operands)):
            self._tiny.add(node)
            self.values.add(node)
        elif not self._is_scaled(name, operands, found):
            passes = bool(passed_on) or row.out in _ONE
            self._range(node, found, operands if passes and not row.bounded else [])
            if row.counts or converts(node, dtypes):
                self.values.add(node)

    def _count(self, node: Node, name: str, operands: list[Node], found: list[float], passed_on: list[Node]) -> None:
        """Learn the last number of a torch.arange."""
        if name == "arange" and not operands and found:
            self._largest[node] = max(map(abs, found))
        self._largest.update((node, self._largest[n]) for n in passed_on if n in self._largest)

    def _number(self, node: Node, passed_on: list[Node], found: list[float]) -> float | None:
        """Return the number that a tensor of no dimension holds, where it is known."""
        if passed_on and passed_on[0] in self.constants:
            return self.constants[passed_on[0]]
        filled = (
            row_of(node).fills
            and not mutated_operands(node)
            and len(found) == 1
            and (_is_scalar(node) or "val" not in node.meta)
        )
        return found[0] if filled else None

    def _range(self, node: Node, found: list[float], passed: list[Node]) -> None:
        """Find values made from literals out of range, or from other values that have such numbers."""
        extreme = [x for x in found if is_extreme(x, self.low)]
        read = [n for n in passed if n in self.values and n not in self._tiny]
        if extreme or read:
            self.values.add(node)
            if all(abs(x) == FP32_MAX for x in extreme) and all(n in self.lowest for n in read):
                self.lowest.add(node)

    def _is_scaled(self, name: str, operands: list[Node], found: list[float]) -> bool:
        """Say whether an op scales a range of numbers into [-1, 1]."""
        largest = self._largest.get(operands[0]) if len(operands) == len(found) == 1 else None
        if largest is None:
            return False
        return (name == "div" and largest <= abs(found[0])) or (name == "mul" and largest * abs(found[0]) <= 1)


def _passed_on(row: Rule, operands: list[Node]) -> list[Node]:
    """Return the operand whose numbers a call returns unchanged."""
    return operands[:1] if row.commutes != "" or row.is_cast else []


def converts(node: Node, dtypes: Dtypes) -> bool:
    """Say whether a float is computed from integers; numbers combined with a low activation are not positions."""
    operands = [o.node for o in ops.operands(node)]
    whole = any(_is_whole(dtypes[n]) and not _is_scalar(n) for n in operands)
    return whole and row_of(node).of_integers and not any(dtypes[n] in LOW_DTYPES for n in operands)


def _is_whole(dtype: ValueDtype) -> bool:
    return isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _is_scalar(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() == 0
