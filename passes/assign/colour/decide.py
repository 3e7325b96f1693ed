"""What decides on a node, in order: the author, the policy, an autocast region, the level, at last the rule.

The author comes first with casts, writes and reads of bits, then the policy with its overrides. Under autocast neither
is asked but for casts and writes, which torch obeys too.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ...colouring import AS_AUTOCAST, Colouring
from ...contract.policy import module_override, op_override
from ...contract.reasons import Code
from ...graph.values import ANY, may_alias, mutated_operands, out_operands
from ...graph.values import LOW as LOW_DTYPES
from ...ops import ops
from ...ops.facts import rule_of
from ...ops.rules import FOLLOW, FP32, LOW, PROMOTE, Rule
from .extremes import converts
from .kinds import by_kind, fp32, in_place, user_cast
from .levels import by_level
from .operand_casts import all_to, keep, natural
from .state import State, first_float


def decide(state: State, node: Node, name: str, floats: list[ops.Operand]) -> Colouring | None:
    """Return what a node runs in, and why; None for one that has no say in it."""
    row, kind = rule_of(node, state.device, state.low)
    if name in ("to", "type_as"):
        return user_cast(state, node)
    if node.meta.get(AS_AUTOCAST):
        return _as_autocast(state, node, floats)
    if "read" in node.meta:
        why = Code.DTYPE_ARGUMENT(f"{node.meta['read']}, as read under autocast")
        return natural(state, row, floats, FOLLOW, why)
    if mutated_operands(node) and (name.endswith("_") or out_operands(node) or name == "setitem"):
        return in_place(state, node, row, floats)
    if not state.autocast and state.aliases.find(node) in state.pinned:
        why = Code.MUTATED("its storage is written, and shared with FP32 values")
        if not state.aliases.is_mutated(node):
            why = Code.KEEP("the program reads its bits, how many it has, or its dtype for what is written")
        elif may_alias(node):
            return natural(state, row, floats, kind, why)  # a cast before a view would part it from what is written
        # Not FP32: what the author made low shares its storage with no cast of it.
        return keep(state, node, floats, kind, why)
    moves_written = may_alias(node) and state.aliases.is_mutated(node)
    if not state.autocast and not moves_written and (pinned := _override(state, node, name, row, floats)):
        return pinned
    low, region = state.low, node.meta.get("autocast_region")
    if region is not None and region[0] == state.device:
        if not region[1]:
            return natural(state, row, floats, "region", Code.AUTOCAST_REGION("the model disables autocast here"))
        low = region[2] or low
    held = {state.dtypes[o.node] for o in floats if isinstance(state.dtypes[o.node], torch.dtype)}
    # Beside one of 64 bits autocast goes on casting the others to FP32.
    if torch.float64 in held and not (kind == FP32 and held & {*LOW_DTYPES}):
        return natural(state, row, floats, kind, Code.FLOAT64("left as it is"))
    if state.autocast:
        return by_kind(state, node, name, row, kind, floats, low)
    if node in state.islands:
        return fp32(state, node, row, floats, Code.ISLAND("a norm written by hand is FP32 throughout"))
    if state.aggressive:
        values = [o.node for o in floats]
        extreme = any(n in state.extremes.values for n in values) or converts(node, name, state.dtypes)
        by_rule, kind = kind, by_level(state.policy, node, row, kind, values, extreme)
        if kind == LOW != by_rule and any(state.dtypes[n] is ANY for n in values):
            kind = PROMOTE  # what has an unknown dtype may be complex, or an index
    if kind in (PROMOTE, FOLLOW) and not moves_written and _lowers(state, row, floats):
        code = Code.O3_LOW if state.policy.level.rounds_sensitive else Code.O2_LOW
        why = code("not sensitive, beside low operands")
        return all_to(state, low, row, floats, kind, why)
    return by_kind(state, node, name, row, kind, floats, low)


def _as_autocast(state: State, node: Node, floats: list[ops.Operand]) -> Colouring:
    """Give an autograd function, which runs under autocast, what it read there: then it gives what it gave there."""
    seen = {(o.name, o.index): o.node.meta.get("autocast", state.original[o.node]) for o in floats}
    casts = {at: seen[at] for at, o in zip(seen, floats, strict=True) if state.dtypes[o.node] != seen[at]}
    dtype = first_float(node.meta["autocast"]) or torch.float32
    return Colouring(dtype, AS_AUTOCAST, Code.AS_AUTOCAST("runs under torch.autocast, on what it read there"), casts)


def _override(state: State, node: Node, name: str, row: Rule, floats: list[ops.Operand]) -> Colouring | None:
    """Return what the policy says of the module that a node was made in, or else of its op."""
    found = module_override(state.policy, state.stacks.get(node, ())) if state.policy.modules else None
    found = found or (op_override(state.policy, name) if state.policy.ops else None)
    if found is None:
        return None
    reason = Code.OVERRIDE(str(found))
    if found.colour == "keep":
        return keep(state, node, floats, "override", reason)
    return all_to(state, state.low if found.colour == "low" else torch.float32, row, floats, "override", reason)


def _lowers(state: State, row: Rule, floats: list[ops.Operand]) -> bool:
    """Say whether an op with mixed operands runs low at O2: one is low, none is a number that low cannot hold."""
    if not state.aggressive or row.out[0] in ("bool", "int", "complex"):
        return False
    held = {state.dtypes[o.node] for o in floats}
    mixed = any(d in LOW_DTYPES for d in held) and any(d not in LOW_DTYPES for d in held)
    return mixed and ANY not in held and not any(o.node in state.extremes.values for o in floats)
