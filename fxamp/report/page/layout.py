"""Lay out the nodes of a drawing: layers from top to bottom, few crossings, straight edges.

These are the usual four steps of a layered layout: assign each node to a layer; put a dummy node into every layer that
an edge passes; order each layer by the mean place of the neighbours; and place nodes in that order, as near to their
neighbours as possible.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import networkx as nx

LAYER, GAP = 62, 18  # pixels from layer to layer, and between two nodes of a layer
_SWEEPS = 6
_DUMMY = 6.0  # width that an edge gets in a layer that it passes
_STRAIGHT = 8  # weight of keeping an edge straight that passes several layers; other edges have 1

Name: TypeAlias = Hashable
Neighbours: TypeAlias = "nx.Graph[Name]"


@dataclass(frozen=True)
class Layout:
    """Places of a drawing, in whole pixels.

    Attributes:
        width: width of the drawing.
        height: height from the middle of the first layer to that of the last.
        places: middle of each node.
        routes: points that each edge passes, its ends included.
    """

    width: int
    height: int
    places: dict[Name, tuple[int, int]]
    routes: dict[tuple[Name, Name], list[tuple[int, int]]]


def layered(widths: Mapping[Name, float], edges: Iterable[tuple[Name, Name]]) -> Layout:
    """Lay out a graph, the same way for the same graph.

    Args:
        widths: widths of the nodes in pixels, in the order in which the nodes run.
        edges: pairs of nodes; an edge to a node that ran earlier is drawn upwards.
    """
    rank = {name: i for i, name in enumerate(widths)}
    given = list(dict.fromkeys((a, b) for a, b in edges if a != b))
    chains, layers = _chained(widths, [(a, b) if rank[a] < rank[b] else (b, a) for a, b in given])
    graph: Neighbours = nx.Graph()
    for chain in chains.values():
        graph.add_edges_from(itertools.pairwise(chain))
    width = {name: widths.get(name, _DUMMY) for layer in layers for name in layer}
    _order(layers, graph)
    xs = _placed(layers, graph, width)
    left = min((xs[n] - width[n] / 2 for n in xs), default=0.0)
    right = max((xs[n] + width[n] / 2 for n in xs), default=0.0)
    points = {n: (round(xs[n] - left), depth * LAYER) for depth, layer in enumerate(layers) for n in layer}
    routes = {}
    for a, b in given:
        chain = chains[(a, b) if rank[a] < rank[b] else (b, a)]
        route = [points[name] for name in chain]
        routes[a, b] = route if rank[a] < rank[b] else route[::-1]
    places = {name: points[name] for name in widths}
    return Layout(round(right - left), max(0, len(layers) - 1) * LAYER, places, routes)


def _chained(
    widths: Mapping[Name, float], edges: Sequence[tuple[Name, Name]]
) -> tuple[dict[tuple[Name, Name], list[Name]], list[list[Name]]]:
    """Give every node its layer, and every edge a dummy in each layer that it passes."""
    graph: nx.DiGraph[Name] = nx.DiGraph()
    graph.add_nodes_from(widths)
    graph.add_edges_from(edges)
    layers: list[list[Name]] = [list(layer) for layer in nx.topological_generations(graph)]
    depth = {name: d for d, layer in enumerate(layers) for name in layer}
    for name in reversed(list(nx.topological_sort(graph))):  # a node without inputs stands right above its readers
        readers = list(graph.successors(name))
        if readers and not graph.in_degree(name):
            depth[name] = min(depth[r] for r in readers) - 1
    rank = {name: i for i, name in enumerate(widths)}
    layers = [[] for _ in layers]
    for name in sorted(widths, key=rank.__getitem__):
        layers[depth[name]].append(name)
    chains = {}
    for a, b in edges:
        passed = [(a, b, d) for d in range(depth[a] + 1, depth[b])]
        for dummy in passed:
            layers[dummy[2]].append(dummy)
        chains[a, b] = [a, *passed, b]
    return chains, layers


def _order(layers: list[list[Name]], graph: Neighbours) -> None:
    """Sort each layer by the mean place of its neighbours in the layer before, down and up in turn."""
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        walk = range(1, len(layers)) if down else range(len(layers) - 2, -1, -1)
        for at in walk:
            beside = {name: i for i, name in enumerate(layers[at - 1 if down else at + 1])}
            means = {}
            for i, name in enumerate(layers[at]):
                found = [beside[n] for n in graph.adj.get(name, ()) if n in beside]
                means[name] = sum(found) / len(found) if found else float(i)
            layers[at].sort(key=means.__getitem__)


def _placed(layers: Sequence[Sequence[Name]], graph: Neighbours, width: Mapping[Name, float]) -> dict[Name, float]:
    """Put every node as near to the mean of its neighbours as the order and the widths of its layer allow."""
    xs: dict[Name, float] = {}
    weights = {name: _weight(name, graph, width) for name in width}
    for layer in layers:
        xs |= zip(layer, _apart([(0.0, 1.0, width[n]) for n in layer]), strict=True)
    where = {name: d for d, layer in enumerate(layers) for name in layer}
    for sweep in range(2 * _SWEEPS):
        walk = list(range(len(layers)))
        for at in walk if sweep % 2 == 0 else walk[::-1]:
            wanted = []
            for name in layers[at]:
                beside = graph.adj.get(name, ())
                near = [n for n in beside if sweep >= _SWEEPS or (where[n] < at) == (sweep % 2 == 0)]
                pull = {n: _STRAIGHT if width[name] == width[n] == _DUMMY else weights[n] for n in near}
                wanted.append(sum(xs[n] * pull[n] for n in near) / sum(pull.values()) if near else xs[name])
            sizes = [(want, weights[n], width[n]) for want, n in zip(wanted, layers[at], strict=True)]
            xs |= zip(layers[at], _apart(sizes), strict=True)
    return xs


def _weight(name: Name, graph: Neighbours, width: Mapping[Name, float]) -> float:
    """Return the weight of a node: nodes with one neighbour, and dummies of passing edges, give way to the others."""
    if width[name] == _DUMMY:
        return 0.2
    return 0.05 if len(graph.adj.get(name, ())) < 2 else 1.0


def _apart(nodes: Sequence[tuple[float, float, float]]) -> list[float]:
    """Return the positions nearest to the wanted ones, by least squares, that keep the order without overlap.

    Args:
        nodes: the wanted position, the weight and the width of each node of a layer, from left to right.
    """
    offsets, at = [], 0.0
    for i, (_, _, width) in enumerate(nodes):
        at += (nodes[i - 1][2] / 2 + GAP + width / 2) if i else 0.0
        offsets.append(at)
    blocks: list[tuple[float, float, int]] = []  # for each block its wanted start, weight and number of nodes
    for (want, weight, _), offset in zip(nodes, offsets, strict=True):
        mean, count = want - offset, 1
        while blocks and blocks[-1][0] > mean:
            before, heavy, many = blocks.pop()
            mean = (before * heavy + mean * weight) / (heavy + weight)
            weight, count = heavy + weight, many + count
        blocks.append((mean, weight, count))
    starts = [mean for mean, _, count in blocks for _ in range(count)]
    return [start + offset for start, offset in zip(starts, offsets, strict=True)]
