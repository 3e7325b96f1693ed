"""Which values may be stored in either dtype.

At O1 a node is free in two cases: if it commutes with rounding in forward (and in backward, if gradients flow), or if
it is FP32 only because autocast casts a low operand up for a kernel that computes in FP32 anyway. At O2 every node that
is not sensitive is free. With measured costs matrix products are free too: one whose casts take more time than it saves
stays FP32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...form import Replace
from ...graph.aliases import may_alias
from ...graph.notes import note_of
from ...graph.values import concrete_size, first_float, is_floating, literal_dtype
from ...ops import ops
from ...ops.facts import Facts, facts_of
from ...ops.numbers import is_exact, numbers
from ...ops.rules import FOLLOW, FP32, LOW, PROMOTE, row_of
from ..colour.kernels import lacks_low_kernel
from ..colour.simulate import Simulation
from .saturate import touched


def free_nodes(simulation: Simulation, grad: frozenset[Node]) -> dict[Node, None]:
    """Return the free nodes of a graph in order, including the items of free containers."""
    free: dict[Node, None] = {}
    lowers, sliced = simulation.policy.level.stores_low, set[Any]()
    low = touched(simulation.graph, simulation.dtypes) if lowers else set()
    for node in () if lowers else reversed(simulation.graph.nodes):  # an item has no dtype but that of its container
        if row_of(node).asks == "item" and (node in sliced or _leaves_gaps(simulation, node)):
            sliced.add(node.args[0])
    for node in simulation.graph.nodes:
        item = row_of(node).asks == "item" and node.args[0] in free and is_floating(simulation.dtypes[node])
        # Where gradients are off, a cast that makes no copy would hand on those of its operand.
        ends = row_of(node).is_cast and node not in grad and not grad.isdisjoint(node.all_input_nodes)
        fixed = ends or node in sliced
        coloured = node in simulation.colours and not fixed
        if item or (coloured and _is_free(_Candidate(simulation, node, grad, node in low))):
            free[node] = None
    return free


class _Candidate:
    """A node with a colour, its floats and their dtypes, and whether gradients and low values reach it."""

    def __init__(self, simulation: Simulation, node: Node, grads: frozenset[Node], touched: bool) -> None:
        self.simulation, self.node, self.grads, self.touched = simulation, node, grads, touched
        self.choice, self.row, self.grad = simulation.colours[node], row_of(node), node in grads
        self.floats = [o for o in ops.operands(node) if is_floating(simulation.dtypes[o.node])]
        self.dtypes = [simulation.dtypes[o.node] for o in self.floats]

    @property
    def facts(self) -> Facts:
        """What was measured of the op in this low dtype."""
        return facts_of(self.node, self.simulation.device, self.simulation.low)


def _is_free(c: _Candidate) -> bool:
    lowers = c.simulation.policy.level.stores_low
    return _is_open(c) and (_is_insensitive(c) if lowers else _is_as_autocasts(c))


def _is_open(c: _Candidate) -> bool:
    """Say whether either dtype is possible, at every level."""
    node, aliases, policy = c.node, c.simulation.aliases, c.simulation.policy
    low, either = c.simulation.low, (c.simulation.low, torch.float32)
    # The kind of a matrix product leaves its dtype open only at O2 with measured costs.
    measured = policy.level.may_keep_products_fp32 and policy.cost == "measured"
    product = measured and c.choice.reason.kind == LOW and not c.choice.reason.final
    return (
        (product or c.choice.reason.kind in (PROMOTE, FOLLOW, FP32))
        # It makes a value outside the user's autocast regions, and names neither a dtype nor a number of one.
        and not ops.name(node).endswith("_")
        and note_of(node).region is None
        and not c.choice.has(Replace)
        and (literal_dtype(node) is None or c.row.is_cast)
        # It runs in one of the two dtypes, and gives and reads floats of these.
        and c.choice.dtype in either
        and all(d in either for d in c.dtypes if not isinstance(d, tuple))
        and is_floating(c.simulation.dtypes[node])
        and bool(c.floats)
        # Nothing writes to the storage that it shares.
        and not (may_alias(node) and any(aliases.is_mutated(o.node) for o in c.floats))
        and not aliases.is_mutated(node)
        # A norm takes low weights only if its input is low too.
        and not any(o.name in c.row.uncast and d == low for o, d in zip(c.floats, c.dtypes, strict=True))
    )


def _is_insensitive(c: _Candidate) -> bool:
    """Say whether an op may be low or FP32 from O2 on: it is not sensitive."""
    state, extreme = c.simulation, c.simulation.extremes.values
    return (
        c.choice.reason.kind != FP32
        and not c.choice.reason.final
        # Its output has the dtype of its operands, not of its weights.
        and c.row.gives in ("float", "first")
        and c.floats[0].name not in c.row.uncast
        # The low dtype can hold it and its operands, and the user has cast none of them up.
        and c.node not in extreme
        and not any(o.node in extreme or o.node in state.upcast for o in c.floats)
        # A low value has touched it, or it only moves values: what is computed from FP32 alone stays FP32.
        and (c.touched or c.row.commutes != "")
        # An FP32 value has the gradients of all its readers summed in FP32.
        and not (c.grad and c.facts.sums_low and c.simulation.dtypes[c.node] == torch.float32)
        and not lacks_low_kernel(state, c.node, c.row, state.low)
    )


def _is_as_autocasts(c: _Candidate) -> bool:
    """Say whether an op may be low or FP32 at O1: neither its value nor a gradient changes."""
    if c.choice.reason.kind != FP32:
        rounds_nothing = _only_moves(c)
    else:  # by autocast's list: it reads low, and its low kernels compute in FP32
        exact = c.facts.fp32_internal and (c.facts.fp32_backward or not c.grad) and c.facts.status == "measured"
        rounds_nothing = exact and all(d == c.simulation.low for d in c.dtypes)
    # Stored low its readers share it, and may share the cast of its operand with that operand's other readers, as where
    # a product reads a view of a weight that another one reads whole. Gradients are then summed in low.
    share = c.simulation.policy.sharing
    alone = len(c.node.users) <= 1 and (share != "weights" or all(len(o.node.users) <= 1 for o in c.floats))
    return rounds_nothing and (share == "always" or not c.grad or alone)


def _only_moves(c: _Candidate) -> bool:
    """It only moves values, and low holds its literals exactly: rounding before and after it is the same."""
    low, dtype = c.simulation.low, c.simulation.dtypes[c.node]
    return (
        c.row.commutes != ""
        and c.facts.commutes_forward
        and (c.facts.commutes_backward or not c.grad)
        and not c.choice.casts
        and not (dtype == low and torch.float32 in c.dtypes)  # an FP32 scalar beside it does not promote it
        and not (c.grad and _broadcasts(c))
        and not _leaves_gaps(c.simulation, c.node)
        and not (c.grad and c.row.free_backward and any(not _is_copied(o.node, c) for o in c.floats))
        and all(is_exact(x, low) for x in numbers(c.node))
    )


def _leaves_gaps(simulation: Simulation, node: Node) -> bool:
    """Say whether an FP32 result of a node has strides that a cast behind the node would change, and one before not."""
    dtype, value = simulation.dtypes[node], node.meta.get("val")
    parts = value if isinstance(value, (tuple, list)) else [value]
    return first_float(dtype) == torch.float32 and any(map(_is_compacted, parts))


def _is_copied(value: Node, c: _Candidate) -> bool:
    """Say whether what makes a value copies gradients that have gaps, as products do, or sums none."""
    # A cast behind an op that joins tensors has gradients without gaps, and one before it has views of them.
    while row_of(value).commutes != "" and (values := ops.inputs(value)) and len(values) == 1:
        value = values[0]
    return value not in c.grads or not value.op.startswith("call") or row_of(value).kind(c.simulation.device) == LOW


def _broadcasts(c: _Candidate) -> bool:
    """Say whether it repeats an operand along a dimension, so that gradients of that operand are added up."""
    out, floats = c.node.meta.get("val"), {o.node for o in c.floats}
    if not isinstance(out, torch.Tensor):
        return False
    size = [concrete_size(s) for s in out.shape]
    tensors = [(n, v) for n in c.node.all_input_nodes if isinstance(v := n.meta.get("val"), torch.Tensor)]
    shapes = [(n in floats, [concrete_size(s) for s in v.shape]) for n, v in tensors]
    if all(shape == size for is_float, shape in shapes if is_float):
        return False
    try:
        return len(shapes) > 1 and list(torch.broadcast_shapes(*(shape for _, shape in shapes))) == size
    except RuntimeError:  # they are joined, not broadcast
        return False


def _is_compacted(value: object) -> bool:
    """Say whether a cast changes the strides of a tensor, such as a slice: the result of a cast has no gaps.

    Products of three dimensions and more choose their kernel by strides, so a cast before a slice changes the kernel.
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
