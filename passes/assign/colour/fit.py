"""How a decision is fitted to the kernel of its op and to its numbers, and the dtypes of the results that it then has.

The op is run on fake tensors, with its operands cast as the decision says. Of the Python numbers of a low node FP32's
bounds become those of the low dtype; others keep the node FP32.

Before: masked_fill(scores: bf16, mask, -3.4028e+38)
After:  masked_fill(scores: bf16, mask, -3.3895e+38)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ...contract.devices import DEVICES
from ...contract.reasons import DEVIATIONS, Code, Reason
from ...form import AS_AUTOCAST, Colouring
from ...graph.aliases import mutated_operands
from ...graph.notes import note_of
from ...graph.values import ELIGIBLE, LOW_DTYPES, ValueDtype, dtype_reference, first_float, refuse_mixed
from ...ops import numbers, ops
from ...ops.rules import COMPOSITE, KEEP, LOW, row_of
from .operand_casts import all_to, operand_casts
from .state import Site, State

_UNFIT = "a number does not fit the low dtype"


def fit_kernel(state: State, node: Node, colouring: Colouring) -> tuple[Colouring, ValueDtype]:
    """Return a decision as the kernel of the op forces it to be, and the dtypes of the results.

    A kernel that rejects the operands gets them all in the widest dtype of them, else in FP32, else in the captured
    dtypes, as an op does that fake tensors cannot run. If nothing is cast, torch's promotion decides what the node
    runs in.
    """
    floats = [o for o in ops.operands(node) if state.dtypes[o.node] in ELIGIBLE]
    for decision in (colouring, *_wider(state, colouring, floats)):
        try:
            results = _result_dtypes(state, node, decision)
        except Exception:  # whatever a kernel raises on its operands
            continue
        promotes = not decision.operand_dtypes and not ops.name(node).endswith("_")
        return (replace(decision, dtype=first_float(results) or decision.dtype) if promotes else decision), results
    return (_captured(state, node, colouring, floats) if floats else colouring), state.original[node]


def _result_dtypes(state: State, node: Node, colouring: Colouring) -> ValueDtype:
    """Return the dtypes of the results of a decision; raise what the kernel raises on its operands."""
    if colouring.kind == "cast" or colouring.set_dtype is not None:
        return colouring.dtype
    if colouring.kind == AS_AUTOCAST:
        return _under_autocast(state, node) if state.autocast else state.under_autocast(node)
    casts = colouring.operand_dtypes
    wanted = {o.node: casts[o.place] for o in ops.operands(node) if o.place in casts}
    keeps = colouring.kind in (KEEP, COMPOSITE) and not state.autocast
    keeps &= all(state.original[n] == wanted.get(n, state.dtypes[n]) for n in node.all_input_nodes)
    if keeps or node.op == "call_module" or row_of(node).higher_order:
        return state.original[node]
    refuse_mixed(node, lambda n: wanted.get(n, state.dtypes[n]))
    return state.infer(node, lambda n: wanted.get(n, state.dtypes[n]))


def _under_autocast(state: State, node: Node) -> ValueDtype:
    """Return the dtypes that a call gives under autocast: as capture saw them, or as its fake kernel has them."""
    observed: ValueDtype = note_of(node).autocast
    if observed is not None or row_of(node).higher_order:
        return state.original[node] if observed is None else observed
    here = DEVICES[state.device].is_here()
    try:
        with torch.autocast(state.device, state.low) if here else contextlib.nullcontext():
            return state.infer(node, state.dtypes.__getitem__)
    except Exception:  # whatever a kernel raises; autocast itself would fail
        return state.original[node]


def _wider(state: State, colouring: Colouring, floats: list[ops.Operand]) -> Iterator[Colouring]:
    """Yield a decision with all floats cast to the widest dtype of them, and one with all cast to FP32."""
    if not floats:
        return
    dtypes: list[Any] = [state.dtypes[o.node] for o in floats]
    widest = functools.reduce(torch.promote_types, dtypes)
    reasons = {widest: Code.WIDEST("the kernel rejects mixed operands")}
    reasons.setdefault(torch.float32, Code.KEEP(f"no kernel for {state.low} on this {state.device}"))
    for dtype, reason in reasons.items():
        casts = operand_casts(state.dtypes, floats, dict.fromkeys(floats, dtype).__getitem__)
        settled = colouring.settled or colouring.kind == LOW or reason.code is Code.KEEP
        why = colouring.reason if colouring.reason.code in DEVIATIONS else reason
        yield replace(colouring, dtype=dtype, reason=why, operand_dtypes=casts, settled=settled)


def _captured(state: State, node: Node, colouring: Colouring, floats: list[ops.Operand]) -> Colouring:
    """Return a decision with the operands in their captured dtypes, for an op that fake tensors cannot run."""
    before = {o: d if (d := state.original[o.node]) in ELIGIBLE else torch.float32 for o in floats}
    casts = operand_casts(state.dtypes, floats, before.__getitem__)
    why = (Code.KEEP if casts else Code.AS_WRITTEN)("fake tensors cannot run it")
    dtype = first_float(state.original[node]) or torch.float32
    return replace(colouring, dtype=dtype, reason=why, operand_dtypes=casts, settled=True)


def fit_numbers(state: State, site: Site, colouring: Colouring, dtypes: ValueDtype) -> tuple[Colouring, ValueDtype]:
    """Replace a number that the low dtype cannot hold, or keep the node in FP32; return the results' dtypes too."""
    if colouring.dtype not in LOW_DTYPES or colouring.kind in (KEEP, "cast"):
        return colouring, dtypes
    low, literals, constants = colouring.dtype, list(numbers.numbers(site.node)), state.extremes.constants
    fills = {o: constants[o.node] for o in site.floats if o.node in constants}
    lowest = [o for o in site.floats if colouring.kind == LOW and o.node in state.extremes.lowest]
    clamped = [*lowest, *(o for o, x in fills.items() if numbers.is_extreme(x, low))]
    mended = numbers.mend([*literals, *fills.values()], low)
    unknown = any(o.node in state.extremes.unknown for o in site.floats)
    if mended is None or (state.aggressive and (unknown or numbers.has_tiny(site.row, literals, low))):
        is_open = unknown or any(map(numbers.is_open, (*literals, *fills.values())))
        text = "a number that data decides, or a size, may not fit the low dtype" if is_open else _UNFIT
        return _in_fp32(state, site, colouring, dtypes, Code.LITERAL(text))
    if mended or clamped:
        fitting = tuple(pair for pair in mended if pair[0] in literals)
        why = Code.LITERAL("finfo(float32).min becomes the minimum of the low dtype")
        places = tuple(o.place for o in clamped)
        return replace(colouring, literals=fitting, clamped=places, reason=why, settled=True), dtypes
    return colouring, dtypes


def _in_fp32(
    state: State, site: Site, colouring: Colouring, dtypes: ValueDtype, why: Reason
) -> tuple[Colouring, ValueDtype]:
    """Keep a node in FP32; if it writes in place, keep its target in FP32 from the next run on."""
    node = site.node
    if mutated_operands(node):
        state.pinned.add(state.aliases.find(mutated_operands(node)[0]))
        return colouring, dtypes
    if state.original[node] in LOW_DTYPES and state.aliases.is_mutated(node):
        return colouring, dtypes  # a low value of the user's: writes would not reach an FP32 copy
    colouring = all_to(state, site.of_kind(colouring.kind), torch.float32, why, settled=True)
    if dtype_reference(node) is not None:
        return replace(colouring, set_dtype=torch.float32), torch.float32
    return fit_kernel(state, node, colouring)
