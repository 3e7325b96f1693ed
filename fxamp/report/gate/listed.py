"""Write changes as lines, in the words of a report: one line for each node and each total that changed.

! bytes saved for backward: 272 -> 296
! /softmax#0  runs in: bfloat16 -> float32; rule: follow -> fp32
+ /exp#0  runs in: float32
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..diff.changes import PLAN_KEY, Change
from ..forms.harmless import visible

WAY_OUT = "If this is intended, run fxamp check --update with the same arguments, and commit what it writes."
_LABELS = {
    "colour": "runs in", "autocast_dtype": "under autocast", "kind": "rule",
    "inserted_casts": "casts inserted", "casts": "casts after elimination", "cast_bytes": "bytes cast",
    "saved_bytes": "bytes saved for backward", "low_bytes": "low, % of bytes", "low_flops": "low, % of FLOPs",
    "fp32_ops": "ops in FP32", "unknown_ops": "ops without a rule",
}  # fmt: skip
_SIGNS = {"added": "+", "removed": "-", "changed": "!"}


def _label(change: Change) -> str:
    """Return the name of the changed field in reports."""
    if change.field == "casts" and change.key != PLAN_KEY:
        return "casts"
    return _LABELS.get(change.field, change.field)


def lines(changes: Iterable[Change]) -> list[tuple[str, str]]:
    """Return (key, line) for every changed node, with all its changes in one line, and for every changed total."""
    return [(group[0].key, _line(group)) for group in _groups(changes)]


def rows(changes: Iterable[Change]) -> list[tuple[str, str, str]]:
    """Return the same as cells of a table: the kind of change, the key of the node, and the text."""
    return [(group[0].kind, group[0].key, "; ".join(map(_said, _telling(group)))) for group in _groups(changes)]


def counted(changes: Iterable[Change]) -> str:
    """Say how many lines there are of each kind."""
    signs = Counter(line[0] for _, line in lines(changes))
    return ", ".join(f"{signs[sign]} {kind}" for kind, sign in _SIGNS.items())


def _groups(changes: Iterable[Change]) -> list[list[Change]]:
    groups: dict[tuple[str, ...], list[Change]] = {}
    for change in changes:
        alone = change.key.startswith("(")  # a change of the whole plan, not of a node
        group = (change.kind, change.key, change.field, str(len(groups))) if alone else (change.kind, change.key)
        groups.setdefault(group, []).append(change)
    return list(groups.values())


def _line(changes: Sequence[Change]) -> str:
    first = changes[0]
    if first.key.startswith("(") and first.key != PLAN_KEY:
        return str(first)
    name = "" if first.key == PLAN_KEY else f"{first.key}  "
    return visible(f"{_SIGNS[first.kind]} {name}{'; '.join(map(_said, _telling(changes)))}")


def _said(change: Change) -> str:
    if change.before is None or change.after is None:
        return f"{_label(change)}: {change.after if change.before is None else change.before}"
    return f"{_label(change)}: {change.before} -> {change.after}"


def _telling(changes: Sequence[Change]) -> list[Change]:
    """Leave out a change of autocast's dtype if the dtype that the node runs in has changed likewise."""
    own = {(c.before, c.after) for c in changes if c.field == "colour"}
    return [c for c in changes if c.field != "autocast_dtype" or (c.before, c.after) not in own]
