"""The user's lines that cost most, by the casts before their ops and by the bytes that these keep for backward."""

from __future__ import annotations

from collections.abc import Sequence

from ..record.colours import LOW
from ..record.record import Cast, NodeRecord, Record
from .tree import mb, share

HEADERS = ("line", "module", "nodes", "casts", "MB cast", "MB saved", "low, % of bytes")
MOST = 10


def costliest(record: Record, nodes: Sequence[NodeRecord], most: int = MOST) -> list[tuple[str, ...]]:
    """Return a row for each of the costliest lines, by the bytes of their casts, then by the bytes kept for backward.

    Args:
        record: record of the whole model; its outputs have a row of their own if all nodes are given.
        nodes: the nodes whose lines are wanted.
        most: how many rows there are at most.

    Returns:
        The rows; none if sizes are not known, as for a plan without its module.
    """
    if record.totals.cast_bytes is None:
        return []
    by_line: dict[tuple[str, int], list[NodeRecord]] = {}
    for node in nodes:
        by_line.setdefault((node.file, node.line), []).append(node)
    found = [(_cost([c for n in own for c in n.casts], own), _row(own)) for own in by_line.values()]
    if record.output_casts and len(nodes) == len(record.nodes):
        casts = record.output_casts
        row = ("(outputs)", "", "", str(len(casts)), mb(c.bytes for c in casts), "", "")
        found.append((_cost(casts, ()), row))
    found.sort(key=lambda pair: pair[0], reverse=True)  # stable: lines of equal cost keep their order
    return [row for _, row in found[:most]]


def _cost(casts: Sequence[Cast], nodes: Sequence[NodeRecord]) -> tuple[int, int]:
    return sum(c.bytes or 0 for c in casts), sum(n.saved_bytes or 0 for n in nodes)


def _row(nodes: Sequence[NodeRecord]) -> tuple[str, ...]:
    """Return the row of one line, with the first of the modules that run it."""
    casts = [c for n in nodes for c in n.casts]
    modules = list(dict.fromkeys(n.module for n in nodes if n.module)) or ["(model)"]
    module = modules[0] + f" and {len(modules) - 1} more" * (len(modules) > 1)
    low = [n for n in nodes if n.colour in LOW]
    return (
        source(nodes[0]) or "(not known)", module, str(len(nodes)), str(len(casts)), mb(c.bytes for c in casts) or "0",
        mb(n.saved_bytes for n in nodes), share(low, nodes, "bytes"),
    )  # fmt: skip


def source(node: NodeRecord) -> str:
    """Return the user's line of a node, with its code; "" where it is not known."""
    return f"{node.file}:{node.line}" + f": {node.code}" * bool(node.code) if node.file else ""
