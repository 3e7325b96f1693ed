"""Make the Python numbers of a low node fit: FP32's bounds become those of the low dtype; others keep the node FP32.

Before: masked_fill(scores: bf16, mask, -3.4028e+38)
After:  masked_fill(scores: bf16, mask, -3.3895e+38)
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...colouring import Colouring
from ...contract.reasons import Code
from ...graph import literals
from ...graph.notes import note_of
from ...graph.values import LOW_DTYPES, ValueDtype, dtype_reference, mutated_operands
from ...ops.rules import KEEP, LOW
from .operand_casts import all_to
from .result_dtypes import fit_kernel
from .state import Site, State


def fit_numbers(state: State, site: Site, colouring: Colouring, dtypes: ValueDtype) -> tuple[Colouring, ValueDtype]:
    """Replace a number that the low dtype cannot hold, or keep the node in FP32; return the dtypes of the results too.

    Args:
        state: a node that writes in place gets its target pinned, for the next run.
        site: the call.
        colouring: what was decided on it.
        dtypes: those of its results.
    """
    if colouring.dtype not in LOW_DTYPES or colouring.kind in (KEEP, "cast"):
        return colouring, dtypes
    low, numbers, constants = colouring.dtype, list(literals.numbers(site.node)), state.extremes.constants
    held = {o: constants[o.node] for o in site.floats if o.node in constants}
    lowest = [o for o in site.floats if colouring.kind == LOW and o.node in state.extremes.lowest]
    clamped = [*lowest, *(o for o, x in held.items() if literals.is_extreme(x, low))]
    mended = literals.mend([*numbers, *held.values()], low)
    if mended is None or (state.aggressive and literals.has_tiny(site.name, numbers, low)):
        return _in_fp32(state, site, colouring, dtypes)
    if mended or clamped:
        fitting = tuple(pair for pair in mended if pair[0] in numbers)
        why = Code.LITERAL("finfo(float32).min becomes the minimum of the low dtype")
        places = tuple(o.place for o in clamped)
        return replace(colouring, literals=fitting, clamped=places, reason=why, settled=True), dtypes
    return colouring, dtypes


def _in_fp32(state: State, site: Site, colouring: Colouring, dtypes: ValueDtype) -> tuple[Colouring, ValueDtype]:
    """Keep a node in FP32; if it writes in place, keep its target in FP32 from the next run on."""
    node = site.node
    if mutated_operands(node):
        state.pinned.add(state.aliases.find(mutated_operands(node)[0]))
        return colouring, dtypes
    if state.original[node] in LOW_DTYPES and state.aliases.is_mutated(node):
        return colouring, dtypes  # a low value of the user's: writes would not reach an FP32 copy
    why = Code.LITERAL("a number does not fit the low dtype")
    colouring = all_to(state, site.of_kind(colouring.kind), torch.float32, why, settled=True)
    if dtype_reference(node) is not None or note_of(node).read is not None:
        return replace(colouring, set_dtype=torch.float32), torch.float32
    return fit_kernel(state, node, colouring)
