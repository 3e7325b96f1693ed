"""What differs between two plans, or between two graphs.

Nodes are matched by key (module path, op, ordinal), so a line moved or a node renamed elsewhere is no difference.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias, Union

import torch
from tabulate import tabulate
from torch import nn
from torch.fx.node import map_arg

from passes.errors import FxampError
from passes.plan import Decision, Plan

from .. import compiled
from .harmless import markdown, visible

Diffable: TypeAlias = Union[Plan, nn.Module, str, "os.PathLike[str]"]
# For every node, by key and in graph order: the fields that are compared.
Rows: TypeAlias = dict[str, dict[str, str]]

DECISION_FIELDS = ("colour", "autocast_dtype", "kind", "reason")
PLAN_FIELDS = ("capture", "inserted_casts", "casts")  # not what was asked for, which both titles say
PLAN_KEY = "(plan)"


@dataclass(frozen=True)
class Change:
    """Say what became of one field of one node; a node added or removed has its colour or target as the field."""

    kind: Literal["added", "removed", "changed"]
    key: str
    field: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        """Write the change as one line of the listing."""
        if self.kind == "added":
            return visible(f"+ {self.key}  {self.field}: {self.after}")
        if self.kind == "removed":
            return visible(f"- {self.key}  {self.field}: {self.before}")
        return visible(f"! {self.key}  {self.field}: {self.before} -> {self.after}")


@dataclass(frozen=True)
class GraphDiff:
    """Hold the changes, in graph order, and what each side is. It is true when the two differ."""

    before: str
    after: str
    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        """Say whether the two differ."""
        return bool(self.changes)

    def __str__(self) -> str:
        """Write the listing: what each side is, the totals, one line per change."""
        titles = visible(f"--- {self.before}"), visible(f"+++ {self.after}")
        lines = [*titles, f"@@ {self.totals} @@", *map(str, self.changes)]
        return "\n".join(lines)

    def to_markdown(self) -> str:
        """Write the changes as a Markdown table."""
        before, after = (visible(title).replace("`", "'") for title in (self.before, self.after))
        head = f"**before** `{before}`  \n**after** `{after}`\n\n{self.totals}\n"
        if not self.changes:
            return head
        rows = [[markdown(value or "") for value in asdict(change).values()] for change in self.changes]
        headers = ("change", "node", "field", "before", "after")
        return f"{head}\n{tabulate(rows, headers, 'pipe', disable_numparse=True)}\n"

    def to_json(self) -> str:
        """Write the changes as JSON, the same text for the same changes."""
        data = asdict(self) | {"differ": bool(self)}
        return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @property
    def totals(self) -> str:
        """Say in a line how many nodes were added, removed and changed."""
        if not self.changes:
            return "no difference"
        # One node can change in several fields.
        nodes = Counter(kind for kind, _ in {(change.kind, change.key) for change in self.changes})
        return ", ".join(f"{nodes[kind]} {kind}" for kind in ("added", "removed", "changed"))


def diff(before: Diffable, after: Diffable) -> GraphDiff:
    """Compare two plans, or two graphs where one of them has no plan.

    Args:
        before: A plan, the path of a saved one, a converted module, or any `torch.fx.GraphModule`.
        after: Likewise.

    Returns:
        The changes from `before` to `after`; true when there are any.
    """
    old, new = plan_in(before), plan_in(after)
    if old and new:
        changes = (*_plan_changes(old, new), *_changes(_decision_rows(old), _decision_rows(new), "colour"))
        return GraphDiff(_plan_title(old), _plan_title(new), changes)
    old_graph, new_graph = _graph_in("before", before), _graph_in("after", after)
    changes = (*_changes(_node_rows(old_graph), _node_rows(new_graph), "target"),)
    return GraphDiff(_graph_title(old_graph), _graph_title(new_graph), changes)


def plan_in(value: object) -> Plan | None:
    """Find the plan in what a user may give: the plan itself, a path, or a module that has one; else None.

    Raises:
        CaptureError: nothing was converted yet for a module that is compiled.
        PlanError: the file cannot be read.
    """
    if isinstance(value, Plan):
        return value
    if isinstance(value, str | os.PathLike):
        return Plan.load(value)
    plan = getattr(value, "plan", None)
    if isinstance(plan, Plan):
        return plan
    return compiled.plan_of(value) if isinstance(value, nn.Module) and compiled.is_compiled(value) else None


def _graph_in(name: str, value: object) -> torch.fx.GraphModule:
    if isinstance(value, torch.fx.GraphModule):
        return value
    raise FxampError(
        f"diff: {name} is a {type(value).__name__}, which cannot be compared here; give two plans (or converted "
        "modules, or paths of saved plans), or two GraphModules"
    )


def _plan_title(plan: Plan) -> str:
    return f"{plan.policy}  {plan.capture}, torch {plan.torch_version}, {len(plan.decisions)} nodes"


def _graph_title(module: torch.fx.GraphModule) -> str:
    return f"{type(module).__name__}  {len(module.graph.nodes)} nodes"


def _plan_changes(before: Plan, after: Plan) -> Iterable[Change]:
    for field in PLAN_FIELDS:
        old, new = str(getattr(before, field)), str(getattr(after, field))
        if old != new:
            yield Change("changed", PLAN_KEY, field, old, new)


def _changes(before: Rows, after: Rows, shown: str) -> Iterable[Change]:
    """Compare node by node; of a node that one side lacks, the field `shown` stands for all."""
    for key in _merged(list(before), list(after)):
        if key not in before:
            yield Change("added", key, shown, None, after[key][shown])
        elif key not in after:
            yield Change("removed", key, shown, before[key][shown], None)
        else:
            for field, old in before[key].items():
                if old != after[key][field]:
                    yield Change("changed", key, field, old, after[key][field])


def _merged(before: list[str], after: list[str]) -> list[str]:
    """Merge two key lists: in the order of `after`, a removed key following the one it followed in `before`."""
    kept = set(after)
    removed: dict[str | None, list[str]] = {None: []}
    anchor = None
    for key in before:
        if key in kept:
            anchor = key
        else:
            removed.setdefault(anchor, []).append(key)
    merged = removed[None]
    for key in after:
        merged += [key, *removed.get(key, [])]
    return merged


def _decision_rows(plan: Plan) -> Rows:
    return {_graph_key(d): {field: getattr(d, field) for field in DECISION_FIELDS} for d in plan.decisions}


def _graph_key(decision: Decision) -> str:
    return f"{decision.graph}:{decision.key}" if decision.graph else decision.key


def _node_rows(module: torch.fx.GraphModule) -> Rows:
    keys = _node_keys(module.graph)
    return {
        key: {
            "op": node.op,
            "target": _target(node),
            "dtype": _dtype(node.meta.get("val")),
            "operands": _operands(node, keys),
        }
        for node, key in keys.items()
    }


def _node_keys(graph: torch.fx.Graph) -> dict[torch.fx.Node, str]:
    """Key every node by module path, name of the target, and ordinal among those that share both."""
    seen: Counter[str] = Counter()
    keys = {}
    for node in graph.nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path = f"{stack[-1][0]}/" if stack and stack[-1][0] else ""
        name = f"{path}{_short_name(node)}"
        keys[node] = f"{name}#{seen[name]}"
        seen[name] += 1
    return keys


def _short_name(node: torch.fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket.__name__)
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _target(node: torch.fx.Node) -> str:
    """Write the target without the addresses that a function's repr holds."""
    if isinstance(node.target, str | torch._ops.OpOverload):
        return str(node.target)
    return f"{getattr(node.target, '__module__', '')}.{_short_name(node)}"


def _dtype(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_dtype, value))})"
    return str(getattr(value, "dtype", None)).removeprefix("torch.")


def _operands(node: torch.fx.Node, keys: Mapping[torch.fx.Node, str]) -> str:
    """Write the arguments with keys in place of node names, which an edit elsewhere may renumber."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: _Bare(keys[operand]))
    return f"{args!r} {kwargs!r}" if kwargs else f"{args!r}"


class _Bare(str):
    """Show a key without quotes."""

    __slots__ = ()
    __repr__ = str.__str__
