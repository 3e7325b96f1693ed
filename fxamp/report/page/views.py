"""The drawing of a module: its nodes, with the modules inside it folded until the drawing can be read.

Whole: a drawing of 12 layers with 500 nodes            Folded: 12 boxes, each of which opens its own drawing
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ..record.colours import LOW, style_of
from ..record.record import NodeRecord
from .layout import layered

MOST = 200  # boxes of a drawing
EASY = 60  # boxes; modules are folded until there are no more, if possible
_SHARED = 4  # most readers for which an outside value is drawn once; with more, it is drawn at each
_CHARACTER, _LONGEST = 7.0, 26  # pixels of a character; characters of a label that are shown


@dataclass(frozen=True)
class Box:
    """One box of a drawing, as the script draws it.

    Attributes:
        node: place in the record's list of nodes; -1 if the box is not a node.
        module: path of the folded module; "" if the box is not a module.
        label: the first line.
        below: the second line.
        style: "low", "fp32", "other", "module" or "outside".
        low: percentage of the nodes of a folded module that run low.
        fp32: percentage of them that run in FP32.
        casts: casts of weights in front of it.
        x: horizontal middle.
        y: vertical middle.
        width: in pixels.
    """

    node: int
    module: str
    label: str
    below: str
    style: str
    low: int = 0
    fp32: int = 0
    casts: tuple[str, ...] = ()
    x: int = 0
    y: int = 0
    width: int = 0


@dataclass(frozen=True)
class Edge:
    """An edge of a drawing: its boxes, the dtype that the value is cast to ("" for none), and the points on its way."""

    start: int
    end: int
    cast: str
    points: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class View:
    """One drawing of a module in one graph; a drawing of many nodes is split into several parts."""

    module: str
    title: str
    width: int
    height: int
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]


# The content of a box: the module that it folds, or "", and the places of its nodes, which follow each other.
_Run: TypeAlias = tuple[str, list[int]]


@dataclass
class _Graph:
    """One graph: its name, all nodes of the record, and the places of its own nodes there, by key and by module."""

    name: str
    nodes: Sequence[NodeRecord]
    places: dict[str, int]
    within: dict[str, list[int]] = field(default_factory=dict)  # what is in a module or below it


def views(nodes: Sequence[NodeRecord], states: Sequence[str] = ()) -> list[View]:
    """Return the drawings of every module with several nodes; none if the operands of nodes are not known.

    Args:
        nodes: the nodes of a record.
        states: the states that the graphs are for, each after the number of its graph: "12: evaluation".
    """
    graphs: dict[int, _Graph] = {}
    called = dict(state.split(": ", 1) for state in states)
    for place, node in enumerate(nodes):
        if node.graph not in graphs:
            name = called.get(str(node.graph), f"graph {node.graph}")
            # Decisions that a graph shares with the first graph are listed with the first only.
            graphs[node.graph] = _Graph(name, nodes, dict(next(iter(graphs.values())).places) if graphs else {})
        graph = graphs[node.graph]
        graph.places[node.key] = place
        for path in ("", *_upwards(node.module)):
            graph.within.setdefault(path, []).append(place)
    if not any(node.reads for node in nodes):
        return []
    return [view for graph in graphs.values() for view in _of_graph(graph, several=len(graphs) > 1)]


def _of_graph(graph: _Graph, several: bool) -> Iterator[View]:
    for module, places in graph.within.items():
        if len(places) == 1 and module:
            continue  # drawn within the enclosing module
        runs = _folded(graph, module)
        parts = [runs[at : at + MOST] for at in range(0, len(runs), MOST)]
        for number, part in enumerate(parts, 1):
            words = [graph.name] * several + [f"part {number} of {len(parts)}"] * (len(parts) > 1)
            yield _drawn(graph, module, ", ".join(words), part)


def _upwards(path: str) -> Iterator[str]:
    """Yield the paths of a module and of its ancestors, outermost first, without that of the whole model."""
    parts = path.split(".") if path else []
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])


def _folded(graph: _Graph, module: str) -> list[_Run]:
    """Return the boxes of a module, with as few modules folded as readability allows."""
    depth = module.count(".") + 1 if module else 0
    made = _runs(graph, module, depth)
    while any(path for path, _ in made):
        depth += 1
        finer = _runs(graph, module, depth)
        if len(finer) > EASY:
            break
        made = finer
    return made


def _runs(graph: _Graph, module: str, depth: int) -> list[_Run]:
    """Return the nodes of a module in order, grouped where consecutive nodes lie in one deeper module."""

    def deeper(place: int) -> str | int:
        parts = graph.nodes[place].module.split(".")
        return ".".join(parts[: depth + 1]) if len(parts) > depth and graph.nodes[place].module else place

    runs = []
    for path, places in itertools.groupby(graph.within[module], key=deeper):
        found = list(places)
        runs.append((path if isinstance(path, str) and len(found) > 1 else "", found))
    return runs


def _drawn(graph: _Graph, module: str, words: str, runs: Sequence[_Run]) -> View:
    """Draw some of a module's boxes, and the values that they read from other modules."""
    boxes: dict[object, Box] = {at: _box(graph, module, run) for at, run in enumerate(runs)}
    edges = _joined(graph, runs, boxes)
    order = sorted(boxes, key=lambda name: isinstance(name, int))  # values from outside come first
    layout = layered({name: boxes[name].width for name in order}, edges)
    number = {name: i for i, name in enumerate(order)}
    return View(
        module, words, layout.width, layout.height,
        tuple(_moved(boxes[name], layout.places[name]) for name in order),
        tuple(Edge(number[a], number[b], cast, tuple(layout.routes[a, b])) for (a, b), cast in edges.items()),
    )  # fmt: skip


def _joined(graph: _Graph, runs: Sequence[_Run], boxes: dict[object, Box]) -> dict[tuple[object, object], str]:
    """Return the edges between boxes, with the casts on them; add boxes for values from other modules."""
    boxed = {place: at for at, (_, places) in enumerate(runs) for place in places}
    readings = {(read.value, at) for place, at in boxed.items() for read in graph.nodes[place].reads}
    readers = Counter(value for value, _ in readings)
    edges: dict[tuple[object, object], str] = {}
    for place, at in boxed.items():
        for read in graph.nodes[place].reads:
            if read.kind == "attribute":
                continue
            start = graph.places.get(read.value) if read.kind == "node" else None
            origin: object = boxed.get(start) if start is not None else None
            if origin is None:
                origin = (read.value, at if readers[read.value] > _SHARED else "")
                if origin not in boxes:
                    boxes[origin] = _outside(graph, read.value, start)
            if origin != at:
                edges[origin, at] = edges.get((origin, at)) or read.cast
    return edges


def _box(graph: _Graph, module: str, run: _Run) -> Box:
    path, places = run
    if path:
        return _module(module, path, [graph.nodes[place] for place in places])
    (place,) = places
    node = graph.nodes[place]
    casts = tuple(f"{read.value} to {read.cast}" for read in node.reads if read.kind == "attribute" and read.cast)
    return _sized(Box(place, "", node.op, _below(node.module, module), style_of(node.colour), casts=casts))


def _module(module: str, path: str, nodes: Sequence[NodeRecord]) -> Box:
    """Return the box of a folded module. Its label is the last part of the path, or two if the last is a number."""
    low, fp32 = sum(n.colour in LOW for n in nodes), sum(n.colour == "float32" for n in nodes)
    parts = _below(path, module).split(".")
    named = 2 if parts[-1].isdecimal() and len(parts) > 1 else 1
    label, below = ".".join(parts[-named:]), ".".join(parts[:-named])
    shares = (round(100 * low / len(nodes)), round(100 * fp32 / len(nodes)))
    return _sized(Box(-1, path, f"{label} ({len(nodes)})", below, "module", *shares))


def _outside(graph: _Graph, value: str, place: int | None) -> Box:
    if place is not None:
        return _sized(Box(place, "", graph.nodes[place].op, graph.nodes[place].module, "outside"))
    return _sized(Box(-1, "", value, "input", "outside"))


def _below(path: str, module: str) -> str:
    """Return the path of a module inside another."""
    return path[len(module) + 1 :] if module else path


def _sized(box: Box) -> Box:
    label, below = (text if len(text) <= _LONGEST else f"…{text[1 - _LONGEST :]}" for text in (box.label, box.below))
    return replace(box, label=label, below=below, width=round(_CHARACTER * max(len(label), len(below), 4)) + 18)


def _moved(box: Box, place: tuple[int, int]) -> Box:
    return replace(box, x=place[0], y=place[1])
