"""The output dtypes of a coloured node: its op is run on fake tensors, with its operands cast."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch.fx import Node

from ...colouring import AS_AUTOCAST, Colouring
from ...contract.devices import DEVICES
from ...contract.reasons import Code
from ...graph.mixed import refuse_mixed
from ...graph.notes import note_of
from ...graph.values import ANY, ELIGIBLE
from ...ops import ops
from ...ops.rules import COMPOSITE, KEEP
from .state import State, first_float


def result_dtypes(state: State, node: Node, colouring: Colouring) -> Any:
    """Return the output's dtypes. If nothing was cast, torch's promotion decides what the node runs in."""
    name = ops.name(node)
    if colouring.kind == "cast":
        return colouring.dtype
    if colouring.kind == AS_AUTOCAST:
        return _under_autocast(state, node) if state.autocast else state.under_autocast(node)
    casts = colouring.casts
    wanted = {o.node: casts[o.name, o.index] for o in ops.operands(node) if (o.name, o.index) in casts}
    kept = colouring.kind in (KEEP, COMPOSITE) and not state.autocast
    kept &= all(state.original[n] in (ANY, wanted.get(n, state.dtypes[n])) for n in node.all_input_nodes)
    if kept or node.op == "call_module" or name.startswith("higher_order::"):
        return state.original[node]
    try:
        refuse_mixed(node, lambda n: wanted.get(n, state.dtypes[n]))
        made = state.infer(node, lambda n: wanted.get(n, state.dtypes[n]))
    except Exception:  # whatever a kernel raises on mixed operands: they are unified
        return _unified(state, node, colouring)
    if not colouring.casts and not name.endswith("_"):
        colouring.dtype = first_float(made) or colouring.dtype
    return made


def _under_autocast(state: State, node: Node) -> Any:
    """Return the dtypes that a call gives under autocast: as capture saw them, or as its fake kernel has them."""
    seen = note_of(node).autocast
    if seen is not None or ops.name(node).startswith("higher_order::"):
        return state.original[node] if seen is None else seen
    here = DEVICES[state.device].is_here()
    try:
        with torch.autocast(state.device, state.low) if here else contextlib.nullcontext():
            return state.infer(node, state.dtypes.__getitem__)
    except Exception:  # whatever a kernel raises; autocast itself would fail
        return state.original[node]


def _unified(state: State, node: Node, colouring: Colouring) -> Any:
    """Cast all floats to the widest dtype; if the op rejects it, to FP32; else to the captured dtypes."""
    floats = [o for o in ops.operands(node) if state.dtypes[o.node] in ELIGIBLE]
    if not floats:
        return state.original[node]
    widest = functools.reduce(torch.promote_types, [state.dtypes[o.node] for o in floats])
    reasons = {torch.float32: Code.KEEP(f"no kernel for {state.low} on this {state.device}")}
    reasons[widest] = Code.WIDEST("the kernel rejects mixed operands")
    for dtype in dict.fromkeys((widest, torch.float32)):
        colouring.casts = {(o.name, o.index): dtype for o in floats if state.dtypes[o.node] != dtype}
        colouring.dtype, colouring.reason = dtype, reasons[dtype]
        with contextlib.suppress(Exception):  # fake tensors cannot run this op at all
            return state.infer(node, lambda n, d=dtype: d if state.dtypes[n] in ELIGIBLE else state.dtypes[n])
    # An op that fake tensors cannot run keeps its captured dtypes.
    before = {o: state.original[o.node] if state.original[o.node] in ELIGIBLE else torch.float32 for o in floats}
    colouring.casts = {(o.name, o.index): dtype for o, dtype in before.items() if state.dtypes[o.node] != dtype}
    colouring.dtype = first_float(state.original[node]) or torch.float32
    colouring.reason = (Code.KEEP if colouring.casts else Code.AS_WRITTEN)("fake tensors cannot run it")
    return state.original[node]
