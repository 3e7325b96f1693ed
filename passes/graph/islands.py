"""From O2 on: find norms and softmaxes written by hand, each an FP32 island with low inputs and outputs.

An island is a value divided by a statistic of itself. It begins after the last value that both sides of the division
share, and ends with the quotient. Everything between is FP32, since a sum of squares may overflow FP16, and subtracting
a rounded mean does not centre the value.

Before: y = x * rsqrt(mean(pow(x, 2)) + eps); mul(weight, y)
After:  the same over to(x, f32), in FP32; mul(to(weight, bf16), to(y, bf16))
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TypeGuard

from torch.fx import Graph, Node

from ..ops import ops
from ..ops.numbers import is_negative
from ..ops.rules import row_of

_LONGEST = 64  # maximum number of nodes to search; no norm has as many


def islands(graph: Graph) -> frozenset[Node]:
    """Return the nodes of all islands: norms written by hand, which run in FP32 as a whole."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    inside: set[Node] = set()
    for node in graph.nodes:
        for value, divisor in _quotients(node):
            inside |= _island(order, node, value, divisor)
    return frozenset(inside)


def _quotients(node: Node) -> Iterator[tuple[Node, Node]]:
    """Yield (value, divisor) for each way to read a call as a quotient: x / y, x * (1 / y), x - log(y)."""
    if not _is(node, "quotient", "product", "difference"):
        return
    first, second = (*node.args, None, None)[:2]
    if not _is_value(first) or not _is_value(second):
        return
    if _is(node, "quotient") or _inverts(second, node):
        yield first, second
    if _is(node, "product") and _inverts(first, node):
        yield second, first


def _is(node: Node, *parts: str) -> bool:
    """Say whether a call may be one of these parts of a norm."""
    return not {*parts}.isdisjoint(row_of(node).in_norm)


def _inverts(node: Node, end: Node) -> bool:
    """Say whether an operand of `end` is a reciprocal; of a difference, whether it is a logarithm."""
    while _is_move(node) or row_of(node).is_cast or (_is(node, "product") and len(ops.inputs(node)) == 1):
        node = ops.inputs(node)[0]  # its one tensor, which may follow a number
    if _is(end, "difference"):
        return _is(node, "logarithm")
    if _is(node, "quotient"):
        return not _is_value(node.args[0])
    return _is(node, "reciprocal") or (_is(node, "power") and is_negative(node.args[1]))


def _is_move(node: Node) -> bool:
    row = row_of(node)
    moves = row.commutes != "" and not row.in_norm
    return moves and bool(node.args) and _is_value(node.args[0])


def _is_value(argument: object) -> TypeGuard[Node]:
    """Say whether an argument of a call is a value of the graph, and no number."""
    return isinstance(argument, Node) and not ops.is_number(argument)


def _island(order: dict[Node, int], end: Node, value: Node, divisor: Node) -> set[Node]:
    """Return the nodes from the common inputs of value and divisor to their quotient; none if it is not a norm."""
    sides: dict[Node, set[Node]] = {value: {value}}
    sides.setdefault(divisor, set()).add(divisor)
    latest = [(-order[n], n) for n in sides]
    heapq.heapify(latest)
    common: list[Node] = []
    visited: list[Node] = []
    while latest and len(visited) < _LONGEST:
        node = heapq.heappop(latest)[1]
        if len(sides[node]) == 2 and _size(node) == _size(value):  # a smaller one is a statistic that both read
            common.append(node)
        elif _is(node, "arithmetic", "statistic") or _is_move(node):
            visited.append(node)
            for operand in ops.inputs(node):
                if operand not in sides:
                    heapq.heappush(latest, (-order[operand], operand))
                sides.setdefault(operand, set()).update(sides[node])
    inside = set(common)
    for node in reversed(visited):
        if any(n in inside for n in node.all_input_nodes):
            inside.add(node)
    inside -= set(common)
    statistics = [n for n in inside if _is(n, "statistic") and divisor in sides[n]]
    if not statistics:
        return set()
    for node in common:
        inside |= _before(order, node)
    return inside | {end}


def _before(order: dict[Node, int], node: Node) -> set[Node]:
    """Return the nodes of an island before the value that is divided: an exponential, and ops that centre the value."""
    inside: set[Node] = set()
    if _is(node, "exponential") and _is_value(node.args[0]):
        inside, node = {node}, node.args[0]
    if _is(node, "difference") and all(map(_is_value, node.args[:2])):
        inside |= _island(order, node, *node.args[:2])  # type: ignore[arg-type]
    return inside


def _size(node: Node) -> tuple[int, ...] | None:
    shape = getattr(node.meta.get("val"), "shape", None)
    return tuple(shape) if shape is not None else None
