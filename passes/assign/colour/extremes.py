"""Which values the low dtype cannot hold: out of its range, too small for it, or positions.

A position is a float computed from integers. BF16 represents integers exactly up to 256, FP16 up to 2048; beyond that
two positions may be equal. Whatever is computed from a position stays FP32 until an op bounds its range: a sine, a
softmax, a norm, or a division that brings it into [-1, 1]. A matrix product with a learned weight rounds it, as under
autocast.

Before: angles = arange(n).float()[:, None] * inv_freq; angles.cos()
After:  the same, angles FP32; cos is free
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Node

from ...graph.aliases import mutated_operands
from ...graph.notes import note_of
from ...graph.values import LOW_DTYPES, Dtypes, is_floating
from ...ops import ops
from ...ops.numbers import Number, has_tiny, is_extreme, is_lowest, numbers, within
from ...ops.rules import Rule, row_of


class Extremes:
    """The known ranges of the values of one graph, learned node by node."""

    def __init__(self, low: torch.dtype) -> None:
        self.low = low
        self.values: set[Node] = set()  # those that must be read in FP32
        self.lowest: set[Node] = set()  # those of them beyond the range only by `finfo(float32).min`, as of a mask
        self.fixed: set[Node] = set()  # those computed only from buffers, constants and integers
        self.constants: dict[Node, Number] = {}  # tensors of no dimension that hold a known number
        self.unknown: set[Node] = set()  # those of which nothing can be asked, as what NumPy's numbers become
        self.ranges: dict[Node, tuple[str, ...]] = {}  # the buffers that put a value there, as "mask: -1e+09"
        self._tiny: set[Node] = set()  # values such as x + eps, and copies of them, but not 1 / (x + eps)
        self._ends: dict[Node, list[Number]] = {}  # the numbers of a torch.arange

    def hold(self, node: Node) -> None:
        """Record what is noted on a value that no call of the graph makes."""
        note = note_of(node)
        if note.role == "number":
            self.unknown.add(node)
        if note.role == "buffer":
            self.fixed.add(node)
        if note.constant is not None:
            self._is_constant(node, note.constant)
            self.ranges[node] = (f"{node.target}: {note.constant:g}",) if node in self.values else ()

    def _is_constant(self, node: Node, number: Number) -> None:
        self.constants[node] = number
        if is_extreme(number, self.low):
            self.values.add(node)
            if is_lowest(number):
                self.lowest.add(node)

    def visit(self, node: Node, row: Rule, dtypes: Dtypes) -> None:
        """Record what is known about the result of a call, from its operands."""
        operands, literals = [o.node for o in ops.operands(node)], list(numbers(node))
        moved = operands[:1] if row.commutes != "" or row.is_cast else []  # whose numbers it returns unchanged
        if all(n in self.fixed or not is_floating(dtypes[n]) for n in operands):
            self.fixed.add(node)
        if row.counts and not operands and literals:
            self._ends[node] = literals
        self._ends.update((node, self._ends[n]) for n in moved if n in self._ends)
        if not is_floating(dtypes[node]) or dtypes[node] in LOW_DTYPES:
            return  # the value is low already, so FP32 would preserve nothing
        filled = row.fills and not mutated_operands(node) and len(literals) == 1 and is_scalar(node)
        number = self.constants.get(moved[0]) if moved else None
        if number is not None or filled:
            self._is_constant(node, literals[0] if number is None else number)
        elif (
            has_tiny(row, literals, self.low)
            or not self.unknown.isdisjoint(operands)
            or (moved and not self._tiny.isdisjoint(operands))
        ):
            self._tiny.add(node)
            self.values.add(node)
        elif not self._is_scaled(row, operands, literals):
            passes = bool(moved) or row.out in (("float",), ("first",))  # its output is one floating tensor
            self._range(node, literals, operands if passes and not row.bounded else [])
            if row.counts or converts(node, dtypes):
                self.values.add(node)
        if node in self.values:
            self.ranges[node] = self.ranges_of(operands)

    def ranges_of(self, values: Iterable[Node]) -> tuple[str, ...]:
        """Return what buffers hold that makes some of these values extreme, each once."""
        return tuple(dict.fromkeys(text for n in values for text in self.ranges.get(n, ())))

    def _range(self, node: Node, literals: list[Number], passed: list[Node]) -> None:
        """Find values made from literals out of range, or from other values that have such numbers."""
        extreme = [x for x in literals if is_extreme(x, self.low)]
        read = [n for n in passed if n in self.values and n not in self._tiny]
        if extreme or read:
            self.values.add(node)
            if all(map(is_lowest, extreme)) and all(n in self.lowest for n in read):
                self.lowest.add(node)

    def _is_scaled(self, row: Rule, operands: list[Node], literals: list[Number]) -> bool:
        """Say whether an op scales a range of numbers into [-1, 1]."""
        ends = self._ends.get(operands[0]) if len(operands) == len(literals) == 1 else None
        if ends is None:
            return False
        scales = "quotient" in row.in_norm and within(ends, literals[0])
        return scales or ("product" in row.in_norm and within(ends, literals[0], inverse=True))


def converts(node: Node, dtypes: Dtypes) -> bool:
    """Say whether a float is computed from integers; numbers combined with a low activation are not positions."""
    operands = [(n, d) for n in (o.node for o in ops.operands(node)) if isinstance(d := dtypes[n], torch.dtype)]
    whole = any(not (d.is_floating_point or d.is_complex or d == torch.bool) and not is_scalar(n) for n, d in operands)
    return whole and row_of(node).of_integers and not any(d in LOW_DTYPES for _, d in operands)


def is_scalar(node: Node) -> bool:
    """Say whether a value is a tensor of no dimension."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() == 0
