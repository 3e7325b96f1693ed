"""Give every free value the dtype that the cut chose for it, and every operand the cast that it then needs.

Before: t = view(logits: bf16), t: f32, casts logits; loss(t)
After:  t: bf16, casts nothing; loss(t) casts t
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch.fx import Node

from ...colouring import Colouring, Colours, Position
from ...contract.reasons import Code, Reason
from ...graph.values import ELIGIBLE, Dtypes, ValueDtype, dtype_reference, first_float
from ...ops import ops
from ...ops.rules import LOW
from ..colour.operand_casts import operand_casts
from ..colour.simulate import Simulation
from .costs import Costs
from .cut import Variable
from .uses import Uses


def apply_cut(low_side: set[Variable], simulation: Simulation, uses: Uses, costs: Costs) -> tuple[Colours, Dtypes]:
    """Return the decisions and the dtypes of all values, with the free values where the cut stores them.

    Args:
        low_side: the free nodes that are stored low.
        simulation: what was decided so far.
        uses: what each reader needs.
        costs: the costs that the cut minimised; reasons name them.
    """
    dtypes = dict(simulation.dtypes)
    for node in uses.free:
        dtypes[node] = _stored(dtypes[node], simulation.low if node in low_side else torch.float32)
    colours = {
        node: _compared(node, colouring, dtypes)
        if uses.takes_either(node)
        else _placed(node, colouring, simulation.low if node in low_side else torch.float32, dtypes, uses, costs)
        for node, colouring in simulation.colours.items()
    }
    return colours, dtypes


def _compared(node: Node, colouring: Colouring, dtypes: Dtypes) -> Colouring:
    """Return the decision on a comparison, which reads its operands in the dtypes in which they are stored."""
    floats = [d for o in ops.operands(node) if isinstance(d := dtypes[o.node], torch.dtype) and d in ELIGIBLE]
    return replace(colouring, dtype=functools.reduce(torch.promote_types, floats)) if floats else colouring


def _placed(node: Node, colouring: Colouring, side: torch.dtype, dtypes: Dtypes, uses: Uses, costs: Costs) -> Colouring:
    """Return the decision on a node, given how its value and its operands are stored."""
    before = uses.simulation.dtypes
    placed = replace(colouring, operand_dtypes=_operand_dtypes(node, colouring, side, dtypes, uses))
    if dtypes[node] != before[node] and node in uses.free:
        placed = replace(placed, dtype=side, reason=_reason(colouring, side, costs))
    reference = dtype_reference(node)
    if reference is not None and any(dtypes[n] != before[n] for n in (node, reference)):
        placed = replace(placed, set_dtype=first_float(dtypes[node]))  # the dtype that it follows has changed
    return placed


def _stored(dtype: ValueDtype, side: torch.dtype) -> ValueDtype:
    """Return a value's dtype on a side of the cut; in a tuple only the dtypes that autocast casts change."""
    return tuple(side if d in ELIGIBLE else d for d in dtype) if isinstance(dtype, tuple) else side


def _operand_dtypes(
    node: Node, colouring: Colouring, side: torch.dtype, dtypes: Dtypes, uses: Uses
) -> dict[Position, torch.dtype]:
    """Return the casts of a node, given how the cut stores its operands."""
    if uses.upcasts(node):  # the user's upcast needs no cast of ours
        return {}

    def wanted(operand: ops.Operand) -> ValueDtype:
        if dtypes[operand.node] not in ELIGIBLE:
            return colouring.operand_dtypes.get(operand.place)
        return side if uses.follows(node, operand.place) else uses.needs[node][operand.place]

    return operand_casts(dtypes, ops.operands(node), wanted)


def _reason(colouring: Colouring, side: torch.dtype, costs: Costs) -> Reason:
    if colouring.kind == LOW:
        return Code.NOT_WORTH_CASTS("on this device it takes longer in low, counting its casts")
    word = "FP32" if side == torch.float32 else "low"
    return Code.CUT(f"stored {word}, which {costs.objective} ({colouring.reason.code})")
