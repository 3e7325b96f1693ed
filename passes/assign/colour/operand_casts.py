"""Four ways to cast the operands of a node.

`all_to` casts all operands to one dtype, `natural` casts only if the kernel rejects mixed dtypes, `keep` casts back to
the captured dtypes, and `as_autocast` to those that the operands have under `torch.autocast`.

Before: add(a: bf16, b: f32)
After:  all_to(bf16): b is cast; natural: none; keep, where a was f32: a is cast; as_autocast, where b is bf16 there: b
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...colouring import AS_AUTOCAST, Colouring, Place
from ...contract.reasons import Code, Reason
from ...graph.aliases import may_write
from ...graph.values import ANY, ELIGIBLE, LOW, is_known
from ...ops import ops
from ...ops.rules import PROMOTE, Rule
from .state import Site, State, first_float


def all_to(state: State, site: Site, dtype: Any, reason: Reason) -> Colouring:
    """Cast every castable operand that has another dtype."""
    casts = {}
    # An unknown dtype counts as FP32, unless the kernel takes one dtype only and user code passes a low operand.
    beside_low = site.row.same_dtype and any(state.dtypes[o.node] in LOW for o in site.floats)
    unknown = dtype in LOW or beside_low
    for o in site.floats:
        held = state.dtypes[o.node]
        if castable(state, o, site.row, dtype) and held != dtype and (held is not ANY or unknown):
            casts[o.name, o.index] = dtype
    return Colouring(dtype, site.kind, reason, casts)


def castable(state: State, operand: ops.Operand, row: Rule, dtype: Any) -> bool:
    """Say whether a rule lets an operand be cast to a dtype."""
    held = state.dtypes[operand.node]
    if held is not ANY and held not in ELIGIBLE:
        return False
    if row.casts and operand.name not in row.casts:
        return False
    return not (operand.name in row.uncast and dtype in LOW)


def natural(state: State, site: Site, reason: Reason) -> Colouring:
    """Leave the operands as they are; if the kernel rejects mixed dtypes, cast all to the widest."""
    values = [state.dtypes[o.node] for o in site.floats]
    held = [d for d in values if isinstance(d, torch.dtype)]
    widest = functools.reduce(torch.promote_types, held) if held else torch.float32
    mixed = len(set(held)) > 1
    if mixed and site.row.same_dtype and site.row.gives != "first":
        return all_to(state, site, widest, Code.WIDEST("the kernel rejects mixed operands"))
    unknown = ANY in values and any(d in LOW for d in held)
    ranks_known = all("val" in o.node.meta for o in site.floats)
    if site.kind == PROMOTE and not ranks_known and (mixed or unknown):
        return all_to(state, site, torch.float32, Code.UNKNOWN_RANK("captured without inputs"))
    return Colouring(widest, site.kind, reason)


def keep(state: State, site: Site, reason: Reason) -> Colouring:
    """Cast the operands back to the dtypes that they had when the graph was captured."""
    casts: dict[Place, torch.dtype] = {}
    before = []
    for o in site.floats:
        original, held = state.original[o.node], state.dtypes[o.node]
        if original is ANY and held in LOW:
            original = torch.float32
        if isinstance(original, torch.dtype):
            before.append(original)
            if isinstance(held, torch.dtype) and held != original:
                casts[o.name, o.index] = original
    dtype = first_float(state.original[site.node]) or next(iter(before), torch.float32)
    return Colouring(dtype, site.kind, reason, casts)


def as_autocast(state: State, site: Site) -> Colouring | None:
    """Cast the operands to the dtypes that they have under autocast, under which the call then runs.

    Return None where those dtypes are not known, or where a cast would be of a value that the call may write to.
    """
    why = Code.AS_AUTOCAST("runs under torch.autocast, on operands in autocast's dtypes")
    if state.autocast:
        return natural(state, site.of_kind(AS_AUTOCAST), why)
    made, written = state.under_autocast(site.node), set(may_write(site.node))
    casts: dict[Place, torch.dtype] = {}
    for o in site.floats:
        wanted = state.under_autocast(o.node)
        if wanted == state.dtypes[o.node]:
            continue
        if not isinstance(wanted, torch.dtype) or o.node in written:
            return None
        casts[o.name, o.index] = wanted
    return Colouring(first_float(made) or torch.float32, AS_AUTOCAST, why, casts) if is_known(made) else None
