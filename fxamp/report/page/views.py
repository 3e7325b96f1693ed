"""What is drawn of a module: its nodes, with the modules inside it folded until the drawing can be read.

Whole: a drawing of 12 layers with 500 nodes            Folded: 12 boxes, each of which opens its own drawing
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..record import NodeRecord
from ..tree import LOW
from .layout import layered

MOST = 200  # boxes of a drawing
EASY = 60  # boxes; modules are folded until there are no more, where that is possible
_SHARED = 4  # boxes that read a value from outside; where there are more, it is drawn at each of them
_CHARACTER, _LONGEST = 7.0, 26  # pixels of one; how many are shown


@dataclass(frozen=True)
class Box:
    """One box of a drawing, as the script draws it.

    Attributes:
        node: place in the record's list of nodes; -1 for what is none.
        module: path of the folded module; "" for what is none.
        label: the first line.
        below: the second line.
        style: "low", "fp32", "other", "module" or "outside".
        low: of the nodes of a module, how many run low, in percent.
        fp32: likewise, FP32.
        casts: of weights, in front of it.
        x: of its middle.
        y: of its middle.
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
    """A value on its way: from which box to which, the dtype that it is cast to ("" for none), the points it passes."""

    start: int
    end: int
    cast: str
    points: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class View:
    """One drawing of a module: of one graph, and of many nodes one part after the other."""

    module: str
    title: str
    width: int
    height: int
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]


@dataclass
class _Graph:
    """The nodes of one graph in their order, by place in the record, and where their values come from."""

    number: int
    nodes: dict[int, NodeRecord] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    within: dict[str, list[int]] = field(default_factory=dict)  # by module, what is in it or below it


def views(nodes: Sequence[NodeRecord]) -> list[View]:
    """Return the drawings of every module with several nodes; none where it is not known what they read."""
    graphs: dict[int, _Graph] = {}
    for place, node in enumerate(nodes):
        graph = graphs.setdefault(node.graph, _Graph(node.graph))
        graph.nodes[place] = node
        graph.places[node.key] = place
        for path in ("", *_upwards(node.module)):
            graph.within.setdefault(path, []).append(place)
    if not any(node.reads for node in nodes):
        return []
    return [view for graph in graphs.values() for view in _of_graph(graph, several=len(graphs) > 1)]


def _of_graph(graph: _Graph, several: bool) -> Iterator[View]:
    for module, places in graph.within.items():
        if len(places) == 1 and module:
            continue  # it is drawn in the module round it
        boxed = _folded(graph, module)
        names = list(dict.fromkeys(boxed.values()))
        parts = [names[at : at + MOST] for at in range(0, len(names), MOST)]
        for number, part in enumerate(parts, 1):
            words = [f"graph {graph.number}"] * several + [f"part {number} of {len(parts)}"] * (len(parts) > 1)
            yield _drawn(graph, module, ", ".join(words), boxed, set(part))


def _upwards(path: str) -> Iterator[str]:
    """Yield the path of a module and of those round it, the outermost first, the whole model left out."""
    parts = path.split(".") if path else []
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])


def _folded(graph: _Graph, module: str) -> dict[int, int | str]:
    """Return the box of each node, its own or that of a folded module: at the greatest depth that is easy to read."""
    skip = module.count(".") + 1 if module else 0
    made: dict[int, int | str] = {}
    for depth in itertools.count():
        finer: dict[int, int | str] = {}
        for place in graph.within[module]:
            path = ".".join(graph.nodes[place].module.split(".")[: skip + depth + 1])
            deeper = graph.nodes[place].module.count(".") + bool(graph.nodes[place].module) > skip + depth
            finer[place] = path if deeper and len(graph.within[path]) > 1 else place
        if made and (finer == made or len(set(finer.values())) > EASY):
            return made
        made = finer
    raise AssertionError("unreachable")


def _drawn(graph: _Graph, module: str, words: str, boxed: dict[int, int | str], part: set[int | str]) -> View:
    """Draw one part of a module's boxes, with what it reads from elsewhere."""
    inside = [(place, name) for place, name in boxed.items() if name in part]
    readings = {(read.value, name) for place, name in inside for read in graph.nodes[place].reads}
    readers = Counter(value for value, _ in readings)
    boxes: dict[object, Box] = {}
    edges: dict[tuple[object, object], str] = {}
    for place, name in inside:
        node = graph.nodes[place]
        if name not in boxes:
            boxes[name] = _box(graph, module, place, name)
        for read in node.reads:
            if read.kind == "attribute":
                continue
            start: object = graph.places.get(read.value) if read.kind == "node" else read.value
            origin: object = boxed.get(start) if isinstance(start, int) else None
            if origin is None or origin not in part:
                origin = ("outside", read.value, name if readers[read.value] > _SHARED else "")
                if origin not in boxes:
                    boxes[origin] = _outside(graph, read.value, start)
            if origin != name:
                edges[origin, name] = edges.get((origin, name)) or read.cast
    order = sorted(boxes, key=lambda name: not isinstance(name, tuple))  # what comes from outside stands first
    layout = layered({name: boxes[name].width for name in order}, edges)
    at = {name: i for i, name in enumerate(order)}
    return View(
        module, words, layout.width, layout.height,
        tuple(_moved(boxes[name], layout.places[name]) for name in order),
        tuple(Edge(at[a], at[b], cast, tuple(layout.routes[a, b])) for (a, b), cast in edges.items()),
    )  # fmt: skip


def _box(graph: _Graph, module: str, place: int, name: int | str) -> Box:
    node = graph.nodes[place]
    if isinstance(name, str):
        return _module(graph, module, name)
    casts = tuple(f"{read.value} to {read.cast}" for read in node.reads if read.kind == "attribute" and read.cast)
    style = "low" if node.colour in LOW else "fp32" if node.colour == "float32" else "other"
    return _sized(Box(place, "", node.op, _below(node.module, module), style, casts=casts))


def _module(graph: _Graph, module: str, path: str) -> Box:
    """Return the box of a folded module, which is called by its last name, and by one more where that is a number."""
    found = [graph.nodes[place] for place in graph.within[path]]
    low, fp32 = (sum(test(n) for n in found) for test in (lambda n: n.colour in LOW, lambda n: n.colour == "float32"))
    parts = _below(path, module).split(".")
    named = 2 if parts[-1].isdecimal() and len(parts) > 1 else 1
    label, below = ".".join(parts[-named:]), ".".join(parts[:-named])
    shares = (round(100 * low / len(found)), round(100 * fp32 / len(found)))
    return _sized(Box(-1, path, f"{label} ({len(found)})", below, "module", *shares))


def _outside(graph: _Graph, value: str, place: object) -> Box:
    if isinstance(place, int):
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
