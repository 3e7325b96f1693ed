"""List what changed in matched nodes, in fields and in position. Changes with one cause share one line.

`embed` gone, a new `adapter`, and `rms_norm` run in FP32 by a newer torch:

    - embed/embedding#0  colour: float32
    + adapter/linear#0  colour: bfloat16
    ! torch 2.11 to 2.12: rule rms_norm, 24 decisions: follow, bfloat16 -> fp32, float32
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from passes.contract.plan import Plan

from ..forms.harmless import visible
from .match import Item, Matching, corresponding
from .sequences import in_order

PLAN_KEY, MODULES, RULE = "(plan)", "(modules)", "(rule"
SIGNS = {"added": "+", "removed": "-", "changed": "!"}
_LABELS = {
    "colour": "runs in", "autocast_dtype": "under autocast", "kind": "rule",
    "inserted_casts": "casts inserted", "casts": "casts after elimination", "cast_bytes": "bytes cast",
    "saved_bytes": "bytes saved for backward", "low_bytes": "low, % of bytes", "low_flops": "low, % of FLOPs",
    "fp32_ops": "ops in FP32", "unknown_ops": "ops without a rule",
}  # fmt: skip


class Place(Protocol):
    """Where the user made a node."""

    @property
    def file(self) -> str: ...  # noqa: D102 - a field
    @property
    def line(self) -> int: ...  # noqa: D102 - a field


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
        return visible(f"{SIGNS[self.kind]} {self.key}  {said(self, self.field)}")

    @property
    def counted(self) -> tuple[str, ...]:
        """Return the keys of the nodes that have changed; a renamed module is one change."""
        return self.nodes if self.key.startswith(RULE) else (self.key,)

    @property
    def module(self) -> str:
        """Return the path of the module that the node is in, "" for the outermost."""
        return self.key.rpartition("/")[0]


def said(change: Change, label: str) -> str:
    """Write the change of a field; an added or removed node has one value only."""
    if change.before is None or change.after is None:
        return f"{label}: {change.after if change.before is None else change.before}"
    return f"{label}: {change.before} -> {change.after}"


def lines(changes: Iterable[Change], places: Mapping[str, Place] | None = None) -> list[tuple[str, str]]:
    """Return (key, line) for every changed node, with all its changes in one line, and for every changed total.

    Args:
        changes: what changed.
        places: the user's lines of nodes, by key; written behind the line of a node.
    """
    out = []
    for kind, key, text in rows(changes):
        place = (places or {}).get(key)
        where = f"  ({place.file}:{place.line})" if place is not None else ""
        named = "" if key.startswith("(") else f"{key}  "
        out.append((key, visible(f"{SIGNS[kind]} {named}{text}{where}")))
    return out


def rows(changes: Iterable[Change]) -> list[tuple[str, str, str]]:
    """Return the same as cells of a table: the kind of change, the key of the node, and the text."""
    return [(group[0].kind, group[0].key, _text(group)) for group in _groups(changes)]


def counted(changes: Iterable[Change]) -> str:
    """Say how many lines there are of each kind."""
    kinds = Counter(kind for kind, _, _ in rows(changes))
    return ", ".join(f"{kinds[kind]} {kind}" for kind in SIGNS)


def _groups(changes: Iterable[Change]) -> list[list[Change]]:
    groups: dict[tuple[str, ...], list[Change]] = {}
    for change in changes:
        alone = change.key.startswith("(")  # a change of the whole plan, not of a node
        group = (change.kind, change.key, change.field, str(len(groups))) if alone else (change.kind, change.key)
        groups.setdefault(group, []).append(change)
    return list(groups.values())


def _text(changes: Sequence[Change]) -> str:
    """Write the changes of one node, in the words of a report."""
    first = changes[0]
    if first.key.startswith("(") and first.key != PLAN_KEY:
        return str(first)[2:]
    # A change of autocast's dtype is left out where the dtype that the node runs in has changed likewise.
    own = {(c.before, c.after) for c in changes if c.field == "colour"}
    told = [c for c in changes if c.field != "autocast_dtype" or (c.before, c.after) not in own]
    return "; ".join(said(c, _label(c)) for c in told)


def _label(change: Change) -> str:
    """Return the name of the changed field in reports; that of a total may name its graph behind it."""
    field, space, graph = change.field.partition(" ")
    if field == "casts" and change.key != PLAN_KEY:
        return "casts"
    return f"{_LABELS.get(field, field)}{space}{graph}"


def compared(before: Sequence[Item], after: Sequence[Item], pairs: Mapping[int, int], shown: str) -> list[Change]:
    """Return what differs, in graph order; for a node that one side lacks, only the field `shown` is listed.

    Args:
        before: nodes of one side.
        after: nodes of the other.
        pairs: places of matched nodes, after -> before.
        shown: a field that every node has.
    """
    twin = {old: new for new, old in pairs.items()}
    moved = _moved(before, after, pairs)
    out = []
    for old, new in _merged(len(before), len(after), twin):
        if new is None and old is not None:
            out.append(Change("removed", before[old].key, shown, before[old].fields[shown], None))
        elif old is None and new is not None:
            out.append(Change("added", after[new].key, shown, None, after[new].fields[shown]))
        elif old is not None and new is not None:
            if new in moved:
                out.append(Change("changed", after[new].key, "position", *moved[new]))
            theirs = after[new].fields
            out += [
                Change("changed", after[new].key, name, value, theirs[name])
                for name, value in before[old].fields.items() if theirs.get(name, value) != value
            ]  # fmt: skip
    return out


def _merged(old: int, new: int, twin: Mapping[int, int]) -> Iterator[tuple[int | None, int | None]]:
    """Merge two lists in the order of the second; a removed item follows the item that it followed in the first."""
    gone: dict[int, list[int]] = {}
    anchor = -1
    for at in range(old):
        if at in twin:
            anchor = at
        else:
            gone.setdefault(anchor, []).append(at)
    yield from ((at, None) for at in gone.get(-1, ()))
    partner = {n: o for o, n in twin.items()}
    for at in range(new):
        yield partner.get(at), at
        yield from ((o, None) for o in gone.get(partner.get(at, -2), ()))


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


def another_model(before: Sequence[object], after: Sequence[object], found: Matching) -> Change:
    """Return the one line that replaces all changes if the two have too little in common."""
    same = f"{len(found.pairs)} of them as before"
    return Change("changed", PLAN_KEY, "model", f"{len(before)} nodes", f"another model: {len(after)} nodes, {same}")


def by_rule(before: Plan, after: Plan, changes: Iterable[Change], ops: Mapping[str, str]) -> list[Change]:
    """Merge into one line all decisions on an op whose rule a new version of torch or fxamp has changed.

    Args:
        before: made by one version.
        after: made by another, by the same policy.
        changes: changes between the two.
        ops: op of every node after, by key.
    """
    versions = _versions(before, after)
    changes = list(changes)
    if versions is None or before.policy != after.policy:
        return changes
    changed = {ops[c.key] for c in changes if c.field == "kind" and c.kind == "changed"}
    of_rule: dict[str, list[Change]] = {op: [] for op in changed}
    rest: list[Change] = []
    for change in changes:
        mine = change.kind == "changed" and change.field not in ("position", "casts") and ops.get(change.key) in changed
        (of_rule[ops[change.key]] if mine else rest).append(change)
    lines = []
    for op, found in sorted(of_rule.items()):
        sides = [{c.field: (c.before, c.after)[side] for c in reversed(found)} for side in (0, 1)]
        was, now = (", ".join(str(side[f]) for f in ("kind", "colour") if f in side) for side in sides)
        nodes = tuple(dict.fromkeys(c.key for c in found))
        lines.append(Change("changed", f"{RULE} {op})", versions, was, now, nodes))
    return [*lines, *rest]


def _versions(before: Plan, after: Plan) -> str | None:
    """Name the two versions of torch, or else of fxamp, that made two plans; None if they are the same."""
    old, new = (".".join(p.torch_version.split(".")[:2]) for p in (before, after))
    if old != new:
        return f"torch {old} to {new}"
    old, new = before.fxamp_version, after.fxamp_version
    return f"fxamp {old} to {new}" if old and new and old != new else None
