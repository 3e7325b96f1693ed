"""What decides on a node: the user's code, the policy, an autocast region, and last the rule of its op.

Casts, in-place writes and reads of bits in the user's code come first. Which of the others are asked, and in which
order, is a matter of the strategy (`strategies.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch.fx import Node

from ...contract.devices import DEVICES
from ...contract.errors import PolicyError
from ...contract.policy import module_override, op_override
from ...contract.reasons import CAST, OVERRIDE, REGION, Code, Reason
from ...form import Choice, Clamp, SetDtype
from ...graph.aliases import is_in_place, may_alias, mutated_operands, out_operands
from ...graph.notes import DECOMPOSE, note_of, region_on
from ...graph.values import ELIGIBLE, LOW_DTYPES, described, dtype_reference, first_float, is_floating, literal_dtype
from ...ops import numbers, ops
from ...ops.facts import rule_of
from ...ops.rules import BANNED, COMPOSITE, FOLLOW, FP32, KEEP, LOW, PROMOTE
from .kernels import lacks_low_kernel
from .operand_casts import all_to, castable, keep, natural, operand_casts
from .simulate import Simulation, Site
from .user_casts import Intent, meaning


def site_of(run: Simulation, node: Node, floats: Iterable[ops.Operand]) -> Site:
    """Return a call with its row of the op table, and with the low dtype that applies to it."""
    row, kind = rule_of(node, run.device, run.low)
    region = region_on(node, run.device)
    low = (
        torch.float16
        if run.device in row.fp16_on and not run.policy.level.stores_low
        else (region and region[2]) or run.low
    )
    return Site(node, row, kind, tuple(floats), low)


def decide(run: Simulation, site: Site) -> Choice | None:
    """Return the dtype that a node runs in, and why; None if there is nothing to decide."""
    if site.row.is_cast:
        return _user_cast(run, site)
    choice = _as_read(run, site)
    if choice is None and (is_in_place(site.node) or out_operands(site.node)) and mutated_operands(site.node):
        return _in_place(run, site)
    return choice or run.rules.decide(run, site)


# The user's code.


def _user_cast(run: Simulation, site: Site) -> Choice | None:
    """Colour a user cast; a cast to a dtype that is not floating has no colour."""
    node = site.node
    intent = _intent(run, node)
    if intent.dtype is None or not intent.dtype.is_floating_point:
        return None
    if intent.literal and intent.dtype == torch.float32:
        run.upcast.add(node)
    baked = literal_dtype(node)
    edits = (SetDtype(intent.dtype),) if baked is not None and baked != intent.dtype else ()
    value = next(ops.operands(node))
    named = intent.literal and note_of(node).cast != "autocast"
    number = 0.0 if named else run.extremes.constants.get(value.node, 0.0)
    if intent.dtype not in LOW_DTYPES or not numbers.is_extreme(number, intent.dtype):
        reason = site.of_kind(FOLLOW if intent.free else CAST).says(intent.reason)
        return Choice(intent.dtype, reason, edits)
    if not numbers.is_lowest(number):
        reason = Reason(Code.LITERAL, "a number does not fit the low dtype", CAST)
        return Choice(torch.float32, reason, (SetDtype(torch.float32),))
    reason = Reason(Code.LITERAL, "finfo(float32).min becomes the minimum of the low dtype", CAST)
    return Choice(intent.dtype, reason, (*edits, Clamp(value.place)))


def _intent(run: Simulation, node: Node) -> Intent:
    """Return what a cast means; a dtype read under autocast does not count if the policy forces FP32."""
    forced = module_override(run.policy, run.stacks.get(node, ())) if run.policy.modules else None
    observed = None if forced is not None and forced.colour == "fp32" else note_of(node).read
    written = run.aliases.find(node) in run.pinned  # then a cast that was no copy must stay none
    return meaning(node, run.original, run.dtypes, observed, exact=written or not run.policy.level.stores_low)


def _as_read(run: Simulation, site: Site) -> Choice | None:
    """Colour an op that no rule fits as under autocast, and a factory as the dtype that the user's code read there."""
    read, whole = note_of(site.node).read, note_of(site.node).under_autocast
    choice = overridden(run, site) if read is not None or whole else None
    if read is not None and (choice is None or choice.dtype != torch.float32):
        why = Code.DTYPE_ARGUMENT(f"under autocast your code reads {read} here")
        return Choice(read, site.of_kind(FOLLOW).says(why, final=True), (SetDtype(read),))
    return choice or ((outside_autocast(run, site) or run.rules.whole(run, site)) if whole else None)


def _in_place(run: Simulation, site: Site) -> Choice | None:
    """Colour an op that writes to a tensor, `out=` or else its first argument: the dtype of that tensor decides."""
    first, out = site.node.args[0] if site.node.args else None, out_operands(site.node)
    targets = out or [t for t in (first if isinstance(first, (list, tuple)) else [first]) if isinstance(t, Node)]
    dtype = next((d for t in targets if is_floating(d := run.dtypes[t])), None)
    if not isinstance(dtype, torch.dtype):
        return None
    strict = site.row.same_dtype or (bool(out) and not site.row.casts_out)  # what is written must have its dtype
    sources = [o for o in site.floats if strict and o.node not in targets and run.dtypes[o.node] in ELIGIBLE]
    casts = operand_casts(run.dtypes, sources, lambda o: dtype)
    return Choice(dtype, site.of_kind(PROMOTE).says(Code.IN_PLACE("its target's dtype")), casts)


# The policy, regions and storage.


def pinned(run: Simulation, site: Site) -> Choice | None:
    """Keep the dtype of a value that shares storage with a written one, or whose bits or gradients depend on it."""
    node = site.node
    if run.aliases.find(node) not in run.pinned:
        return None
    why = Code.MUTATED(Code.MUTATED.meaning)
    if not run.aliases.is_mutated(node):
        why = Code.KEEP(
            "your code reads its bits or element size, writes numbers into it that depend on its dtype, or casts it "
            "where gradients are off"
        )
    elif may_alias(node):
        # A cast before a view makes a copy, which writes would not reach.
        return natural(run, site, why, final=True)
    # Not FP32: a cast of a value that the user made low is a copy, which writes would not reach.
    return keep(run, site, why)


def overridden(run: Simulation, site: Site) -> Choice | None:
    """Return the policy's override of a node itself, of the module that it was made in, or else of its op."""
    if moves_written(run, site):
        return None
    policy = run.policy
    override = op_override(policy, run.named.get(site.node, ""))
    override = override or (module_override(policy, run.stacks.get(site.node, ())) if policy.modules else None)
    override = override or op_override(policy, ops.name(site.node))
    if override is None:
        return None
    if override.colour == "low" and lacks_low_kernel(run, site.node, site.row, site.low):
        whole = "" if override.kind == "op" else ", which the override of its module covers: name narrower modules, or"
        raise PolicyError(
            f"{override}: {described(site.node)} has no kernel for {site.low} on this {run.device}{whole or ';'} "
            "leave it FP32."
        )
    reason = Reason(Code.OVERRIDE, str(override), OVERRIDE)
    if override.colour == "keep":
        return keep(run, site, reason)
    return all_to(run, site, run.low if override.colour == "low" else torch.float32, reason)


def outside_autocast(run: Simulation, site: Site) -> Choice | None:
    """Leave an op as it is where the model disables autocast, or whose operands are on another device."""
    region, away = region_on(site.node, run.device), {o.node in run.elsewhere for o in site.floats} == {True}
    if (region is None or region[1]) and not away:
        return None
    why = Code.AUTOCAST_REGION("the model disables autocast here")
    why = Code.AS_WRITTEN("autocast casts nothing on its device") if away else why
    return natural(run, site.of_kind(REGION), why)


def beside_float64(run: Simulation, site: Site) -> Choice | None:
    """Leave an op with a float64 operand as it is, unless it is an FP32 op that also reads low values."""
    dtypes = {run.dtypes[o.node] for o in site.floats}
    if torch.float64 not in dtypes or (site.kind == FP32 and not dtypes.isdisjoint(LOW_DTYPES)):
        return None
    return natural(run, site, Code.FLOAT64("left as it is"), final=True)


def moves_written(run: Simulation, site: Site) -> bool:
    """Say whether the result of a node shares storage that some node writes."""
    return may_alias(site.node) and run.aliases.is_mutated(site.node)


# The rule: what each kind means.


def without_kernel(run: Simulation, site: Site) -> Choice:
    """Run an op without a low kernel in FP32, unless its operands have their dtypes from before conversion."""
    why = f"no kernel for {site.low} on this {run.device}"
    if all(run.dtypes[o.node] == run.original[o.node] for o in site.floats):
        return keep(run, site.of_kind(KEEP), Code.AS_WRITTEN(why))
    return all_to(run, site.of_kind(KEEP), torch.float32, Code.KEEP(why))


def _low(run: Simulation, site: Site) -> Choice:
    """Colour a `low` op low, unless the user upcast all operands, or all hold numbers out of the low range."""
    floats, low = site.floats, site.low
    cast = [o for o in floats if castable(run, o, site.row, low)]
    if not cast:
        return natural(run, site, Code.NO_OPERAND("no operand is cast"), final=True)
    return run.rules.exempt(run, site, cast) or all_to(run, site, low, Code.LOW(site.row.reason))


def fp32(run: Simulation, site: Site, why: Reason | None = None) -> Choice:
    """Colour an op that runs in FP32, unless its `dtype=` argument decides."""
    explicit = note_of(site.node).dtype_argument or ops.argument(site.node, "dtype")
    if site.row.dtype_arg and isinstance(explicit, torch.dtype):
        return natural(run, site.of_kind(FP32), Code.DTYPE_ARGUMENT(str(explicit)), final=True)
    return all_to(run, site.of_kind(FP32), torch.float32, why or Code.FP32(site.row.reason))


def _promote(run: Simulation, site: Site) -> Choice:
    choice = natural(run, site, Code.PROMOTE("widest operand"))
    widens = DEVICES[run.device].lists in site.row.widens
    return all_to(run, site, choice.dtype, choice.reason) if widens else choice


def _follow(run: Simulation, site: Site) -> Choice:
    return natural(run, site, Code.FOLLOW("its operand's dtype"))


def _banned(run: Simulation, site: Site) -> Choice:
    raise PolicyError(
        f"{described(site.node)} is unsafe in low precision, and "
        f"autocast bans it on {run.device}: use binary_cross_entropy_with_logits on the logits, or allow it "
        f"with Policy(ops={{'{ops.name(site.node)}': 'fp32'}})."
    )


def _kept(run: Simulation, site: Site) -> Choice:
    """Colour an op that keeps its dtypes, because its rule says so or because it has no rule."""
    if not site.row.known:
        return _unknown(run, site)
    like = _like_its_reference(run, site)
    if like is not None:
        return like
    explicit = ops.argument(site.node, "dtype") if site.row.exact else None
    why = Code.DTYPE_ARGUMENT(str(explicit)) if isinstance(explicit, torch.dtype) else Code.KEEP(site.row.reason)
    choice = keep(run, site, why)
    written = choice.reason.because(Code.AS_WRITTEN(site.row.reason))
    return choice if choice.casts else replace(choice, reason=written)


def _like_its_reference(run: Simulation, site: Site) -> Choice | None:
    """Colour an op that makes a value with the dtype of another value; None for any other op."""
    reference = dtype_reference(site.node)
    if reference is None:
        return None
    dtype = first_float(run.dtypes[reference]) or torch.float32
    return Choice(dtype, site.of_kind(FOLLOW).says(Code.FOLLOW("made with the dtype of its reference")))


def _unknown(run: Simulation, site: Site) -> Choice:
    """Colour an op without a rule, according to the policy's `unknown_ops`."""
    if run.policy.unknown_ops == "error":
        raise PolicyError(
            f"{described(site.node)} has no rule: register one with fxamp.register_rule, or choose another "
            "unknown_ops: 'autocast' gives it what torch.autocast would, 'keep' the dtypes that it had."
        )
    if run.policy.unknown_ops == "fp32":
        return all_to(run, site.of_kind(FP32), torch.float32, Code.UNKNOWN_OP("FP32 by policy"))
    return _like_its_reference(run, site) or keep(run, site, Code.KEEP(site.row.reason))


def runs_whole(site: Site) -> bool:
    """Say whether no rule covers a call that can be given a region of autocast, of known results.

    Graphs inside a higher-order op stay as they were captured; if the compiler rewrites them, no autocast may be on.
    """
    if site.kind != COMPOSITE and site.row.known:
        return False
    seen = note_of(site.node).autocast is not None
    if site.row.higher_order:
        return seen and not site.row.known
    inside = note_of(site.node).made_by == DECOMPOSE and site.row.gives == "first"  # whose dtype is known
    return ops.operator_of(site.node) is not None and (seen or inside or site.kind != COMPOSITE)


def _composite(run: Simulation, site: Site) -> Choice:
    """Colour a composite op that could not be decomposed, and is kept whole."""
    why = Code.COMPOSITE("kept whole")
    choice = keep(run, site, why)
    dtypes = {choice.casts.get(o.place, run.dtypes[o.node]) for o in site.floats}
    if site.node.op == "call_function" and len(dtypes & {*ELIGIBLE}) > 1:
        return all_to(run, site, torch.float32, why)  # autocast would give them one dtype, but the graph runs without
    return choice


KINDS: dict[str, Callable[[Simulation, Site], Choice]] = {
    LOW: _low, FP32: fp32, PROMOTE: _promote, FOLLOW: _follow, KEEP: _kept, BANNED: _banned, COMPOSITE: _composite,
}  # fmt: skip
