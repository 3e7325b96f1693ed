"""What decides on a node, in this order: the user's code, the policy, an autocast region, the level, and last the rule.

Casts, in-place writes and reads of bits in the user's code come first, then the overrides of the policy. In the
simulation of `torch.autocast` only casts and in-place writes come before the rule, since autocast has neither policy
nor level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch.fx import Node

from ...contract.devices import DEVICES
from ...contract.errors import PolicyError
from ...contract.policy import module_override, op_override
from ...contract.reasons import Code, Reason
from ...form import Colouring
from ...graph.aliases import is_in_place, may_alias, mutated_operands, out_operands
from ...graph.notes import DECOMPOSE, note_of, region_on
from ...graph.values import ELIGIBLE, LOW_DTYPES, described, dtype_reference, first_float, is_floating, literal_dtype
from ...ops import numbers, ops
from ...ops.facts import accumulates, facts_of, lacks_low, rule_of
from ...ops.rules import BANNED, COMPOSITE, FOLLOW, FP32, KEEP, LOW, PROMOTE, row_of
from .extremes import converts
from .kernels import lacks_low_kernel
from .operand_casts import all_to, as_autocast, castable, keep, natural, operand_casts
from .state import Site, State
from .user_casts import Intent, meaning


def site_of(state: State, node: Node, name: str, floats: Iterable[ops.Operand]) -> Site:
    """Return a call with its row of the op table, and with the low dtype that applies to it."""
    row, kind = rule_of(node, state.device, state.low)
    region = region_on(node, state.device)
    low = torch.float16 if state.device in row.fp16_on and not state.aggressive else (region and region[2]) or state.low
    return Site(node, name, row, kind, tuple(floats), low)


def decide(state: State, site: Site) -> Colouring | None:
    """Return the dtype that a node runs in, and why; None if there is nothing to decide."""
    if site.row.is_cast:
        return _user_cast(state, site)
    colouring = _as_read(state, site)
    if colouring is None and (is_in_place(site.name) or out_operands(site.node)) and mutated_operands(site.node):
        return _in_place(state, site)
    for decider in (_pinned, _overridden, _outside_autocast, _beside_float64, _ruled):
        colouring = colouring or decider(state, site)
    return colouring


# The user's code.


def _user_cast(state: State, site: Site) -> Colouring | None:
    """Colour a user cast; a cast to a dtype that is not floating has no colour."""
    node = site.node
    intent = _intent(state, node)
    if intent.dtype is None or not intent.dtype.is_floating_point:
        return None
    if intent.literal and intent.dtype == torch.float32:
        state.upcast.add(node)
    baked = literal_dtype(node)
    changed = intent.dtype if baked is not None and baked != intent.dtype else None
    value = next(ops.operands(node))
    named = intent.literal and note_of(node).cast != "autocast"
    number = 0.0 if named else state.extremes.constants.get(value.node, 0.0)
    if state.autocast or intent.dtype not in LOW_DTYPES or not numbers.is_extreme(number, intent.dtype):
        return Colouring(intent.dtype, FOLLOW if intent.free else "cast", intent.reason, set_dtype=changed)
    if not numbers.is_lowest(number):
        why = Code.LITERAL("a number does not fit the low dtype")
        return Colouring(torch.float32, "cast", why, set_dtype=torch.float32)
    why = Code.LITERAL("finfo(float32).min becomes the minimum of the low dtype")
    return Colouring(intent.dtype, "cast", why, set_dtype=changed, clamped=(value.place,))


def _intent(state: State, node: Node) -> Intent:
    """Return what a cast means; a dtype read under autocast does not count if the policy forces FP32."""
    forced = module_override(state.policy, state.stacks.get(node, ())) if state.policy.modules else None
    observed = None if forced is not None and forced.colour == "fp32" else note_of(node).read
    written = state.aliases.find(node) in state.pinned  # then a cast that was no copy must stay none
    return meaning(node, state.original, state.dtypes, observed, exact=written or not state.aggressive)


def _as_read(state: State, site: Site) -> Colouring | None:
    """Colour an op that no rule fits as under autocast, and a factory as the dtype that the user's code read there."""
    read, whole = note_of(site.node).read, note_of(site.node).under_autocast
    colouring = _overridden(state, site) if read is not None or whole else None
    if read is not None and (colouring is None or colouring.dtype != torch.float32):
        why = Code.DTYPE_ARGUMENT(f"under autocast your code reads {read} here")
        return Colouring(read, FOLLOW, why, settled=True, set_dtype=read)
    return colouring or ((_outside_autocast(state, site) or as_autocast(state, site)) if whole else None)


def _in_place(state: State, site: Site) -> Colouring | None:
    """Colour an op that writes to a tensor, `out=` or else its first argument: the dtype of that tensor decides."""
    first, out = site.node.args[0] if site.node.args else None, out_operands(site.node)
    targets = out or [t for t in (first if isinstance(first, (list, tuple)) else [first]) if isinstance(t, Node)]
    dtype = next((d for t in targets if is_floating(d := state.dtypes[t])), None)
    if not isinstance(dtype, torch.dtype):
        return None
    strict = site.row.same_dtype or (bool(out) and not site.row.casts_out)  # what is written must have its dtype
    sources = [o for o in site.floats if strict and o.node not in targets and state.dtypes[o.node] in ELIGIBLE]
    casts = operand_casts(state.dtypes, sources, lambda o: dtype)
    return Colouring(dtype, PROMOTE, Code.IN_PLACE("its target's dtype"), casts)


# The policy, regions and storage.


def _pinned(state: State, site: Site) -> Colouring | None:
    """Keep the dtype of a value that shares storage with a written one, or whose bits or gradients depend on it."""
    node = site.node
    if state.autocast or state.aliases.find(node) not in state.pinned:
        return None
    why = Code.MUTATED(Code.MUTATED.meaning)
    if not state.aliases.is_mutated(node):
        why = Code.KEEP(
            "your code reads its bits or element size, writes numbers into it that depend on its dtype, or casts it "
            "where gradients are off"
        )
    elif may_alias(node):
        # A cast before a view makes a copy, which writes would not reach.
        return natural(state, site, why, settled=True)
    # Not FP32: a cast of a value that the user made low is a copy, which writes would not reach.
    return keep(state, site, why)


def _overridden(state: State, site: Site) -> Colouring | None:
    """Return the policy's override of a node itself, of the module that it was made in, or else of its op."""
    if state.autocast or _moves_written(state, site):
        return None
    policy = state.policy
    override = op_override(policy, state.named.get(site.node, ""))
    override = override or (module_override(policy, state.stacks.get(site.node, ())) if policy.modules else None)
    override = override or op_override(policy, site.name)
    if override is None:
        return None
    if override.colour == "low" and lacks_low_kernel(state, site.node, site.row, site.low):
        whole = "" if override.kind == "op" else ", which the override of its module covers: name narrower modules, or"
        raise PolicyError(
            f"{override}: {described(site.node)} has no kernel for {site.low} on this {state.device}{whole or ';'} "
            "leave it FP32."
        )
    site, reason = site.of_kind("override"), Code.OVERRIDE(str(override))
    if override.colour == "keep":
        return keep(state, site, reason)
    return all_to(state, site, state.low if override.colour == "low" else torch.float32, reason)


def _outside_autocast(state: State, site: Site) -> Colouring | None:
    region, away = region_on(site.node, state.device), {o.node in state.elsewhere for o in site.floats} == {True}
    if (region is None or region[1]) and not away:
        return None
    off, other = "the model disables autocast here", "autocast casts nothing on its device"
    return natural(state, site.of_kind("region"), Code.AS_WRITTEN(other) if away else Code.AUTOCAST_REGION(off))


def _beside_float64(state: State, site: Site) -> Colouring | None:
    """Leave an op with a float64 operand as it is, unless it is an FP32 op that also reads low values."""
    dtypes = {state.dtypes[o.node] for o in site.floats}
    if torch.float64 not in dtypes or (site.kind == FP32 and not dtypes.isdisjoint(LOW_DTYPES)):
        return None
    return natural(state, site, Code.FLOAT64("left as it is"), settled=True)


# The level: O2 runs ops low that are not sensitive, O3 all that have a low kernel.


def _ruled(state: State, site: Site) -> Colouring:
    """Return the decision of the rule, as the level interprets it."""
    if state.aggressive and site.node in state.islands:
        return _fp32(state, site, Code.ISLAND("a norm written by hand is FP32 throughout"))
    if state.aggressive:
        site = _at_level(state, site)
        if site.kind in (PROMOTE, FOLLOW) and not _moves_written(state, site) and _lowers(state, site):
            code = Code.O3_LOW if state.policy.level.rounds_sensitive else Code.O2_LOW
            return all_to(state, site, site.low, code("not sensitive, and an operand is low"))
    reads = site.kind in (PROMOTE, FOLLOW) and any(state.dtypes[o.node] in LOW_DTYPES for o in site.floats)
    asks = not state.autocast and (site.kind == LOW or reads)  # autocast itself would fail
    if asks and lacks_low_kernel(state, site.node, site.row, site.low):
        return _without_kernel(state, site)
    return _under_autocast_whole(state, site) or _KINDS[site.kind](state, site)


def _under_autocast_whole(state: State, site: Site) -> Colouring | None:
    """Colour what no rule says the dtype of as autocast runs it, where the policy asks for that; None for other ops."""
    if site.kind not in (KEEP, BANNED, COMPOSITE) or not (state.autocast or state.policy.unknown_ops == "autocast"):
        return None
    runs = (site.kind == COMPOSITE or not site.row.known) and _runs_under_autocast(site)
    colouring = as_autocast(state, site) if runs else None
    return colouring or (_follow(state, site) if state.autocast else None)


def _at_level(state: State, site: Site) -> Site:
    """Return a call with the kind that a level beyond autocast gives it."""
    values = [o.node for o in site.floats]
    if values and all(state.dtypes[n] in LOW_DTYPES and state.dtypes[n] != site.low for n in values):
        return site  # all of it is in the other low dtype, which the user chose: there are no bytes to save
    extreme = any(n in state.extremes.values for n in values) or converts(site.node, state.dtypes)
    return site.of_kind(_kind_at_level(state, site, extreme))


def _kind_at_level(state: State, site: Site, extreme: bool) -> str:
    """Return the kind of a call at O2 or O3; `extreme` says that an operand holds what the low dtype cannot."""
    node, row, kind = site.node, site.row, site.kind
    if kind in (LOW, KEEP, BANNED, COMPOSITE):
        return kind
    if lacks_low(node, row, state.device) or row.no_low_backward:
        return FP32
    several = PROMOTE if kind == PROMOTE or len(site.floats) > 1 else FOLLOW
    if state.policy.level.rounds_sensitive and not extreme:
        return LOW if row.gives in ("float", "first") and not row.commutes else several
    if row.loss:  # FP32, except a loss that only selects values
        return FOLLOW if facts_of(node, state.device, state.low).commutes_forward else FP32
    if accumulates(node, row) or (row.sensitive and not _is_safe(state, site)):
        return FP32
    return several if kind == FP32 else kind


def _is_safe(state: State, site: Site) -> bool:
    """Say whether a sensitive op is safe in low: its errors are those of a rounding, and low has the range it needs."""
    if site.row.sensitive == "range" and state.low is not torch.bfloat16:
        return False
    facts = facts_of(site.node, state.device, state.low)
    return facts.rounds_once and facts.scatters


def _moves_written(state: State, site: Site) -> bool:
    """Say whether the result of a node shares storage that some node writes."""
    return may_alias(site.node) and state.aliases.is_mutated(site.node)


def _lowers(state: State, site: Site) -> bool:
    """Say whether an op with mixed operands runs low at O2: one is in this low dtype, and all of them fit it."""
    dtypes = {state.dtypes[o.node] for o in site.floats}
    mixed = dtypes.intersection(LOW_DTYPES) == {site.low} != dtypes
    fits = not any(o.node in state.extremes.values for o in site.floats)
    return mixed and fits and site.row.gives in ("float", "first")


# The rule: what each kind means.


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
    in_region = state.autocast or low != state.low  # an autocast region asks for the cast
    if not in_region and any(_is_cast_to_the_other(state, o.node, low) for o in cast):
        why = Code.USER_CAST("your code casts an operand to the other low dtype")
        return all_to(state, site, torch.float32, why, settled=True)
    if not state.autocast and all(o.node in state.upcast for o in floats):
        return natural(state, site, Code.USER_CAST("your code casts every operand up"), settled=True)
    extremes, values = state.extremes, [o.node for o in floats]
    fixed = all(n in extremes.fixed for n in values) and any(n in extremes.values for n in values)
    if state.aggressive and fixed:
        why = Code.POSITION("computed from nothing but integers and buffers")
        return natural(state, site, why, settled=True)
    return all_to(state, site, low, Code.LOW(site.row.reason))


def _is_cast_to_the_other(state: State, value: Node, low: object) -> bool:
    """Say whether a value is in the other low dtype because a cast of the user's made it, or what it is computed from.

    What the model holds or is given in that dtype, such as frozen parameters, is cast as autocast casts it.
    """
    visited, front = set[Node](), [value]
    while front:
        node = front.pop()
        if node in visited or state.dtypes[node] not in LOW_DTYPES or state.dtypes[node] == low:
            continue
        if row_of(node).is_cast:
            return True
        visited.add(node)
        front += node.all_input_nodes
    return False


def _fp32(state: State, site: Site, why: Reason | None = None) -> Colouring:
    """Colour an op that runs in FP32, unless its `dtype=` argument decides."""
    explicit = note_of(site.node).dtype_argument or ops.argument(site.node, "dtype")
    if site.row.dtype_arg and isinstance(explicit, torch.dtype):
        return natural(state, site.of_kind(FP32), Code.DTYPE_ARGUMENT(str(explicit)), settled=True)
    return all_to(state, site.of_kind(FP32), torch.float32, why or Code.FP32(site.row.reason))


def _promote(state: State, site: Site) -> Colouring:
    colouring = natural(state, site, Code.PROMOTE("widest operand"))
    widens = DEVICES[state.device].lists in site.row.widens
    return all_to(state, site, colouring.dtype, colouring.reason) if widens else colouring


def _follow(state: State, site: Site) -> Colouring:
    return natural(state, site, Code.FOLLOW("its operand's dtype"))


def _banned(state: State, site: Site) -> Colouring:
    raise PolicyError(
        f"{described(site.node)} is unsafe in low precision, and "
        f"autocast bans it on {state.device}: use binary_cross_entropy_with_logits on the logits, or allow it "
        f"with Policy(ops={{'{site.name}': 'fp32'}})."
    )


def _kept(state: State, site: Site) -> Colouring:
    """Colour an op that keeps its dtypes, because its rule says so or because it has no rule."""
    if not site.row.known:
        return _unknown(state, site)
    like = _like_its_reference(state, site)
    if like is not None:
        return like
    explicit = ops.argument(site.node, "dtype") if site.row.exact else None
    why = Code.DTYPE_ARGUMENT(str(explicit)) if isinstance(explicit, torch.dtype) else Code.KEEP(site.row.reason)
    colouring = keep(state, site, why)
    return colouring if colouring.operand_dtypes else replace(colouring, reason=Code.AS_WRITTEN(site.row.reason))


def _like_its_reference(state: State, site: Site) -> Colouring | None:
    """Colour an op that makes a value with the dtype of another value; None for any other op."""
    reference = dtype_reference(site.node)
    if reference is None:
        return None
    dtype = first_float(state.dtypes[reference]) or torch.float32
    return Colouring(dtype, FOLLOW, Code.FOLLOW("made with the dtype of its reference"))


def _unknown(state: State, site: Site) -> Colouring:
    """Colour an op without a rule, according to the policy's `unknown_ops`."""
    if state.policy.unknown_ops == "error":
        raise PolicyError(
            f"{described(site.node)} has no rule: register one with fxamp.register_rule, or choose another "
            "unknown_ops: 'autocast' gives it what torch.autocast would, 'keep' the dtypes that it had."
        )
    if state.policy.unknown_ops == "fp32":
        return all_to(state, site.of_kind(FP32), torch.float32, Code.UNKNOWN_OP("FP32 by policy"))
    return _like_its_reference(state, site) or keep(state, site, Code.KEEP(site.row.reason))


def _runs_under_autocast(site: Site) -> bool:
    """Say whether a call can be given a region of autocast, and it is known what comes out of it there.

    Graphs inside a higher-order op stay as they were captured; if the compiler rewrites them, no autocast may be on.
    """
    seen = note_of(site.node).autocast is not None
    if site.row.higher_order:
        return seen and not site.row.known
    inside = note_of(site.node).made_by == DECOMPOSE and site.row.gives == "first"  # whose dtype is known
    return ops.operator_of(site.node) is not None and (seen or inside or site.kind != COMPOSITE)


def _composite(state: State, site: Site) -> Colouring:
    """Colour a composite op that could not be decomposed, and is kept whole."""
    why = Code.COMPOSITE("kept whole")
    colouring = keep(state, site, why)
    dtypes = {colouring.operand_dtypes.get(o.place, state.dtypes[o.node]) for o in site.floats}
    if site.node.op == "call_function" and len(dtypes & {*ELIGIBLE}) > 1:
        return all_to(state, site, torch.float32, why)  # autocast would give them one dtype, but the graph runs without
    return colouring


_KINDS: dict[str, Callable[[State, Site], Colouring]] = {
    LOW: _low, FP32: _fp32, PROMOTE: _promote, FOLLOW: _follow, KEEP: _kept, BANNED: _banned, COMPOSITE: _composite,
}  # fmt: skip
