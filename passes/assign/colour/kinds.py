"""The meaning of each kind of rule, and of a user cast, for a node: its dtype, and which operands are cast to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.fx import Node

from ..._torch import HigherOrderOperator
from ...colouring import Colouring
from ...contract.errors import PolicyError
from ...contract.policy import Override, module_override
from ...contract.reasons import Code, Reason
from ...graph import literals
from ...graph.notes import note_of
from ...graph.values import (
    ANY,
    ELIGIBLE,
    LOW_DTYPES,
    dtype_reference,
    first_float,
    is_floating,
    module_path,
    out_operands,
    source,
)
from ...ops import ops
from ...ops.facts import lacks_low
from ...ops.rules import BANNED, COMPOSITE, FOLLOW, FP32, KEEP, LOW, PROMOTE, row_of
from .kernels import runs_in
from .operand_casts import all_to, as_autocast, castable, keep, natural, operand_casts
from .state import Site, State
from .user_casts import Intent


def by_kind(state: State, site: Site) -> Colouring:
    """Colour a node by the kind of its rule.

    Raises:
        PolicyError: autocast bans the op on this device; or the op has no rule, and the policy refuses such ops.
    """
    if not state.autocast and _meets_low(state, site) and lacks(state, site):  # autocast itself would fail
        return _without_kernel(state, site)
    return _KINDS[site.kind](state, site)


def _meets_low(state: State, site: Site) -> bool:
    """Say whether an op runs low because of its rule or its operands."""
    reads = site.kind in (PROMOTE, FOLLOW) and any(state.dtypes[o.node] in LOW_DTYPES for o in site.floats)
    return site.kind == LOW or reads


def lacks(state: State, site: Site) -> bool:
    """Say whether the device has no low kernel for an op."""
    if lacks_low(site.node, site.row, state.device):
        return True
    return not runs_in(site.node, site.low, state.device, state.dtypes.get, state.tried)


def refused(state: State, site: Site, override: Override) -> PolicyError:
    """Return the error about an override to low of an op that has no low kernel."""
    whole = "" if override.kind == "op" else ", which the override of its module covers: name narrower modules, or"
    return PolicyError(
        f"{override}: {_where(site)} has no kernel for {site.low} on this {state.device}{whole or ';'} leave it FP32."
    )


def _without_kernel(state: State, site: Site) -> Colouring:
    """Run an op without a low kernel in FP32, unless its operands have their dtypes from before conversion."""
    why = f"no kernel for {site.low} on this {state.device}"
    if all(state.dtypes[o.node] == state.original[o.node] for o in site.floats):
        return keep(state, site.of_kind(KEEP), Code.AS_WRITTEN(why))
    return all_to(state, site.of_kind(KEEP), torch.float32, Code.KEEP(why))


def _low(state: State, site: Site) -> Colouring:
    """Colour a `low` op low, unless the user upcast all operands, or all hold numbers out of the low range."""
    floats, low = site.floats, site.low
    cast = [o for o in floats if castable(state, o, site.row, low)]
    if not cast:
        return natural(state, site, Code.NO_OPERAND("no operand is cast"), settled=True)
    asked = state.autocast or low != state.low  # an autocast region asks for the cast
    if not asked and any(_is_cast_to_the_other(state, o.node, low) for o in cast):
        why = Code.USER_CAST("your code casts an operand to the other low dtype")
        return all_to(state, site, torch.float32, why, settled=True)
    if not state.autocast and all(o.node in state.upcast for o in floats):
        return natural(state, site, Code.USER_CAST("your code casts every operand up"), settled=True)
    if state.aggressive and _is_position(state, site):
        why = Code.POSITION("computed from nothing but integers and buffers")
        return natural(state, site, why, settled=True)
    return all_to(state, site, low, Code.LOW(site.row.reason))


def _is_cast_to_the_other(state: State, value: Node, low: object) -> bool:
    """Say whether a value is in the other low dtype because a cast of the user's made it, or what it is computed from.

    What the model holds or is given in that dtype, such as frozen parameters, is cast as autocast casts it.
    """
    seen, left = set[Node](), [value]
    while left:
        node = left.pop()
        if node in seen or state.dtypes[node] not in LOW_DTYPES or state.dtypes[node] == low:
            continue
        if row_of(node).is_cast:
            return True
        seen.add(node)
        left += node.all_input_nodes
    return False


def _is_position(state: State, site: Site) -> bool:
    """Say whether a product reads only buffers and integers, some of them out of the low range."""
    extremes, values = state.extremes, [o.node for o in site.floats]
    return all(n in extremes.fixed for n in values) and any(n in extremes.values for n in values)


def fp32(state: State, site: Site, why: Reason | None = None) -> Colouring:
    """Colour an op that runs in FP32, unless its `dtype=` argument decides."""
    explicit = note_of(site.node).dtype_argument or ops.argument(site.node, "dtype")
    if site.row.dtype_arg and isinstance(explicit, torch.dtype):
        return natural(state, site.of_kind(FP32), Code.DTYPE_ARGUMENT(str(explicit)), settled=True)
    return all_to(state, site.of_kind(FP32), torch.float32, why or Code.FP32(site.row.reason))


def _promote(state: State, site: Site) -> Colouring:
    return natural(state, site, Code.PROMOTE("widest operand"))


def _follow(state: State, site: Site) -> Colouring:
    return natural(state, site, Code.FOLLOW("its operand's dtype"))


def _banned(state: State, site: Site) -> Colouring:
    if state.autocast:
        return _follow(state, site)
    raise PolicyError(
        f"{_where(site)} is unsafe in low precision, and "
        f"autocast bans it on {state.device}: use binary_cross_entropy_with_logits on the logits, or allow it "
        f"with Policy(ops={{'{site.name}': 'fp32'}})."
    )


def _kept(state: State, site: Site) -> Colouring:
    """Colour an op that keeps its dtypes, because its rule says so or because it has no rule."""
    if not site.row.known:
        return _unknown(state, site)
    if state.autocast:
        return _follow(state, site)
    reference = dtype_reference(site.node)
    if reference is not None:
        return _like(state, reference)
    kept = keep(state, site, Code.KEEP(site.row.reason))
    return kept if kept.operand_dtypes else replace(kept, reason=Code.AS_WRITTEN(site.row.reason))


def _like(state: State, reference: Node) -> Colouring:
    """Colour an op that makes a value with the dtype of another value."""
    dtype = first_float(state.dtypes[reference]) or torch.float32
    return Colouring(dtype, FOLLOW, Code.FOLLOW("made with the dtype of its reference"))


def _unknown(state: State, site: Site) -> Colouring:
    """Colour an op without a rule, according to the policy's `unknown_ops`."""
    as_under_it = as_autocast(state, site) if _runs_under_autocast(site.node) else None
    if state.autocast:
        return as_under_it or _follow(state, site)
    if state.policy.unknown_ops == "autocast" and as_under_it is not None:
        return as_under_it
    if state.policy.unknown_ops == "error":
        raise PolicyError(
            f"{_where(site)} has no rule: register one with fxamp.register_rule, or choose another unknown_ops: "
            "'autocast' gives it what torch.autocast would, 'keep' the dtypes that it had."
        )
    if state.policy.unknown_ops == "fp32":
        return all_to(state, site.of_kind(FP32), torch.float32, Code.UNKNOWN_OP("FP32 by policy"))
    reference = dtype_reference(site.node)
    return keep(state, site, Code.KEEP(site.row.reason)) if reference is None else _like(state, reference)


def _runs_under_autocast(node: Node) -> bool:
    """Say whether a call can be given a region of autocast, and it is known what comes out of it there.

    Graphs inside a higher-order op stay as they were captured; if the compiler rewrites them, no autocast may be on.
    """
    if isinstance(node.target, HigherOrderOperator):
        return note_of(node).autocast is not None and not row_of(node).known
    return ops.operator_of(node) is not None


def _composite(state: State, site: Site) -> Colouring:
    """Colour a composite op that could not be decomposed, and is kept whole: as autocast runs it, if that was seen."""
    seen = note_of(site.node).autocast is not None and ops.operator_of(site.node) is not None
    as_under_it = as_autocast(state, site) if seen else None
    if as_under_it is not None and (state.autocast or state.policy.unknown_ops == "autocast"):
        return as_under_it
    if state.autocast:
        return _follow(state, site)
    why = Code.COMPOSITE("kept whole")
    kept = keep(state, site, why)
    held = {kept.operand_dtypes.get(o.place, state.dtypes[o.node]) for o in site.floats}
    if site.node.op == "call_function" and len(held & {*ELIGIBLE}) > 1:
        return all_to(state, site, torch.float32, why)  # autocast would give them one dtype, but the graph runs without
    return kept


_KINDS: dict[str, Callable[[State, Site], Colouring]] = {
    LOW: _low,
    FP32: fp32,
    PROMOTE: _promote,
    FOLLOW: _follow,
    KEEP: _kept,
    BANNED: _banned,
    COMPOSITE: _composite,
}


def _where(site: Site) -> str:
    return f"{site.name} ({source(site.node) or site.node.name}, module '{module_path(site.node)}')"


def in_place(state: State, site: Site) -> Colouring | None:
    """Colour an op that writes to a tensor: the dtype of that tensor decides."""
    targets = _targets(site.node)
    dtype = next((d for t in targets if is_floating(d := state.dtypes[t]) or d is ANY), None)
    sources = [o for o in site.floats if o.node not in targets]
    strict = _takes_its_dtype_alone(site)
    if dtype is ANY and strict:
        why = Code.UNKNOWN_RANK("captured without inputs, so its target's dtype is not known")
        return keep(state, replace(site, kind=PROMOTE, floats=tuple(sources)), why)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    # An operand of unknown dtype may be an index: it counts as FP32, or is cast if it turns out to be a float.
    cast = (ANY, *ELIGIBLE) if dtype in LOW_DTYPES else ELIGIBLE
    written = [o for o in sources if strict and state.dtypes[o.node] in cast]
    casts = operand_casts(state.dtypes, written, lambda o: dtype)
    return Colouring(dtype, PROMOTE, Code.IN_PLACE("its target's dtype"), casts)


def _targets(node: Node) -> list[Node]:
    """Return what a call writes to: `out=`, else its first argument."""
    first = node.args[0] if node.args else None
    found = first if isinstance(first, (list, tuple)) else [first]
    return out_operands(node) or [t for t in found if isinstance(t, Node)]


def _takes_its_dtype_alone(site: Site) -> bool:
    """Say whether the written values must have exactly the dtype of the tensor that they are written to."""
    indexed = site.name == "setitem"  # index_put, where an index is a tensor
    return site.row.same_dtype or indexed or (bool(out_operands(site.node)) and not site.row.casts_out)


def user_cast(state: State, site: Site) -> Colouring | None:
    """Colour a user cast; a cast to a dtype that is not floating has no colour."""
    node = site.node
    intent = _intent(state, node)
    if intent.dtype is None and not intent.literal and state.dtypes[node] is ANY and not state.autocast:
        why = Code.KEEP("it takes its dtype from a value whose dtype is not known, or only moves to a device")
        return keep(state, replace(site, kind=KEEP, floats=tuple(ops.operands(node))[:1]), why)
    if intent.dtype is None or not intent.dtype.is_floating_point:
        return None
    if intent.literal and intent.dtype == torch.float32:
        state.upcast.add(node)
    baked = state.user_casts.baked(node)
    changed = intent.dtype if baked is not None and baked != intent.dtype else None
    value = next(ops.operands(node))
    named = intent.literal and note_of(node).read is None
    number = 0.0 if named else state.extremes.constants.get(value.node, 0.0)
    if state.autocast or intent.dtype not in LOW_DTYPES or not literals.is_extreme(number, intent.dtype):
        return Colouring(intent.dtype, "cast", intent.reason, set_dtype=changed)
    if abs(number) != literals.FP32_MAX:
        why = Code.LITERAL("a number does not fit the low dtype")
        return Colouring(torch.float32, "cast", why, set_dtype=torch.float32)
    why = Code.LITERAL("finfo(float32).min becomes the minimum of the low dtype")
    return Colouring(intent.dtype, "cast", why, set_dtype=changed, clamped=(value.place,))


def _intent(state: State, node: Node) -> Intent:
    """Return what a cast means; a dtype read under autocast does not count if the policy forces FP32."""
    forced = module_override(state.policy, state.stacks.get(node, ())) if state.policy.modules else None
    observed = None if forced is not None and forced.colour == "fp32" else note_of(node).read
    written = state.aliases.find(node) in state.pinned  # then a cast that was no copy must stay none
    return state.user_casts.read(node, state.dtypes, observed, exact=written or not state.aggressive)
