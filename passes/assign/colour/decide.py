"""What decides on a node, in this order: the user's code, the policy, an autocast region, the level, and last the rule.

Casts, in-place writes and reads of bits in the user's code come first, then the overrides of the policy. In the
simulation of `torch.autocast` only casts and in-place writes come before the rule, since autocast has neither policy
nor level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.fx import Node

from ...colouring import Colouring
from ...contract.policy import module_override, op_override
from ...contract.reasons import Code
from ...graph.aliases import is_in_place
from ...graph.notes import note_of, region_on
from ...graph.values import ANY, LOW_DTYPES, may_alias, mutated_operands, out_operands
from ...ops import ops
from ...ops.facts import rule_of
from ...ops.rules import FOLLOW, FP32, LOW, PROMOTE
from .extremes import converts
from .kinds import by_kind, fp32, in_place, lacks, refused, user_cast
from .levels import by_level
from .operand_casts import all_to, as_autocast, keep, natural
from .state import Site, State

Decider = Callable[[State, Site], "Colouring | None"]


def site_of(state: State, node: Node, name: str, floats: Iterable[ops.Operand]) -> Site:
    """Return a call with its row of the op table, and with the low dtype that applies to it."""
    row, kind = rule_of(node, state.device, state.low)
    region = region_on(node, state.device)
    return Site(node, name, row, kind, tuple(floats), (region and region[2]) or state.low)


def decide(state: State, site: Site) -> Colouring | None:
    """Return the dtype that a node runs in, and why; None if there is nothing to decide."""
    if site.row.is_cast:
        return user_cast(state, site)
    told = _first((_under_autocast, _as_read), state, site)
    if told is None and _writes(site):
        return in_place(state, site)
    return told or _first(_DECIDERS, state, site) or _ruled(state, site)


def _first(deciders: Iterable[Decider], state: State, site: Site) -> Colouring | None:
    """Return the answer of the first decider that has one."""
    return next((found for decider in deciders if (found := decider(state, site)) is not None), None)


def _under_autocast(state: State, site: Site) -> Colouring | None:
    """Give the operands and outputs of an autograd function the dtypes that they have under autocast."""
    return as_autocast(state, site) if note_of(site.node).under_autocast else None


def _as_read(state: State, site: Site) -> Colouring | None:
    """Follow a dtype argument that the user's code took from the dtype of a value."""
    read = note_of(site.node).read
    if read is None:
        return None
    why = Code.DTYPE_ARGUMENT(f"under autocast your code reads {read} here")
    return natural(state, site.of_kind(FOLLOW), why, settled=True)


def _writes(site: Site) -> bool:
    """Say whether the purpose of a call is to write to one of its arguments."""
    to_write = is_in_place(site.name) or bool(out_operands(site.node))
    return to_write and bool(mutated_operands(site.node))


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
    found = op_override(policy, state.named[site.node]) if site.node in state.named else None
    found = found or (module_override(policy, state.stacks.get(site.node, ())) if policy.modules else None)
    found = found or (op_override(policy, site.name) if policy.ops else None)
    if found is None:
        return None
    if found.colour == "low" and lacks(state, site):
        raise refused(state, site, found)
    site, reason = site.of_kind("override"), Code.OVERRIDE(str(found))
    if found.colour == "keep":
        return keep(state, site, reason)
    return all_to(state, site, state.low if found.colour == "low" else torch.float32, reason)


def _outside_autocast(state: State, site: Site) -> Colouring | None:
    region = region_on(site.node, state.device)
    if region is None or region[1]:
        return None
    return natural(state, site.of_kind("region"), Code.AUTOCAST_REGION("the model disables autocast here"))


def _beside_float64(state: State, site: Site) -> Colouring | None:
    """Leave an op with a float64 operand as it is, unless it is an FP32 op that also reads low values."""
    held = {state.dtypes[o.node] for o in site.floats}
    if torch.float64 not in held or (site.kind == FP32 and not held.isdisjoint(LOW_DTYPES)):
        return None
    return natural(state, site, Code.FLOAT64("left as it is"), settled=True)


_DECIDERS = (_pinned, _overridden, _outside_autocast, _beside_float64)


def _ruled(state: State, site: Site) -> Colouring:
    """Return the decision of the rule, as the level interprets it."""
    if state.autocast:
        return by_kind(state, site)
    if site.node in state.islands:
        return fp32(state, site, Code.ISLAND("a norm written by hand is FP32 throughout"))
    if state.aggressive:
        site = _at_level(state, site)
    if site.kind in (PROMOTE, FOLLOW) and not _moves_written(state, site) and _lowers(state, site):
        code = Code.O3_LOW if state.policy.level.rounds_sensitive else Code.O2_LOW
        return all_to(state, site, site.low, code("not sensitive, and an operand is low"))
    return by_kind(state, site)


def _at_level(state: State, site: Site) -> Site:
    """Return a call with the kind that a level beyond autocast gives it."""
    values = [o.node for o in site.floats]
    if values and all(state.dtypes[n] in LOW_DTYPES and state.dtypes[n] != site.low for n in values):
        return site  # all of it is in the other low dtype, which the user chose: there are no bytes to save
    extreme = any(n in state.extremes.values for n in values) or converts(site.node, state.dtypes)
    kind = by_level(state.policy, site, extreme)
    if kind == LOW != site.kind and any(state.dtypes[n] is ANY for n in values):
        kind = PROMOTE  # a value of unknown dtype may be complex, or an index
    return site.of_kind(kind)


def _moves_written(state: State, site: Site) -> bool:
    """Say whether the result of a node shares storage that some node writes."""
    return may_alias(site.node) and state.aliases.is_mutated(site.node)


def _lowers(state: State, site: Site) -> bool:
    """Say whether an op with mixed operands runs low at O2: one is in this low dtype, and all of them fit it."""
    if not state.aggressive or site.row.gives not in ("float", "first"):
        return False
    held = {state.dtypes[o.node] for o in site.floats}
    mixed = held.intersection(LOW_DTYPES) == {site.low} != held
    return mixed and ANY not in held and not any(o.node in state.extremes.values for o in site.floats)
