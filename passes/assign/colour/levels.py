"""How levels beyond autocast change a rule: O2 runs ops low that are not sensitive, O3 all that have a low kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...contract.policy import Policy
from ...ops.facts import accumulates, facts_of, is_as_good_as_rounded, lacks_low
from ...ops.rules import BANNED, COMPOSITE, FOLLOW, FP32, KEEP, LOW, PROMOTE, Rule
from .state import Site


def by_level(policy: Policy, site: Site, extreme: bool) -> str:
    """Return the kind of a node at O2 or O3.

    Args:
        policy: with dtype and device filled in.
        site: the call, with the kind that its rule has on the device.
        extreme: one of its operands holds what the low dtype cannot.
    """
    device, node, row, kind = policy.device or "cpu", site.node, site.row, site.kind
    low: Any = policy.dtype
    if kind in (LOW, KEEP, BANNED, COMPOSITE):
        return kind
    if lacks_low(node, row, device) or row.no_low_backward:
        return FP32
    several = PROMOTE if kind == PROMOTE or len(site.floats) > 1 else FOLLOW
    if policy.level.rounds_sensitive and not extreme:
        return LOW if row.gives in ("float", "first") and not row.commutes else several
    if row.loss:  # FP32, except a loss that only selects values
        return FOLLOW if facts_of(node, device, low).commutes_forward else FP32
    if accumulates(node, row):
        return FP32
    if row.sensitive and not _is_relieved(node, row, device, low):
        return FP32
    return several if kind == FP32 else kind


def _is_relieved(node: Node, row: Rule, device: str, low: Any) -> bool:
    """Say whether a sensitive op is safe in low: its errors are those of a rounding, and low has the range it needs."""
    if row.sensitive == "range" and low is not torch.bfloat16:
        return False
    return is_as_good_as_rounded(node, row.name, device, low)
