"""Which values may be stored in either dtype.

At O1 a node is free in two cases: if it commutes with rounding in forward (and in backward, if gradients flow), or if
it is FP32 only because autocast casts a low operand up for a kernel that computes in FP32 anyway. At O2 every node that
is not sensitive is free. With measured costs matrix products are free too: one whose casts take more time than it saves
stays FP32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Node

from ...colouring import Colouring
from ...graph.aliases import may_alias
from ...graph.literals import numbers
from ...graph.notes import note_of
from ...graph.values import concrete_size, is_floating, is_known, literal_dtype
from ...ops import ops
from ...ops.facts import facts_of, lacks_low
from ...ops.rules import FOLLOW, FP32, LOW, PROMOTE, Rule, row_of
from ..colour.kernels import runs_in
from ..colour.simulate import Simulation
from .saturate import touched


def free_nodes(simulation: Simulation, grad: frozenset[Node]) -> dict[Node, None]:
    """Return the free nodes of a graph in order, including the items of free containers.

    Args:
        simulation: what was decided so far.
        grad: the values that gradients flow through.
    """
    checks = (*_ALWAYS, *(_BEYOND_AUTOCAST if simulation.aggressive else _AS_AUTOCAST))
    free: dict[Node, None] = {}
    low = touched(simulation.graph, simulation.dtypes) if simulation.aggressive else set()
    for node in simulation.graph.nodes:
        item = row_of(node).asks == "item" and node.args[0] in free and is_floating(simulation.dtypes[node])
        if item or (node in simulation.colours and _passes(checks, simulation, node, grad, node in low)):
            free[node] = None
    return free


@dataclass(frozen=True)
class _Candidate:
    """A node that has a colour, and its properties.

    Attributes:
        read: all its operands.
        floats: those that are floating.
        held: their dtypes.
        grad: gradients flow through it.
        touched: it is low, or computed from a low value.
    """

    simulation: Simulation
    node: Node
    colouring: Colouring
    row: Rule
    read: tuple[Node, ...]
    floats: tuple[ops.Operand, ...]
    held: tuple[object, ...]
    grad: bool
    touched: bool


Check = Callable[[_Candidate], bool]


def _passes(
    checks: tuple[Check, ...], simulation: Simulation, node: Node, grad: frozenset[Node], touched: bool
) -> bool:
    dtypes = simulation.dtypes
    row = row_of(node)
    operands = list(ops.operands(node))
    floats = tuple(o for o in operands if is_floating(dtypes[o.node]))
    held, read = tuple(dtypes[o.node] for o in floats), tuple(o.node for o in operands)
    candidate = _Candidate(
        simulation, node, simulation.colours[node], row, read, floats, held, node in grad, touched
    )  # fmt: skip
    return all(check(candidate) for check in checks)


# At every level.


def _has_an_open_kind(c: _Candidate) -> bool:
    """Its kind leaves the dtype open; the kind of a matrix product does so only at O2 with measured costs."""
    policy = c.simulation.policy
    measured = policy.level.may_keep_products_fp32 and policy.cost == "measured"
    product = measured and c.colouring.kind == LOW and not c.colouring.settled
    return product or c.colouring.kind in (PROMOTE, FOLLOW, FP32)


def _makes_a_value(c: _Candidate) -> bool:
    """It does not write in place, and lies in no autocast region of the user's."""
    return not ops.name(c.node).endswith("_") and note_of(c.node).region is None


def _names_no_dtype(c: _Candidate) -> bool:
    return not c.colouring.literals and literal_dtype(c.node) is None


def _is_in_either_dtype(c: _Candidate) -> bool:
    """It runs in one of the two dtypes, and every operand has one of them."""
    either = (c.simulation.low, torch.float32)
    return c.colouring.dtype in either and all(d in either for d in c.held if not isinstance(d, tuple))


def _is_known(c: _Candidate) -> bool:
    dtypes = c.simulation.dtypes
    return is_floating(dtypes[c.node]) and all(is_known(dtypes[n]) for n in (c.node, *c.read))


def _shares_no_written_storage(c: _Candidate) -> bool:
    aliases = c.simulation.aliases
    view = may_alias(c.node) and any(aliases.is_mutated(o.node) for o in c.floats)
    return not view and not aliases.is_mutated(c.node)


def _reads_a_float(c: _Candidate) -> bool:
    return bool(c.floats)


def _has_no_low_weights(c: _Candidate) -> bool:
    """It reads no low weights; a norm takes those only if its input is low too."""
    return not any(o.name in c.row.uncast and d == c.simulation.low for o, d in zip(c.floats, c.held, strict=True))


_ALWAYS: tuple[Check, ...] = (
    _has_an_open_kind, _makes_a_value, _names_no_dtype, _is_in_either_dtype, _is_known, _shares_no_written_storage,
    _reads_a_float, _has_no_low_weights,
)  # fmt: skip


# From O2 on: what is not sensitive.


def _is_not_sensitive(c: _Candidate) -> bool:
    return c.colouring.kind != FP32 and not c.colouring.settled


def _gives_what_it_reads(c: _Candidate) -> bool:
    """Its output has the dtype of its operands, not of its weights."""
    return c.row.gives in ("float", "first") and c.floats[0].name not in c.row.uncast


def _fits_low(c: _Candidate) -> bool:
    """The low dtype can hold it and its operands, and the user has cast none of them up."""
    extreme, upcast = c.simulation.extremes.values, c.simulation.upcast
    return c.node not in extreme and not any(o.node in extreme or o.node in upcast for o in c.floats)


def _is_rounded_anyway(c: _Candidate) -> bool:
    """A low value has touched it, or it only moves values: what is computed from FP32 alone stays FP32."""
    return c.touched or c.row.commutes != ""


def _has_a_low_kernel(c: _Candidate) -> bool:
    state = c.simulation
    return not lacks_low(c.node, c.row, state.device) and runs_in(
        c.node, state.low, state.device, state.dtypes.get, state.tried
    )


_BEYOND_AUTOCAST: tuple[Check, ...] = (
    _is_not_sensitive, _gives_what_it_reads, _fits_low, _is_rounded_anyway, _has_a_low_kernel,
)  # fmt: skip


# At O1: what changes no value.


def _rounds_nothing(c: _Candidate) -> bool:
    """It only moves values; or it is FP32 by autocast's list, reads low, and its low kernels compute in FP32."""
    if c.colouring.kind != FP32:
        return _only_moves(c)
    known = facts_of(c.node, c.simulation.device, c.simulation.low)
    internal = known.fp32_internal and (known.fp32_backward or not c.grad) and known.status == "measured"
    return internal and all(d == c.simulation.low for d in c.held)


def _sums_gradients_as_asked(c: _Candidate) -> bool:
    """Storing it low lets readers share a cast and sum gradients in low, which the policy must allow.

    Its own readers share the value, and the cast of its operand may be shared with that operand's other readers, as
    where a product reads a view of a weight that another one reads whole.
    """
    share = c.simulation.policy.sharing
    if share == "always" or not c.grad:
        return True
    alone = share != "weights" or all(len(o.node.users) <= 1 for o in c.floats)
    return len(c.node.users) <= 1 and alone


def _only_moves(c: _Candidate) -> bool:
    """It only moves values, and low holds its literals exactly: rounding before and after it is the same."""
    if not _commutes(c) or c.colouring.operand_dtypes or _lets_a_number_pass(c) or (c.grad and _broadcasts(c)):
        return False
    if c.simulation.dtypes[c.node] == torch.float32 and _is_compacted(c.node.meta.get("val")):
        return False
    return all(torch.tensor(x, dtype=c.simulation.low).item() == x for x in numbers(c.node))


def _commutes(c: _Candidate) -> bool:
    """Say whether rounding may cross it: by its row, and in this low dtype as measured where it was measured."""
    if not c.row.commutes:
        return False
    known = facts_of(c.node, c.simulation.device, c.simulation.low)
    return known.commutes_forward and (known.commutes_backward or not c.grad)


def _broadcasts(c: _Candidate) -> bool:
    """Say whether it repeats an operand along a dimension, so that gradients of that operand are added up."""
    shapes = [[concrete_size(s) for s in v.shape] for v in map(_value, c.read) if v is not None]
    out, floats = _value(c.node), [v for v in (_value(o.node) for o in c.floats) if v is not None]
    if out is None or len(shapes) < 2 or all(v.shape == out.shape for v in floats):
        return False
    try:
        return list(torch.broadcast_shapes(*shapes)) == [concrete_size(s) for s in out.shape]
    except RuntimeError:  # they are joined, not broadcast
        return False


def _value(node: Node) -> torch.Tensor | None:
    found = node.meta.get("val")
    return found if isinstance(found, torch.Tensor) else None


def _lets_a_number_pass(c: _Candidate) -> bool:
    """Say whether it is low and combined with an FP32 scalar, which does not promote it."""
    return c.simulation.dtypes[c.node] == c.simulation.low and torch.float32 in c.held


_AS_AUTOCAST: tuple[Check, ...] = (_rounds_nothing, _sums_gradients_as_asked)


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
