"""The dtypes that a node gives: its op is run on fake tensors, with its operands cast as the decision on it says."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.fx import Node

from ...colouring import AS_AUTOCAST, Colouring
from ...contract.devices import DEVICES
from ...contract.reasons import Code
from ...graph.mixed import refuse_mixed
from ...graph.notes import note_of
from ...graph.values import ANY, ELIGIBLE, ValueDtype, first_float
from ...ops import ops
from ...ops.rules import COMPOSITE, KEEP, LOW
from .operand_casts import operand_casts
from .state import State


def fit_kernel(state: State, node: Node, colouring: Colouring) -> tuple[Colouring, ValueDtype]:
    """Return a decision as the kernel of the op forces it to be, and the dtypes of the results.

    A kernel that rejects the operands gets them all in the widest dtype of them, else in FP32, else in the captured
    dtypes, as an op does that fake tensors cannot run. If nothing is cast, torch's promotion decides what the node
    runs in.
    """
    for decision in (colouring, *_wider(state, node, colouring)):
        try:
            made = result_dtypes(state, node, decision)
        except Exception:  # whatever a kernel raises on its operands
            continue
        promotes = not decision.operand_dtypes and not ops.name(node).endswith("_")
        return (replace(decision, dtype=first_float(made) or decision.dtype) if promotes else decision), made
    return _captured(state, node, colouring), state.original[node]


def result_dtypes(state: State, node: Node, colouring: Colouring) -> ValueDtype:
    """Return the dtypes of the results of a decision; raise what the kernel raises on its operands."""
    if colouring.kind == "cast":
        return colouring.dtype
    if colouring.kind == AS_AUTOCAST:
        return _under_autocast(state, node) if state.autocast else state.under_autocast(node)
    casts = colouring.operand_dtypes
    wanted = {o.node: casts[o.place] for o in ops.operands(node) if o.place in casts}
    kept = colouring.kind in (KEEP, COMPOSITE) and not state.autocast
    kept &= all(state.original[n] in (ANY, wanted.get(n, state.dtypes[n])) for n in node.all_input_nodes)
    if kept or node.op == "call_module" or ops.name(node).startswith("higher_order::"):
        return state.original[node]
    refuse_mixed(node, lambda n: wanted.get(n, state.dtypes[n]))
    return state.infer(node, lambda n: wanted.get(n, state.dtypes[n]))


def _under_autocast(state: State, node: Node) -> ValueDtype:
    """Return the dtypes that a call gives under autocast: as capture saw them, or as its fake kernel has them."""
    seen: ValueDtype = note_of(node).autocast
    if seen is not None or ops.name(node).startswith("higher_order::"):
        return state.original[node] if seen is None else seen
    here = DEVICES[state.device].is_here()
    try:
        with torch.autocast(state.device, state.low) if here else contextlib.nullcontext():
            return state.infer(node, state.dtypes.__getitem__)
    except Exception:  # whatever a kernel raises; autocast itself would fail
        return state.original[node]


def _wider(state: State, node: Node, colouring: Colouring) -> Iterator[Colouring]:
    """Yield a decision with all floats cast to the widest dtype of them, and one with all cast to FP32."""
    floats = [o for o in ops.operands(node) if state.dtypes[o.node] in ELIGIBLE]
    if not floats:
        return
    kinds = [d for o in floats if isinstance(d := state.dtypes[o.node], torch.dtype)]
    widest = functools.reduce(torch.promote_types, kinds)
    reasons = {widest: Code.WIDEST("the kernel rejects mixed operands")}
    reasons.setdefault(torch.float32, Code.KEEP(f"no kernel for {state.low} on this {state.device}"))
    for dtype, reason in reasons.items():
        casts = operand_casts(state.dtypes, floats, dict.fromkeys(floats, dtype).__getitem__)
        settled = colouring.settled or colouring.kind == LOW or reason.code is Code.KEEP
        yield replace(colouring, dtype=dtype, reason=reason, operand_dtypes=casts, settled=settled)


def _captured(state: State, node: Node, colouring: Colouring) -> Colouring:
    """Return a decision with the operands in their captured dtypes, for an op that fake tensors cannot run."""
    floats = [o for o in ops.operands(node) if state.dtypes[o.node] in ELIGIBLE]
    if not floats:
        return colouring
    before = {o: d if (d := state.original[o.node]) in ELIGIBLE else torch.float32 for o in floats}
    casts = operand_casts(state.dtypes, floats, before.__getitem__)
    why = (Code.KEEP if casts else Code.AS_WRITTEN)("fake tensors cannot run it")
    dtype = first_float(state.original[node]) or torch.float32
    return replace(colouring, dtype=dtype, reason=why, operand_dtypes=casts, settled=True)
