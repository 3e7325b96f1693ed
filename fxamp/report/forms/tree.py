"""The modules of a model as a tree, each with the totals of all that runs in it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tabulate import tabulate

from ..record.colours import LOW
from ..record.record import NodeRecord, Record, State

CASTS, SIZES = "casts", ("MB out", "low, % of bytes", "low, % of FLOPs", "MB saved")
HEADERS = ("module", "nodes", "low", "FP32", CASTS, *SIZES)


@dataclass
class Branch:
    """One module: its name, what runs in it itself, and its children in the order in which they run."""

    name: str
    nodes: list[NodeRecord] = field(default_factory=list)
    children: dict[str, Branch] = field(default_factory=dict)

    def all(self) -> Iterable[NodeRecord]:
        """Yield every node in the module and below it."""
        yield from self.nodes
        for child in self.children.values():
            yield from child.all()


def grown(nodes: Iterable[NodeRecord], root: str) -> Branch:
    """Return the tree of the modules that nodes were made in."""
    tree = Branch(root)
    for node in nodes:
        branch = tree
        for part in node.module.split(".") if node.module else ():
            branch = branch.children.setdefault(part, Branch(part))
        branch.nodes.append(node)
    return tree


def rows(branch: Branch, casts: bool, depth: int | None = None, prefix: str = "") -> list[tuple[str, ...]]:
    """Return a row for every module, `depth` levels deep, drawn as a tree.

    Args:
        branch: the outermost module.
        casts: whether the places of casts are known.
        depth: how many levels; None for all.
        prefix: drawn in front of the name.
    """
    out = [(f"{prefix}{branch.name}", *_totals(list(branch.all()), casts))]
    if depth == 0:
        return out
    for child in branch.children.values():
        out += rows(child, casts, None if depth is None else depth - 1, prefix + "· ")
    return out


def elsewhere(record: Record, state: State) -> list[tuple[str, int]]:
    """Return (label, number) for the casts of a state that are in front of no node."""
    found = [("(outputs)", len(state.output_casts)), ("(inner graphs)", record.casts_elsewhere(state))]
    return [(name, count) for name, count in found if count > 0]


def _totals(nodes: Sequence[NodeRecord], casts: bool) -> tuple[str, ...]:
    low = [n for n in nodes if n.colour in LOW]
    return (
        str(len(nodes)), str(len(low)), str(sum(n.colour == "float32" for n in nodes)),
        str(sum(len(n.casts) for n in nodes)) if casts else "", mb(n.bytes for n in nodes),
        share(low, nodes, "bytes"), share(low, nodes, "flops"), mb(n.saved_bytes for n in nodes),
    )  # fmt: skip


def mb(values: Iterable[int | None]) -> str:
    """Return the sum of the known sizes in MB, "" if none is known."""
    known = [v for v in values if v is not None]
    return f"{sum(known) / 1e6:.3g}" if known else ""


def share(part: Sequence[NodeRecord], whole: Sequence[NodeRecord], name: str) -> str:
    """Return the share of some nodes in a total size, in percent; "" if the total is zero."""
    total = sum(getattr(n, name) or 0 for n in whole)
    return f"{100 * sum(getattr(n, name) or 0 for n in part) / total:.0f}" if total else ""


def table(body: Sequence[tuple[str, ...]], style: str, width: int | None = None, unknown: Sequence[str] = ()) -> str:
    """Write rows of the tree as a table.

    Args:
        body: the rows.
        style: as tabulate names it.
        width: width of the terminal; columns on the right that do not fit are left out. None for no limit.
        unknown: headers of the last columns if these are empty; they are left out.
    """
    known = len(HEADERS) - len(unknown)
    for columns in range(known, 0, -1):
        align = ("left", *("right",) * (columns - 1))
        shown = [row[:columns] for row in body]
        text = tabulate(shown, HEADERS[:columns], style, disable_numparse=True, colalign=align)
        if width is None or fits(text, width):
            break
    if left := "; ".join(HEADERS[columns:known]):
        text += f"\n\nA wider terminal or a file also shows: {left}"
    if unknown:
        said = f"These columns need a module that fxamp.convert returned with example inputs: {'; '.join(unknown)}"
        text += f"\n\n{said if width is None else textwrap.fill(said, width)}"
    return text


def fits(text: str, width: int) -> bool:
    """Say whether no line of a text is wider than `width`."""
    return all(len(line) <= width for line in text.splitlines())
