"""The page of a report: totals and the tree of modules; for a chosen module its drawing, its nodes and a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import msgspec

from passes.contract.reasons import Code

from ..forms.lines import HEADERS, costliest
from ..forms.tree import Branch, elsewhere, grown
from ..record.colours import LOW
from ..record.record import NodeRecord, Record
from .render import render
from .views import MOST, views

MOST_NODES = 5_000  # most nodes on a page; browsers are slow with larger files
MOST_ROWS = 2_000  # most rows in its tree
UNFOLDED = 30  # rows of the tree that are seen at first
SCRIPTS = ("treegrid.js", "tabs.js", "drawing.js", "report.js")


@dataclass(frozen=True)
class Share:
    """How much of something is low, how much FP32 and how much neither, in percent."""

    low: float
    fp32: float

    @property
    def said(self) -> str:
        """Return the shares as text."""
        return f"{self.low:.0f} % low, {self.fp32:.0f} % FP32"


@dataclass(frozen=True)
class Row:
    """One module of the tree.

    Attributes:
        path: path of the module; "" for the whole model.
        name: last part of the path.
        level: depth in the tree; 1 for the whole model.
        place: position among its siblings, from 1.
        siblings: number of siblings, itself included.
        children: whether it contains modules.
        nodes: number of nodes in it and below.
        low: how many of them run low.
        fp32: how many of them run in FP32.
        casts: number of casts in front of them; None if that is not known.
        bytes: shares of the bytes of their results; None if that is not known, or there are none.
        flops: shares of their FLOPs; None likewise.
        saved: bytes kept for backward; None if that is not known.
    """

    path: str
    name: str
    level: int
    place: int
    siblings: int
    children: bool
    nodes: int
    low: int
    fp32: int
    casts: int | None
    bytes: Share | None
    flops: Share | None
    saved: int | None


def page(
    record: Record,
    model: str = "model",
    training: Sequence[tuple[str, str]] = (),
    nodes: Sequence[NodeRecord] | None = None,
) -> str:
    """Return the page of a record.

    Args:
        record: record of the whole model.
        model: the name of its class.
        training: facts about the training step, as (name, text) pairs.
        nodes: those to show; all of them where it is None.
    """
    shown = record.nodes if nodes is None else tuple(nodes)
    chosen, whole = shown, len(shown) == len(record.nodes)
    rows = list(_rows(grown(shown, model), record.has_casts))
    said = []
    if not whole:
        said.append(f"{len(shown)} of {len(record.nodes)} nodes were chosen for this page; the totals count all nodes.")
    if len(shown) > MOST_NODES:
        said.append(
            f"{len(shown)} nodes are more than the {MOST_NODES} that a page can hold: it shows modules only. "
            "Choose some of them with --module PATH, or take --output-format json."
        )
        shown = ()
    level = _levels(rows, MOST_ROWS)
    if level < max(row.level for row in rows):
        said.append(f"{len(rows)} modules are more than the {MOST_ROWS} that a page can hold: it shows {level} levels.")
        rows = [replace(row, children=row.children and row.level < level) for row in rows if row.level <= level]
    data = {
        "nodes": msgspec.to_builtins(shown), "views": [asdict(view) for view in views(shown, _named(record))],
        "meanings": {code.value: code.meaning for code in Code}, "most": MOST,
    }  # fmt: skip
    return render(
        "report.html", title=f"{model}: precision under {record.policy}", data=data, scripts=SCRIPTS, record=record,
        model=model, training=training, rows=rows, unfolded=_levels(rows, UNFOLDED), said=said,
        elsewhere=elsewhere(record, record.states[0]) if whole else [], lines=costliest(record, chosen), heads=HEADERS,
        compared=_compared(record),
    )  # fmt: skip


def _named(record: Record) -> list[str]:
    """Return the states, each after the number of its first graph that no earlier state has."""
    if len(record.states) == 1:
        return []
    out, seen = [], set[int]()
    for state in record.states:
        new = {node.graph for node in record.of(state)} - seen
        out += [f"{min(new)}: {state.name}"] if new else []
        seen |= new
    return out


def _levels(rows: Sequence[Row], most: int) -> int:
    """Return how many levels of the tree fit into that many rows, at least one."""
    deepest = max(row.level for row in rows)
    return max((at for at in range(1, deepest + 1) if sum(row.level <= at for row in rows) <= most), default=1)


def _rows(
    branch: Branch, casts: bool, path: str = "", level: int = 1, place: int = 1, siblings: int = 1
) -> Iterator[Row]:
    nodes = list(branch.all())
    saved = [n.saved_bytes for n in nodes if n.saved_bytes is not None]
    yield Row(
        path, branch.name, level, place, siblings, bool(branch.children), len(nodes),
        sum(n.colour in LOW for n in nodes), sum(n.colour == "float32" for n in nodes),
        sum(len(n.casts) for n in nodes) if casts else None, _share(nodes, "bytes"), _share(nodes, "flops"),
        sum(saved) if saved else None,
    )  # fmt: skip
    for at, child in enumerate(branch.children.values(), 1):
        inside = f"{path}.{child.name}" if path else child.name
        yield from _rows(child, casts, inside, level + 1, at, len(branch.children))


def _share(nodes: Sequence[NodeRecord], name: str) -> Share | None:
    total = sum(getattr(n, name) or 0 for n in nodes)
    if not total:
        return None
    low = sum(getattr(n, name) or 0 for n in nodes if n.colour in LOW)
    fp32 = sum(getattr(n, name) or 0 for n in nodes if n.colour == "float32")
    return Share(round(100 * low / total, 1), round(100 * fp32 / total, 1))


def _compared(record: Record) -> list[tuple[str, ...]]:
    """Return a row for each total of the model without mixed precision, under autocast, and under this policy."""
    t = record.totals
    columns = ("original", "autocast", "colour")
    low = (str(sum(getattr(n, c) in LOW for n in record.nodes)) for c in columns)
    out: list[tuple[str, ...]] = [("operations that run low", *low)]
    for name, what in (("flops", "FLOPs that run low, %"), ("bytes", "values that are low, % of elements")):
        shares = [_low_share(record.nodes, c, name) for c in columns]
        if all(shares):
            out.append((what, *(str(s) for s in shares)))
    saved = (t.saved_bytes_fp32, t.saved_bytes_autocast, t.saved_bytes)
    if any(s is not None for s in saved):
        out.append(("MB saved for backward", *("not known" if s is None else f"{s / 1e6:.3g}" for s in saved)))
    return out


def _low_share(nodes: Sequence[NodeRecord], column: str, name: str) -> str | None:
    def weight(n: NodeRecord) -> int:
        return (n.flops or 0) if name == "flops" else _elements(n)

    total = sum(map(weight, nodes))
    return f"{100 * sum(weight(n) for n in nodes if getattr(n, column) in LOW) / total:.3g}" if total else None


def _elements(node: NodeRecord) -> int:
    size = 2 if node.colour in LOW else 4
    return (node.bytes or 0) // size
