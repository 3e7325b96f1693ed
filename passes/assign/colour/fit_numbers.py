"""Make the Python numbers of a low node representable: FP32's own bounds become the low dtype's, others keep it FP32.

Before: masked_fill(scores: bf16, mask, -3.4028e+38)
After:  masked_fill(scores: bf16, mask, -3.3895e+38)
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ...colouring import Colouring
from ...contract.reasons import Code
from ...graph import literals
from ...graph.values import LOW as LOW_DTYPES
from ...graph.values import dtype_reference, mutated_operands
from ...ops import ops
from ...ops.rules import KEEP, LOW, lookup
from .operand_casts import all_to
from .result_dtypes import result_dtypes
from .state import State


def fit_numbers(state: State, node: Node, name: str, floats: list[ops.Operand], colouring: Colouring) -> Colouring:
    """Mend a number that the low dtype cannot hold, or keep the node FP32."""
    if colouring.dtype not in LOW_DTYPES or colouring.kind in (KEEP, "cast"):
        return colouring
    low, numbers, constants = colouring.dtype, list(literals.numbers(node)), state.extremes.constants
    held = {o: constants[o.node] for o in floats if o.node in constants}
    lowest = [o for o in floats if colouring.kind == LOW and o.node in state.extremes.lowest]
    clamped = [*lowest, *(o for o, x in held.items() if literals.is_extreme(x, low))]
    mended = literals.mend([*numbers, *held.values()], low)
    if mended is None or (state.aggressive and literals.has_tiny(name, numbers, low)):
        if mutated_operands(node):
            state.pinned.add(state.aliases.find(mutated_operands(node)[0]))
            return colouring
        if state.original[node] in LOW_DTYPES and state.aliases.is_mutated(node):
            return colouring  # the author's own low value, which a copy in FP32 would part from what is written
        row = lookup(name, state.device, state.low)[0]
        why = Code.LITERAL("a number does not fit the low dtype")
        colouring = all_to(state, torch.float32, row, floats, colouring.kind, why)
        if dtype_reference(node) is not None or "read" in node.meta:
            colouring.set_dtype = torch.float32
        state.dtypes[node] = torch.float32 if colouring.set_dtype else result_dtypes(state, node, colouring)
    elif mended or clamped:
        colouring.literals = tuple(pair for pair in mended if pair[0] in numbers)
        colouring.clamped = tuple((o.name, o.index) for o in clamped)
        colouring.reason = Code.LITERAL("finfo(float32).min becomes the low dtype's own")
    return colouring
