"""A record as text and Markdown: the totals, the modules as a tree, ops and nodes, and the lines that cost most."""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tabulate import tabulate

from passes.contract.plan import Plan, Stored
from passes.contract.reasons import DEVIATIONS

from ...harmless import markdown, visible
from ..record.record import LOW, NodeRecord, Record, State

_NODE = ("node", "op", "colour", "autocast", "reason", "source")
_CASTS, _SIZES = "casts", ("MB out", "low, % of bytes", "low, % of FLOPs", "MB saved")
MODULE = ("module", "nodes", "low", "FP32", _CASTS, *_SIZES)
LINE = ("line", "module", "nodes", "casts", "MB cast", "MB saved", "low, % of bytes")
MOST = 10  # lines


class Text:
    """Writes the parts of a report, each a list of paragraphs, with tables in a style of tabulate's ("pipe": Markdown).

    They fit into a terminal of that width in characters; None is any width.
    """

    def __init__(self, record: Record, style: str = "simple", width: int | None = None) -> None:
        self.record, self._style, self._width = record, style, width
        self._cell, self._mark = (markdown, "## ") if style == "pipe" else (visible, "")

    def _table(
        self, rows: Iterable[Sequence[object]], headers: Sequence[str] = ("", ""), align: Sequence[str] | None = None
    ) -> str:
        shown = [[self._cell(str(value)) for value in row] for row in rows]
        return tabulate(shown, headers, self._style, disable_numparse=True, colalign=align)

    def _fits(self, text: str) -> bool:
        return self._width is None or all(len(line) <= self._width for line in text.splitlines())

    def facts(self, heading: str, facts: Mapping[str, object]) -> list[str]:
        """Write names and values under a heading; as a list where a table has no room."""
        text = self._table(facts.items()).lstrip()  # names and values need no head
        if not self._fits(text):
            text = "\n".join(f"{self._cell(name)}: {self._cell(str(value))}" for name, value in facts.items())
        return [f"{self._mark}{heading}", text]

    def joined(self, parts: Iterable[str]) -> str:
        """Join paragraphs; what is still too wide for a terminal goes on in the next line."""
        text = "\n\n".join(parts)
        if not self._fits(text) and self._width is not None:
            wrapped = (textwrap.wrap(line, self._width, subsequent_indent="    ") for line in text.split("\n"))
            text = "\n".join("\n".join(lines) for lines in wrapped)
        return text + "\n"

    def totals(self, made: Mapping[str, object]) -> list[str]:
        """Write how the plan was made, and the totals of each state."""
        states = self.record.states
        columns = [{**counts_of(self.record, state), **_sizes(state)} for state in states]
        if len(states) == 1:
            return self.facts("Totals", {**made, **columns[0]})
        named = dict.fromkeys(itertools.chain(*columns))
        rows = [(name, *(column.get(name, "") for column in columns)) for name in named]
        names = ("one call in state", *(self._cell(state.name) for state in states))
        text = self._table(rows, names)
        if not self._fits(text):
            each = (self._table([(r[0], r[i]) for r in rows], (names[0], names[i])) for i in range(1, len(names)))
            text = "\n\n".join(each)
        return [*self.facts("Totals", made), text]

    def notes(self) -> list[str]:
        """Write what is unusual, if there is anything."""
        notes = self.record.notes
        return [f"{self._mark}Notes", "\n".join(f"- {self._cell(note)}" for note in notes)] if notes else []

    def modules(self, found: Sequence[NodeRecord], model: str, depth: int | None) -> list[str]:
        """Write the tree of the modules for each state; one that equals an earlier one is named and not repeated."""
        record, parts, told = self.record, list[str](), dict[str, str]()
        kept = {id(node) for node in found}
        for state in record.states:
            own = [node for node in record.of(state) if id(node) in kept]
            body = _modules(own, model, record.has_casts, depth)
            if len(found) == len(record.nodes):
                body += [(name, "", "", "", str(n), *("",) * 4) for name, n in record.casts_elsewhere(state)]
            text, name = self._tree(body), self._cell(state.name)
            named = f": {name}" if name else ""
            parts += [f"Modules{named}: as in {told[text]}"] if text in told else [f"{self._mark}Modules{named}", text]
            told.setdefault(text, name)
        return parts

    def _tree(self, body: Sequence[tuple[str, ...]]) -> str:
        """Write rows of modules; columns that are not known, or have no room, are left out and named."""
        record = self.record
        unknown = () if record.totals.bytes is not None else _SIZES if record.has_casts else (_CASTS, *_SIZES)
        known = len(MODULE) - len(unknown)
        for columns in range(known, 0, -1):
            align = ("left", *("right",) * (columns - 1))
            text = self._table([row[:columns] for row in body], MODULE[:columns], align)
            if self._fits(text):
                break
        if left := "; ".join(MODULE[columns:known]):
            text += f"\n\nA wider terminal or a file also shows: {left}"
        if unknown:
            said = f"These columns need a module that fxamp.convert returned with example inputs: {'; '.join(unknown)}"
            text += f"\n\n{said if self._width is None else textwrap.fill(said, self._width)}"
        return text

    def nodes(self, found: Sequence[NodeRecord]) -> list[str]:
        """Write how many nodes of each op run in which dtype, and a row for every node."""
        several = any(node.graph for node in found)
        listed = [_line(node, several) for node in found]
        text = self._table(listed, _NODE)
        if not self._fits(text):  # each node over several lines
            text = "\n".join(self._cell(line) for row in listed for line in _narrow(*row))
        ops = self._table(ops_of(found), ("op", "colour", "nodes"))
        return [f"{self._mark}Ops", ops, f"{self._mark}Nodes", text]

    def stored(self, stored: Sequence[Stored]) -> list[str]:
        """Write what a compiled step stores in 16 bits beside, a row for each value; nothing if there is none."""
        if not stored:
            return []
        rows = [(s.module or "(no module)", s.name, s.part, s.dtype, s.line) for s in stored]
        text = self._table(rows, ("module", "in the joint graph", "part", "dtype", "source"))
        if not self._fits(text):
            text = "\n".join(f"- {self._cell(str(s))}" for s in stored)
        return [f"{self._mark}Stored in 16 bits", text]

    def lines(self, found: Sequence[NodeRecord]) -> list[str]:
        """Write the lines that cost most, without their code if it does not fit; or say why there are none."""
        body, align = costliest(self.record, found), ("left",) * 2 + ("right",) * 5
        text = "Costs of lines are known only for a module that fxamp.convert returned with example inputs."
        if body:
            text = self._table(body, LINE, align)
        if body and not self._fits(text):
            text = self._table([(line.partition(": ")[0], *rest) for line, *rest in body], LINE, align)
        return [f"{self._mark}Lines", text]

    def edits(self, plan: Plan) -> list[str]:
        """Write how often each rule of the passes fired, and which never did; nothing if the plan has no counts."""
        if not plan.edits:
            return []
        fired = [(rule, count) for rule, count in plan.edits.items() if count]
        never = ", ".join(map(self._cell, plan.never_fired)) or "none"
        table = self._table(fired, ("pass/rule", "fired"), ("left", "right") if fired else None)
        return [f"{self._mark}Edits", table, f"Rules that never fired: {never}"]


def counts_of(record: Record, state: State) -> dict[str, object]:
    """Return what is counted in one state; casts before elimination are known of all states together."""
    nodes, casts = record.of(state), state.totals.casts
    before = "casts inserted" if len(record.states) == 1 else "casts inserted in all states"
    return {
        "nodes": len(nodes),
        "colours": _joined(Counter(node.colour for node in nodes)),
        before: record.inserted_casts,
        "casts of the forward": "not known of a state" if casts is None else casts,
        "deviations from autocast": _joined(Counter(n.reason_code for n in nodes if n.reason_code in DEVIATIONS)),
    }


def _sizes(state: State) -> dict[str, object]:
    """Return the totals of what nodes cost, where they are known, and what was measured."""
    t, kept = state.totals, state.kept_bytes
    if t.bytes is None:
        return {}
    others = (("FP32", t.saved_bytes_fp32), ("autocast", t.saved_bytes_autocast))
    instead = ", ".join(f"{name} {saved / 1e6:.3g}" for name, saved in others if saved is not None)
    return {
        "low, % of FLOPs": "none has any" if t.low_flops is None else f"{t.low_flops:g}",
        "low, % of bytes": "none" if t.low_bytes is None else f"{t.low_bytes:g}",
        "MB cast": f"{(t.cast_bytes or 0) / 1e6:.3g}",
        "MB saved for backward": f"{(t.saved_bytes or 0) / 1e6:.3g}" + (f" ({instead})" if instead else ""),
        **({} if kept is None else {f"MB saved, measured behind {state.compiler}": f"{kept / 1e6:.3g}"}),
    }


def _joined(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


def ops_of(nodes: Iterable[NodeRecord]) -> list[tuple[str, str, int]]:
    """Return how many nodes of each op run in which dtype."""
    counts = Counter((node.op, node.colour) for node in nodes)
    return [(op, colour, count) for (op, colour), count in sorted(counts.items())]


def _line(node: NodeRecord, several: bool) -> tuple[str, ...]:
    autocast = node.autocast if node.autocast != node.colour else ""
    key = f"{node.graph}:{node.key}" if several else node.key
    said = f"{node.reason_code}: {node.reason}" if node.reason and node.reason != node.reason_code else node.reason_code
    return key, node.op, node.colour, autocast, said, _source(node)


def _narrow(key: str, _: str, colour: str, autocast: str, reason: str, place: str) -> list[str]:
    first = f"{key}  {colour}" + f" (autocast: {autocast})" * bool(autocast)
    return [first, *(f"  {more}" for more in (reason, place) if more)]


def _source(node: NodeRecord) -> str:
    """Return the user's line of a node, with its code; "" where it is not known."""
    return f"{node.file}:{node.line}" + f": {node.code}" * bool(node.code) if node.file else ""


def _modules(
    nodes: Sequence[NodeRecord], name: str, casts: bool, depth: int | None, level: int = 0
) -> list[tuple[str, ...]]:
    """Return a row for a module, then those of its children in the order in which they run, `depth` levels deep."""
    low = [n for n in nodes if n.colour in LOW]
    row = (
        "· " * level + name, str(len(nodes)), str(len(low)), str(sum(n.colour == "float32" for n in nodes)),
        str(sum(len(n.casts) for n in nodes)) if casts else "", _mb(n.bytes for n in nodes),
        _share(low, nodes, "bytes"), _share(low, nodes, "flops"), _mb(n.saved_bytes for n in nodes),
    )  # fmt: skip
    children: dict[str, list[NodeRecord]] = {}
    for node in nodes if level != depth else ():
        parts = node.module.split(".") if node.module else []
        if len(parts) > level:
            children.setdefault(parts[level], []).append(node)
    return [row, *(each for child, own in children.items() for each in _modules(own, child, casts, depth, level + 1))]


def costliest(record: Record, nodes: Sequence[NodeRecord]) -> list[tuple[str, ...]]:
    """Return a row for each of the costliest lines, by the bytes of their casts, then by the bytes kept for backward.

    The outputs have a row of their own if all nodes are given. Without sizes there is no row.
    """
    if record.totals.cast_bytes is None:
        return []
    by_line: dict[tuple[str, int], list[NodeRecord]] = {}
    for node in nodes:
        by_line.setdefault((node.file, node.line), []).append(node)
    found = []
    for own in by_line.values():
        casts = [c for n in own for c in n.casts]
        modules = list(dict.fromkeys(n.module for n in own if n.module)) or ["(model)"]
        module = modules[0] + f" and {len(modules) - 1} more" * (len(modules) > 1)
        low = _share([n for n in own if n.colour in LOW], own, "bytes")
        row = (_source(own[0]) or "(not known)", module, str(len(own)), str(len(casts)))
        found.append((casts, own, (*row, _mb(c.bytes for c in casts) or "0", _mb(n.saved_bytes for n in own), low)))
    if (outputs := list(record.states[0].output_casts)) and len(nodes) == len(record.nodes):
        row = ("(outputs)", "", "", str(len(outputs)))
        found.append((outputs, [], (*row, _mb(c.bytes for c in outputs), "", "")))
    # The sort is stable: lines of equal cost keep their order.
    found.sort(key=lambda f: (-sum(c.bytes or 0 for c in f[0]), -sum(n.saved_bytes or 0 for n in f[1])))
    return [row for _, _, row in found[:MOST]]


def _mb(values: Iterable[int | None]) -> str:
    """Return the sum of the known sizes in MB, "" if none is known."""
    known = [v for v in values if v is not None]
    return f"{sum(known) / 1e6:.3g}" if known else ""


def _share(part: Sequence[NodeRecord], whole: Sequence[NodeRecord], name: str) -> str:
    """Return the share of some nodes in a total size, in percent; "" if the total is zero."""
    total = sum(getattr(n, name) or 0 for n in whole)
    return f"{100 * sum(getattr(n, name) or 0 for n in part) / total:.0f}" if total else ""
