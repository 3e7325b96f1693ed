"""What each kind of rule means for a node, and what a user cast does: what it runs in, and what is cast to that."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...colouring import Colouring
from ...contract.errors import PolicyError
from ...contract.policy import module_override
from ...contract.reasons import Code, Reason
from ...graph import literals
from ...graph.values import ANY, ELIGIBLE, dtype_reference, is_floating, module_path, out_operands, source
from ...graph.values import LOW as LOW_DTYPES
from ...ops import ops
from ...ops.facts import lacks_low
from ...ops.rules import BANNED, COMPOSITE, FOLLOW, FP32, KEEP, LOW, PROMOTE, Rule
from .kernels import runs_in
from .operand_casts import all_to, castable, keep, natural
from .state import State, first_float


def by_kind(
    state: State, node: Node, name: str, row: Rule, kind: str, floats: list[ops.Operand], low: Any
) -> Colouring:
    """Colour a node as the kind of its rule has it.

    Raises:
        PolicyError: autocast bans the op on this device; it has no rule, and the policy wants one.
    """
    if kind == LOW and not state.autocast and _lacks(state, node, row, low):
        return _without_kernel(state, node, row, floats, low)
    if kind == LOW:
        return _low(state, row, floats, low)
    if kind == FP32:
        return fp32(state, node, row, floats)
    reads_low = not state.autocast and any(state.dtypes[o.node] in LOW_DTYPES for o in floats)
    if kind in (PROMOTE, FOLLOW) and reads_low and _lacks(state, node, row, low):  # autocast fails there
        return _without_kernel(state, node, row, floats, low)
    if kind == PROMOTE:
        return natural(state, row, floats, kind, Code.PROMOTE("widest operand"))
    if kind == FOLLOW or state.autocast:
        return natural(state, row, floats, kind, Code.FOLLOW("its operand's dtype"))
    if kind == BANNED:
        raise PolicyError(
            f"{name} ({source(node) or node.name}, module '{module_path(node)}') is unsafe in low precision, and "
            f"autocast bans it on {state.device}: use binary_cross_entropy_with_logits on the logits, or allow it "
            f"with Policy(ops={{'{name}': 'fp32'}})."
        )
    known = row.reason != "unknown op"
    if not known and state.policy.unknown_ops == "error":
        raise PolicyError(
            f"{name} ({source(node) or node.name}, module '{module_path(node)}') has no rule: register one with "
            "fxamp.register_rule, or choose Policy(unknown_ops='keep')."
        )
    if not known and state.policy.unknown_ops == "fp32":
        return all_to(state, torch.float32, row, floats, FP32, Code.UNKNOWN_OP("FP32 by policy"))
    if kind == KEEP and (reference := dtype_reference(node)) is not None:
        dtype = first_float(state.dtypes[reference]) or torch.float32
        return Colouring(dtype, FOLLOW, Code.FOLLOW("made with the dtype of its reference"))
    why = Code.COMPOSITE("kept whole") if kind == COMPOSITE else Code.KEEP(row.reason)
    kept = keep(state, node, floats, kind, why)
    held = {kept.casts.get((o.name, o.index), state.dtypes[o.node]) for o in floats}
    if kind == COMPOSITE and node.op == "call_function" and len(held & {*ELIGIBLE}) > 1:
        return all_to(state, torch.float32, row, floats, kind, why)  # autocast, which made them one, is off
    if known and kind == KEEP and not kept.casts:
        kept.reason = Code.AS_WRITTEN(row.reason)
    return kept


def _lacks(state: State, node: Node, row: Rule, low: Any) -> bool:
    if lacks_low(node, row, state.device):
        return True
    return not runs_in(node, low, state.device, state.dtypes.get, state.tried)


def _without_kernel(state: State, node: Node, row: Rule, floats: list[ops.Operand], low: Any) -> Colouring:
    """Colour what has no low kernel: FP32, but for what the author wrote on low values and nothing has changed."""
    why = f"no kernel for {low} on this {state.device}"
    if all(state.dtypes[o.node] == state.original[o.node] for o in floats):
        return keep(state, node, floats, KEEP, Code.AS_WRITTEN(why))
    return all_to(state, torch.float32, row, floats, KEEP, Code.KEEP(why))


def _low(state: State, row: Rule, floats: list[ops.Operand], low: Any) -> Colouring:
    """Colour what the rule runs low, unless its operands have been upcast, or hold what low cannot."""
    cast = [o for o in floats if castable(state, o, row, low)]
    if not cast:
        return natural(state, row, floats, LOW, Code.NO_OPERAND("nothing that is cast"))
    asked = state.autocast or low != state.low  # by a region, which takes what it is given
    if not asked and any(state.dtypes[o.node] in LOW_DTYPES and state.dtypes[o.node] != low for o in cast):
        return all_to(state, torch.float32, row, floats, LOW, Code.USER_CAST("an operand is in the other low dtype"))
    if not state.autocast and all(o.node in state.upcast for o in floats):
        return natural(state, row, floats, LOW, Code.USER_CAST("every operand was upcast by the author"))
    extremes = state.extremes
    if (
        state.aggressive
        and all(o.node in extremes.fixed for o in floats)
        and any(o.node in extremes.values for o in floats)
    ):
        return natural(state, row, floats, LOW, Code.POSITION("made of integers and buffers alone"))
    return all_to(state, low, row, floats, LOW, Code.LOW(row.reason))


def fp32(state: State, node: Node, row: Rule, floats: list[ops.Operand], why: Reason | None = None) -> Colouring:
    """Colour what runs FP32, unless it is told its dtype."""
    explicit = ops.argument(node, "dtype")
    if row.dtype_arg and isinstance(explicit, torch.dtype):
        return natural(state, row, floats, FP32, Code.DTYPE_ARGUMENT(str(explicit)))
    return all_to(state, torch.float32, row, floats, FP32, why or Code.FP32(row.reason))


def in_place(state: State, node: Node, row: Rule, floats: list[ops.Operand]) -> Colouring | None:
    """Colour what writes to a tensor: its target's dtype decides."""
    outs, first = out_operands(node), node.args[0] if node.args else None
    targets = outs or [t for t in (first if isinstance(first, (list, tuple)) else [first]) if isinstance(t, Node)]
    dtype = next((d for t in targets if is_floating(d := state.dtypes[t]) or d is ANY), None)
    strict = row.same_dtype or ops.name(node) == "setitem"  # index_put, where an index is a tensor
    strict |= bool(outs) and not row.casts_out
    if dtype is ANY and strict:
        why = Code.UNKNOWN_RANK("captured without inputs, so its target's dtype is not known")
        return keep(state, node, [o for o in floats if o.node not in targets], PROMOTE, why)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    # What nothing is known of is FP32, or cast where it turns out to be: it may be an index.
    cast = (ANY, *ELIGIBLE) if dtype in LOW_DTYPES else ELIGIBLE
    sources = [o for o in floats if strict and o.node not in targets and state.dtypes[o.node] in cast]
    casts = {(o.name, o.index): dtype for o in sources if state.dtypes[o.node] != dtype}
    return Colouring(dtype, PROMOTE, Code.IN_PLACE("its target's dtype"), casts)


def user_cast(state: State, node: Node) -> Colouring | None:
    """Colour a cast that the author wrote; one to another dtype than a floating one has no colour."""
    forced = module_override(state.policy, state.stacks.get(node, ())) if state.policy.modules else None
    observed = None if forced is not None and forced.colour == "fp32" else node.meta.get("read")
    intent = state.casts.read(node, state.dtypes, observed, exact=not state.aggressive)
    if intent.dtype is None and not intent.literal and state.dtypes[node] is ANY and not state.autocast:
        why = Code.KEEP("it takes the dtype of what is not known, or the device")
        return keep(state, node, list(ops.operands(node))[:1], KEEP, why)
    if intent.dtype is None or not intent.dtype.is_floating_point:
        return None
    if intent.literal and intent.dtype == torch.float32:
        state.upcast.add(node)
    baked = state.casts.baked(node)
    changed = intent.dtype if baked is not None and baked != intent.dtype else None
    value = next(ops.operands(node))
    number = 0.0 if intent.literal else state.extremes.constants.get(value.node, 0.0)
    if not state.autocast and intent.dtype in LOW_DTYPES and literals.is_extreme(number, intent.dtype):
        if abs(number) != literals.FP32_MAX:
            why = Code.LITERAL("a number does not fit the low dtype")
            return Colouring(torch.float32, "cast", why, set_dtype=torch.float32)
        why = Code.LITERAL("finfo(float32).min becomes the low dtype's own")
        return Colouring(intent.dtype, "cast", why, set_dtype=changed, clamped=((value.name, value.index),))
    return Colouring(intent.dtype, "cast", intent.reason, set_dtype=changed)
