"""Give every free value the dtype that the cut chose for it, and every operand the cast that it then needs.

Before: t = view(logits: bf16), t: f32, casts logits; loss(t)
After:  t: bf16, casts nothing; loss(t) casts t
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Node

from ...colouring import Colouring, Place
from ...contract.reasons import Code, Reason
from ...graph.values import ELIGIBLE, dtype_reference
from ...ops import ops
from ...ops.rules import LOW
from ..colour.simulate import Simulation
from ..colour.state import first_float
from .costs import Costs
from .cut import Variable
from .uses import Uses


def apply_cut(low_side: set[Variable], simulation: Simulation, uses: Uses, costs: Costs) -> int:
    """Rewrite dtypes, casts and reasons of the simulation; return how many values were moved.

    Args:
        low_side: the free nodes that are stored low.
        simulation: what was decided so far, changed in place.
        uses: what each reader needs.
        costs: the costs that the cut minimised; reasons name them.
    """
    before, low = dict(simulation.dtypes), simulation.low
    for node in uses.free:
        simulation.dtypes[node] = _stored(before[node], low if node in low_side else torch.float32)
    for node in simulation.graph.nodes:
        if node not in simulation.colours:
            continue
        colouring, side = simulation.colours[node], low if node in low_side else torch.float32
        if uses.takes_either(node):
            floats = [d for o in ops.operands(node) if (d := simulation.dtypes[o.node]) in ELIGIBLE]
            colouring.dtype = functools.reduce(
                torch.promote_types, floats, colouring.dtype if not floats else floats[0]
            )
            continue
        colouring.casts = _casts(node, colouring, side, simulation, uses)
        if simulation.dtypes[node] != before[node] and node in uses.free:
            colouring.reason = _reason(colouring, "low" if node in low_side else "FP32", costs)
            colouring.dtype = side
        reference = dtype_reference(node)
        if reference is not None and any(simulation.dtypes[n] != before[n] for n in (node, reference)):
            colouring.set_dtype = first_float(simulation.dtypes[node])  # the dtype that it follows has changed
    return sum(simulation.dtypes[node] != before[node] for node in uses.free)


def _stored(dtype: Any, side: torch.dtype) -> Any:
    """Return a value's dtype on a side of the cut; in a tuple only the dtypes that autocast casts change."""
    return tuple(side if d in ELIGIBLE else d for d in dtype) if isinstance(dtype, tuple) else side


def _casts(
    node: Node, colouring: Colouring, side: torch.dtype, simulation: Simulation, uses: Uses
) -> dict[Place, torch.dtype]:
    """Return the casts of a node, given how the cut stores its operands."""
    casts: dict[Place, torch.dtype] = {}
    for o in [] if uses.upcasts(node) else ops.operands(node):  # the user's upcast needs no cast of ours
        where, held = (o.name, o.index), simulation.dtypes[o.node]
        if held not in ELIGIBLE:
            if where in colouring.casts:
                casts[where] = colouring.casts[where]
            continue
        needed = side if uses.follows(node, where) else uses.needs[node][where]
        if needed != held:
            casts[where] = needed
    return casts


def _reason(colouring: Colouring, word: str, costs: Costs) -> Reason:
    if colouring.kind == LOW:
        return Code.NOT_WORTH_CASTS("on this device it takes longer in low, counting its casts")
    return Code.CUT(f"stored {word}, which {costs.least} ({colouring.reason.code})")
