"""From O2 on: a downcast that autocast would not make keeps within the range of the low dtype.

The values that it may change are those that no 16-bit value has touched: inputs, buffers, and what is computed from
them. The example may have shown a mask of zeros, and the next batch one with `finfo(float32).min`, which a plain cast
turns into infinity, and a row of them into NaN. A range is proved where the op that makes the value bounds it.
Parameters are left out: autocast casts those as they are. So is a constant that is infinite.

Before: add(scores: bf16, to(mask, bf16))
After:  add(scores: bf16, to(clamp(mask, -3.39e38, 3.39e38), bf16))
"""

from __future__ import annotations

import math

import torch
from torch.fx import Graph, Node

from ...form import Clamp, Colours, Position
from ...graph.aliases import may_write
from ...graph.notes import is_parameter, note_of
from ...graph.values import LOW_DTYPES, Dtypes, is_floating
from ...ops import ops
from ...ops.rules import row_of
from ..colour.simulate import Simulation


def touched(graph: Graph, dtypes: Dtypes) -> set[Node]:
    """Return the values that are low, and those that are computed from a low one."""
    nodes: set[Node] = set()
    for node in graph.nodes:
        dtype = dtypes.get(node)
        low = any(d in LOW_DTYPES for d in dtype) if isinstance(dtype, tuple) else dtype in LOW_DTYPES
        if low or not nodes.isdisjoint(node.all_input_nodes):
            nodes.add(node)
    return nodes


def saturate(simulation: Simulation, colours: Colours, dtypes: Dtypes) -> Colours:
    """Return the decisions on placed values with the operands marked that a cast down has to bring into range first."""
    if not simulation.policy.level.stores_low:
        return colours
    by_autocast, unbounded = _rounded_by_autocast(simulation), _unbounded(simulation)
    unbounded -= touched(simulation.graph, dtypes)
    down = [
        (node, o.place, o.node)
        for node, choice in colours.items()
        for o in ops.operands(node)
        if choice.casts.get(o.place) in LOW_DTYPES and dtypes[o.node] == torch.float32
    ]
    # If one reader needs the range, all readers get it, so that they share the cast.
    beyond = {value for node, where, value in down if (node, where) not in by_autocast and value in unbounded}
    clamped: dict[Node, list[Clamp]] = {}
    for node, where, value in down:
        if value in beyond and Clamp(where) not in colours[node].edits:
            clamped.setdefault(node, []).append(Clamp(where))
    return {**colours, **{n: colours[n].edited(*clamps) for n, clamps in clamped.items()}}


def _rounded_by_autocast(simulation: Simulation) -> set[tuple[Node, Position]]:
    """Return the operands that autocast casts down too, there or in every later read of a value that is only moved."""
    reference = simulation.reference
    operands: set[tuple[Node, Position]] = set()
    if reference is None:
        return operands
    for node in reversed(simulation.graph.nodes):
        casts = reference.colours[node].casts if node in reference.colours else {}
        reads = {(reader, o.place) for reader in node.users for o in ops.operands(reader) if o.node is node}
        moved = row_of(node).commutes != "" and reads <= operands and {*node.users} == {reader for reader, _ in reads}
        operands |= {(node, o.place) for o in ops.operands(node) if moved or casts.get(o.place) in LOW_DTYPES}
    return operands


def _unbounded(simulation: Simulation) -> set[Node]:
    """Return the values that may leave the low dtype's range at a later call: nothing that makes them bounds them."""
    nodes: set[Node] = set()
    roots: set[Node] = set()  # of storage that such a value was written to
    find = simulation.aliases.find
    for node in simulation.graph.nodes:
        row, operands, written = row_of(node), list(ops.operands(node)), may_write(node)
        if not node.op.startswith("call"):
            is_open = not is_parameter(node) and not math.isinf(note_of(node).constant or 0.0)
        elif row.bounded or (written and row.commutes == ""):
            is_open = bool(written)
        elif (row.commutes != "" or row.is_cast) and operands:  # each number of the result is one of an operand's
            floats = [o.node for o in operands if is_floating(simulation.original.get(o.node))]
            is_open = any(n in nodes or find(n) in roots for n in floats)
        elif row.out_of:  # rows of a table
            is_open = any(o.node in nodes for o in operands if o.name == row.out_of)
        else:
            is_open = True
        if is_open:
            nodes.add(node)
            roots.update(map(find, written))
    return {node for node in simulation.graph.nodes if node in nodes or find(node) in roots}
