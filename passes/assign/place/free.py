"""Which values may be stored in either dtype.

At O1 a node is free when rounding may move across it in forward, and in backward where gradients flow, or when it is
FP32 only because autocast casts a low operand up for a kernel that computes in FP32 anyway. At O2 every node is free
that is not sensitive, and with measured costs a matrix product too: one that does not pay for its casts stays FP32.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ...colouring import Colouring
from ...graph.aliases import may_alias
from ...graph.literals import numbers
from ...graph.values import concrete_size, is_floating, is_known, literal_dtype
from ...ops import ops
from ...ops.facts import facts_of
from ...ops.rules import FOLLOW, FP32, LOW, PROMOTE, lookup
from ..colour.simulate import Simulation


def free_nodes(simulation: Simulation, grad: frozenset[Node]) -> dict[Node, None]:
    """Return the free nodes of a graph in order, items of what is free among them.

    Args:
        simulation: what was decided so far.
        grad: the values that gradients flow through.
    """
    free: dict[Node, None] = {}
    for node in simulation.graph.nodes:
        item = ops.name(node) == "getitem" and node.args[0] in free and is_floating(simulation.dtypes[node])
        if item or (node in simulation.colours and _is_free(simulation, node, grad)):
            free[node] = None
    return free


def _is_free(simulation: Simulation, node: Node, grad: frozenset[Node]) -> bool:
    colouring, name, low, dtypes = simulation.colours[node], ops.name(node), simulation.low, simulation.dtypes
    row, _ = lookup(name, simulation.device, low)
    if colouring.kind not in (PROMOTE, FOLLOW, FP32) and not _is_free_product(simulation, colouring):
        return False
    if name.endswith("_") or node.meta.get("autocast_region"):
        return False
    if colouring.literals or literal_dtype(node) is not None or colouring.dtype not in (low, torch.float32):
        return False
    if simulation.aliases.is_mutated(node) or not is_floating(dtypes[node]):
        return False
    floats = [o for o in ops.operands(node) if is_floating(dtypes[o.node])]
    if not all(map(is_known, [dtypes[node], *(dtypes[o.node] for o in ops.operands(node))])):
        return False
    if not floats or any(simulation.aliases.is_mutated(o.node) and may_alias(node) for o in floats):
        return False
    if any(o.name in row.uncast and dtypes[o.node] == low for o in floats):  # it takes low weights beside low alone
        return False
    held = [dtypes[o.node] for o in floats]
    if any(d not in (low, torch.float32) for d in held if not isinstance(d, tuple)):
        return False
    if simulation.policy.level.stores_low:
        primary, extreme = floats[0], simulation.extremes.values
        return (
            colouring.kind != FP32
            and row.out[0] in ("float", "first")
            and primary.name not in row.uncast
            and node not in extreme
            and not any(o.node in extreme for o in floats)
            and not any(o.node in simulation.upcast for o in floats)
            and colouring.reason.code not in ("override", "literal", "mutated", "keep", "float64", "dtype_argument")
        )
    if colouring.kind == FP32:  # only by autocast's list, over low values, in a kernel that computes in FP32
        known = facts_of(node, simulation.device, low)
        return all(d == low for d in held) and known.fp32_internal and known.status == "measured"
    # Rounding moves across moves of values, whatever the device, but not of a number that is rounded with them.
    moves = row.commutes == "both" or (row.commutes == "forward" and node not in grad)
    if dtypes[node] == torch.float32 and _is_compacted(node.meta.get("val")):
        return False
    scalar = dtypes[node] == low and torch.float32 in held  # which promotion lets pass
    exact = all(torch.tensor(x, dtype=low).item() == x for x in numbers(node))
    return moves and not colouring.casts and not scalar and exact


def _is_compacted(value: object) -> bool:
    """Say whether a cast changes how a tensor lies in memory, as of a slice: one that has gaps gets none.

    Products of three dimensions and more go by that: of a slice that was cast before, another kernel would be taken.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.dim() < 3:
        return False
    sizes, strides = ([concrete_size(s) for s in numbers] for numbers in (value.shape, value.stride()))
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size != 1):
        if stride != expected:
            return True
        expected *= size
    return False


def _is_free_product(simulation: Simulation, colouring: Colouring) -> bool:
    """Say whether a matrix product may stay FP32: at O2, where it was measured what its casts cost."""
    measured = simulation.policy.level.weighs and simulation.policy.cost == "measured"
    return measured and colouring.kind == LOW and colouring.reason.code == "low"
