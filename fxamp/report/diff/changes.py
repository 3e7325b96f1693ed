"""List what changed in matched nodes, in fields and in position. Changes with one cause share one line.

`embed` gone, a new `adapter`, layers that moved up, and `rms_norm` run in FP32 by a newer torch:

    = h.6 to 11  is now  h.7 to 12  (150 nodes)
    - embed/embedding#0  colour: float32
    + adapter/linear#0  colour: bfloat16
    ! torch 2.11 to 2.12: rule rms_norm, 24 decisions: follow, bfloat16 -> fp32, float32
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from passes.contract.plan import Plan

from ...harmless import visible
from .match import Item, corresponding, in_order

PLAN_KEY, MODULES, RULE = "(plan)", "(modules)", "(rule"
STORED = "stored"  # the field of a change of what a compiled step stores in 16 bits beside
SIGNS = {"added": "+", "removed": "-", "changed": "!"}
_LABELS = {
    "colour": "runs in", "autocast_dtype": "under autocast", "kind": "rule",
    "inserted_casts": "casts inserted", "casts": "casts of the forward", "cast_bytes": "bytes cast",
    "saved_bytes": "bytes saved for backward", "low_bytes": "low, % of bytes", "low_flops": "low, % of FLOPs",
    "fp32_ops": "ops in FP32", "unknown_ops": "ops without a rule", STORED: "stored in 16 bits",
}  # fmt: skip
_TOTAL = re.compile(r"(.+?)( \(.*\))?: (.* -> .*)")  # its label, its state and its values
ORDINAL = re.compile(r"[#_]\d+$")  # of a node, among those of its op
_LAST_NUMBER = re.compile(r"\d+(?!.*\d)")


@dataclass(frozen=True)
class Place:
    """Where the user made a node."""

    file: str
    line: int


@dataclass(frozen=True)
class Change:
    """The change of one field of one node; for an added or removed node, the field is its colour or target.

    Attributes:
        kind: whether it was added, removed or changed.
        key: key of the node; in parentheses for anything else, such as a total.
        field: name of the field that differs; "position" if the node moved in the model.
        before: the old value of the field; None for a new node.
        after: the new value of the field; None for a removed node.
        nodes: keys of all nodes that this line stands for, if there are several.
    """

    kind: Literal["added", "removed", "changed"]
    key: str
    field: str
    before: str | None
    after: str | None
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Write the change as one line of the listing."""
        if self.key.startswith(RULE):
            rule, count = self.key.strip("()"), len(self.nodes)
            many = f"{count} decision{'s' * (count > 1)}"
            return visible(f"! {self.field}: {rule}, {many}: {self.before} -> {self.after}")
        return visible(f"{SIGNS[self.kind]} {self.key}  {self.said(self.field)}")

    def said(self, label: str) -> str:
        """Write the change of the field; an added or removed node has one value only."""
        values = [value for value in (self.before, self.after) if value is not None]
        return f"{label}: {' -> '.join(values)}"

    @property
    def module(self) -> str:
        """Return the path of the module that the node is in, "" for the outermost."""
        return self.key.rpartition("/")[0]


def lines(changes: Iterable[Change], places: Mapping[str, Place] | None = None) -> list[tuple[str, str]]:
    """Return (key, line) for every changed node, with all its changes and its place, and for every changed total."""
    out = []
    for kind, key, text in rows(changes):
        place = (places or {}).get(key)
        where = f"  ({place.file}:{place.line})" if place is not None else ""
        named = "" if key.startswith("(") else f"{key}  "
        out.append((key, visible(f"{SIGNS[kind]} {named}{text}{where}")))
    return out


def folded(changes: Iterable[Change], places: Mapping[str, Place]) -> list[str]:
    """Return the same lines, but nodes of one op and line of source that change alike share one, and states of a total.

    A node that changes alike in several states counts once.
    """
    totals: dict[str, dict[str, str]] = {}
    groups: dict[tuple[str, str, str], dict[str, None]] = {}
    for kind, key, text in rows(changes):
        if key == PLAN_KEY and (total := _TOTAL.fullmatch(text)):
            totals.setdefault(total[1], {})[total[2] or ""] = total[3]
            continue
        node = key.partition(":")[2] if key.partition(":")[0].isdigit() else key
        place = places.get(key) or places.get(node)
        where = f"  ({place.file}:{place.line})" if place is not None else ""
        op = ORDINAL.sub("", node.rpartition("/")[2]) if key[0] != "(" else str(len(groups))
        groups.setdefault((SIGNS[kind], f"{text}{where}", op), {})["" if key[0] == "(" else node] = None
    out = []
    for label, values in totals.items():
        whole = " (all states)" if len(values) > 1 else ""
        out.append(f"{SIGNS['changed']} {label}: {'; '.join(f'{v}{state or whole}' for state, v in values.items())}")
    for (sign, text, _), nodes in groups.items():
        first, more = next(iter(nodes)), len(nodes) - 1
        out.append(f"{sign} {first}{f' and {more} more' if more else ''}{'  ' if first else ''}{text}")
    return list(map(visible, out))


def rows(changes: Iterable[Change]) -> list[tuple[str, str, str]]:
    """Return the same as cells of a table: the kind of change, the key of the node, and the text."""
    groups: dict[tuple[str, ...], list[Change]] = {}
    for change in changes:
        alone = change.key.startswith("(")  # a change of the whole plan, not of a node
        group = (change.kind, change.key, change.field, str(len(groups))) if alone else (change.kind, change.key)
        groups.setdefault(group, []).append(change)
    return [(group[0].kind, group[0].key, _text(group)) for group in groups.values()]


def counted(changes: Iterable[Change]) -> str:
    """Say how many lines there are of each kind."""
    kinds = Counter(kind for kind, _, _ in rows(changes))
    return ", ".join(f"{kinds[kind]} {kind}" for kind in SIGNS)


def _text(changes: Sequence[Change]) -> str:
    """Write the changes of one node, in the words of a report."""
    first = changes[0]
    if first.key.startswith("(") and first.key != PLAN_KEY:
        return str(first)[2:]
    # A change of autocast's dtype is left out where the dtype that the node runs in has changed likewise.
    own = {(c.before, c.after) for c in changes if c.field == "colour"}
    told = [c for c in changes if c.field != "autocast_dtype" or (c.before, c.after) not in own]
    out = []
    for change in told:
        field, space, graph = change.field.partition(" ")  # that of a total may name its graph behind it
        label = _LABELS.get(field, field) if field != "casts" or first.key == PLAN_KEY else "casts"
        out.append(change.said(f"{label}{space}{graph}"))
    return "; ".join(out)


def compared(before: Sequence[Item], after: Sequence[Item], pairs: Mapping[int, int], shown: str) -> list[Change]:
    """Return what differs between matched nodes (after -> before), in graph order.

    For a node that one side lacks only the field `shown` is listed, which every node has.
    """
    moved = _moved(before, after, pairs)
    out = []
    for new, old in merged(len(after), len(before), pairs):
        if new < 0:
            out.append(Change("removed", before[old].key, shown, before[old].fields[shown], None))
        elif old < 0:
            out.append(Change("added", after[new].key, shown, None, after[new].fields[shown]))
        else:
            if new in moved:
                out.append(Change("changed", after[new].key, "position", *moved[new]))
            theirs = after[new].fields
            out += [
                Change("changed", after[new].key, name, value, theirs[name])
                for name, value in before[old].fields.items() if theirs.get(name, value) != value
            ]  # fmt: skip
    return out


def merged(length: int, other: int, pairs: Mapping[int, int], *, last: bool = False) -> Iterator[tuple[int, int]]:
    """Merge two lists of these lengths in the order of the first, with -1 for what one of them lacks.

    What only the other has stands right behind what it followed there, or, `last`, behind what only the first has.
    """
    rest: dict[int, list[int]] = {}
    anchor, kept = -1, set(pairs.values())
    for at in range(other):
        if at in kept:
            anchor = at
        else:
            rest.setdefault(anchor, []).append(at)
    waiting = rest.get(-1, [])
    for at in range(length):
        if at in pairs or not last:
            yield from ((-1, o) for o in waiting)
            waiting = []
        yield at, pairs.get(at, -1)
        waiting = rest.get(pairs[at], []) if at in pairs else waiting
    yield from ((-1, o) for o in waiting)


def _moved(before: Sequence[Item], after: Sequence[Item], pairs: Mapping[int, int]) -> dict[int, tuple[str, str]]:
    """Return the old and new places of nodes that have moved to another module, or in the order."""
    instead = corresponding(before, after, pairs)
    kept = in_order(sorted((old, new) for new, old in pairs.items()))
    out = {}
    for new, old in pairs.items():
        if instead[before[old].module] != after[new].module:
            out[new] = before[old].key, after[new].key
        elif (old, new) not in kept and (found := (_place(before, old), _place(after, new)))[0] != found[1]:
            out[new] = found  # of several nodes that moved together only the first is listed
    return out


def _place(items: Sequence[Item], at: int) -> str:
    return f"after {items[at - 1].key}" if at else "first"


def another_model(before: Sequence[object], after: Sequence[object], pairs: Mapping[int, int]) -> Change:
    """Return the one line that replaces all changes if the two have too little in common."""
    now = f"another model: {len(after)} nodes, {len(pairs)} of them as before"
    return Change("changed", PLAN_KEY, "model", f"{len(before)} nodes", now)


def renamed(before: Sequence[Item], after: Sequence[Item], pairs: Mapping[int, int]) -> list[Change]:
    """Return a line for each renamed module; neighbours with consecutive numbers share a line."""
    instead = corresponding(before, after, pairs)
    runs: dict[tuple[str, str, int], dict[int, list[str]]] = {}
    for new, old in sorted(pairs.items()):
        a, b = before[old].module, after[new].module
        a, b = (m.partition(":")[2] if m.partition(":")[0].isdigit() else m for m in (a, b))
        if a == b or instead[before[old].module] != after[new].module:
            continue
        left, right = a.split(".") if a else [], b.split(".") if b else []
        while left and right and left[-1] == right[-1]:
            left, right = left[:-1], right[:-1]
        a, b = ".".join(left), ".".join(right)
        first, second = _LAST_NUMBER.search(a), _LAST_NUMBER.search(b)
        number = int(first[0]) if first else 0
        step = int(second[0]) - number if first and second else 0
        shape = (a, b, 0) if not step else (_LAST_NUMBER.sub("*", a), _LAST_NUMBER.sub("*", b), step)
        runs.setdefault(shape, {}).setdefault(number if step else 0, []).append(after[new].key)
    return [Change(
        "changed", MODULES, "path", _numbered(a, list(at), 0), _numbered(b, list(at), step),
        tuple(key for keys in at.values() for key in keys),
    ) for (a, b, step), at in runs.items()]  # fmt: skip


def _numbered(path: str, numbers: Sequence[int], step: int) -> str:
    first, *others = sorted(number + step for number in numbers)
    text = path.replace("*", str(first), 1) or "(model)"
    if others == [*range(first + 1, first + 1 + len(others))]:
        return f"{text} to {others[-1]}" if others else text
    return ", ".join((text, *map(str, others)))


def by_rule(before: Plan, after: Plan, changes: Sequence[Change], ops: Mapping[str, str]) -> list[Change]:
    """Merge into one line all decisions on an op (`ops`, by key) whose rule a new torch or fxamp has changed."""
    versions = _versions(before, after)
    if versions is None or before.policy != after.policy:
        return list(changes)
    of_rule: dict[str, list[Change]] = {ops[c.key]: [] for c in changes if c.field == "kind" and c.kind == "changed"}
    rest: list[Change] = []
    for change in changes:
        mine = change.kind == "changed" and change.field not in ("position", "casts")
        (of_rule.get(ops.get(change.key, ""), rest) if mine else rest).append(change)
    merged = []
    for op, found in sorted(of_rule.items()):
        sides = [{c.field: (c.before, c.after)[side] for c in reversed(found)} for side in (0, 1)]
        was, now = (", ".join(str(side[f]) for f in ("kind", "colour") if f in side) for side in sides)
        nodes = tuple(dict.fromkeys(c.key for c in found))
        merged.append(Change("changed", f"{RULE} {op})", versions, was, now, nodes))
    return [*merged, *rest]


def _versions(before: Plan, after: Plan) -> str | None:
    """Name the two versions of torch, or else of fxamp, that made two plans; None if they are the same."""
    old, new = (".".join(p.torch_version.split(".")[:2]) for p in (before, after))
    if old != new:
        return f"torch {old} to {new}"
    old, new = before.fxamp_version, after.fxamp_version
    return f"fxamp {old} to {new}" if old and new and old != new else None
