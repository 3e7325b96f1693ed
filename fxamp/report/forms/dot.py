"""A report as a graph of Graphviz: modules as boxes within each other, nodes in their colours, casts on the edges."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ..record.record import NodeRecord
from .harmless import visible
from .tree import LOW, Branch, grown

_COLOURS = {"low": "#dde7ff", "fp32": "#ffe8cf", "other": "#eceef2"}
_QUOTED = re.compile(r'[\\"]')


def to_dot(nodes: Sequence[NodeRecord], model: str) -> str:
    """Write a graph in the DOT language: the nodes, and which node reads which."""
    names = {(node.graph, node.key): f"n{place}" for place, node in enumerate(nodes)}
    lines = ["digraph fxamp {", '  node [shape=box, style="rounded,filled", fontname="sans-serif"]', "  newrank=true"]
    lines += _cluster(grown(nodes, model), names, itself="", depth=1)
    for node in nodes:
        for read in node.reads:
            start = names.get((node.graph, read.value)) if read.kind == "node" else None
            if start is not None:
                label = f" [label={_quoted(read.cast)}, color={_quoted('#8b1fa8')}]" if read.cast else ""
                lines.append(f"  {start} -> {names[node.graph, node.key]}{label}")
    return "\n".join([*lines, "}"]) + "\n"


def _cluster(branch: Branch, names: dict[tuple[int, str], str], itself: str, depth: int) -> Iterator[str]:
    """Yield the lines of one module, which is numbered by its position among its siblings."""
    indent = "  " * depth
    yield f"{indent}subgraph cluster{itself} {{"
    yield f"{indent}  label={_quoted(branch.name)}"
    for node in branch.nodes:
        yield f"{indent}  {names[node.graph, node.key]} [{', '.join(_attributes(node))}]"
    for at, child in enumerate(branch.children.values()):
        yield from _cluster(child, names, f"{itself}_{at}", depth + 1)
    yield f"{indent}}}"


def _attributes(node: NodeRecord) -> Iterable[str]:
    style = "low" if node.colour in LOW else "fp32" if node.colour == "float32" else "other"
    weights = [f"{read.value} to {read.cast}" for read in node.reads if read.kind == "attribute" and read.cast]
    yield f"label={_quoted(node.op, node.colour)}"
    yield f"fillcolor={_quoted(_COLOURS[style])}"
    yield f"tooltip={_quoted(node.key, f'{node.reason_code}: {node.reason}', *weights)}"


def _quoted(*lines: str) -> str:
    """Return lines of text as a string of DOT, in which a backslash and an ampersand begin an escape."""
    shown = (_QUOTED.sub(r"\\\g<0>", visible(line)).replace("&", "&amp;") for line in lines)
    return '"' + r"\n".join(shown) + '"'
