"""Make the Python numbers of a low node fit: FP32's bounds become those of the low dtype; others keep the node FP32.

Before: masked_fill(scores: bf16, mask, -3.4028e+38)
After:  masked_fill(scores: bf16, mask, -3.3895e+38)
"""

from __future__ import annotations

import torch

from ...colouring import Colouring
from ...contract.reasons import Code
from ...graph import literals
from ...graph.notes import note_of
from ...graph.values import LOW as LOW_DTYPES
from ...graph.values import dtype_reference, mutated_operands
from ...ops.rules import KEEP, LOW
from .operand_casts import all_to
from .result_dtypes import result_dtypes
from .state import Site, State


def fit_numbers(state: State, site: Site, colouring: Colouring) -> Colouring:
    """Replace a number that the low dtype cannot hold, or keep the node in FP32."""
    if colouring.dtype not in LOW_DTYPES or colouring.kind in (KEEP, "cast"):
        return colouring
    low, numbers, constants = colouring.dtype, list(literals.numbers(site.node)), state.extremes.constants
    held = {o: constants[o.node] for o in site.floats if o.node in constants}
    lowest = [o for o in site.floats if colouring.kind == LOW and o.node in state.extremes.lowest]
    clamped = [*lowest, *(o for o, x in held.items() if literals.is_extreme(x, low))]
    mended = literals.mend([*numbers, *held.values()], low)
    if mended is None or (state.aggressive and literals.has_tiny(site.name, numbers, low)):
        return _in_fp32(state, site, colouring)
    if mended or clamped:
        colouring.literals = tuple(pair for pair in mended if pair[0] in numbers)
        colouring.clamped = tuple((o.name, o.index) for o in clamped)
        colouring.reason = Code.LITERAL("finfo(float32).min becomes the minimum of the low dtype")
    return colouring


def _in_fp32(state: State, site: Site, colouring: Colouring) -> Colouring:
    """Keep a node in FP32; if it writes in place, keep its target in FP32 from the next run on."""
    node = site.node
    if mutated_operands(node):
        state.pinned.add(state.aliases.find(mutated_operands(node)[0]))
        return colouring
    if state.original[node] in LOW_DTYPES and state.aliases.is_mutated(node):
        return colouring  # a low value of the user's: writes would not reach an FP32 copy
    why = Code.LITERAL("a number does not fit the low dtype")
    colouring = all_to(state, site.of_kind(colouring.kind), torch.float32, why)
    if dtype_reference(node) is not None or note_of(node).read is not None:
        colouring.set_dtype = torch.float32
    state.dtypes[node] = torch.float32 if colouring.set_dtype else result_dtypes(state, node, colouring)
    return colouring
