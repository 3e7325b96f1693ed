"""Which values are stored low, so that the fewest bytes move: a minimum cut, solved region by region.

The source is the low side, the sink FP32; what is paid are the edges from the low side to the FP32 side. A node's
terminal edges cost what running it in the other dtype costs; a tensor's net costs one cast, whoever and however many
read it in the other dtype:

    u low, some reader FP32:   u -> a (cost of the upcast), a -> reader (inf)
    u FP32, some reader low:   reader -> b (inf), b -> u (cost of the downcast)
    "v low implies w low":     v -> w (inf)

This file knows nothing of ops: it takes variables, terminals, nets and implications, and returns the low side. Of
several minimum cuts it takes the one with the smallest FP32 side, so that plans are reproducible.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

import networkx as nx

Variable = Hashable
LOW, FP32 = "low", "fp32"  # terminals: readers and tensors whose side is fixed


@dataclass(frozen=True)
class Net:
    """One tensor and those who read it: casting it costs `cost`, once per direction.

    Attributes:
        tensor: the variable that makes it, or LOW or FP32 when that is fixed.
        readers: variables, LOW or FP32.
        cost: of one cast.
    """

    tensor: Variable
    readers: tuple[Variable, ...]
    cost: int


@dataclass
class Problem:
    """A placement problem.

    Attributes:
        low: what each variable costs on the low side.
        fp32: what each variable costs on the FP32 side.
        nets: tensors with their readers.
        implies: pairs (v, w): v low implies w low. FP32 as w forbids v to be low; LOW as v forces w low.
    """

    low: dict[Variable, int] = field(default_factory=dict)
    fp32: dict[Variable, int] = field(default_factory=dict)
    nets: list[Net] = field(default_factory=list)
    implies: list[tuple[Variable, Variable]] = field(default_factory=list)

    def add(self, variable: Variable, low: int, fp32: int) -> None:
        """Add a free variable with its costs on both sides."""
        self.low[variable], self.fp32[variable] = low, fp32

    def cost(self, low_side: Iterable[Variable]) -> float:
        """Return the cost of a placement; infinite when it breaks an implication."""
        side = {LOW, *low_side}
        total: float = sum(self.low[v] if v in side else self.fp32[v] for v in self.low)
        for net in self.nets:
            total += net.cost * any((r in side) != (net.tensor in side) for r in net.readers)
        return float("inf") if any(v in side and w not in side for v, w in self.implies) else total


def solve(problem: Problem) -> set[Variable]:
    """Return the variables on the low side of the cheapest placement."""
    low_side: set[Variable] = set()
    for region in regions(problem):
        low_side |= _solve_region(region)
    return low_side


def regions(problem: Problem) -> list[Problem]:
    """Split a problem into parts that share no variable; fixed sides separate them."""
    parent: dict[Variable, Variable] = {v: v for v in problem.low}

    def find(v: Variable) -> Variable:
        while parent[v] != v:
            parent[v] = parent[parent[v]]
            v = parent[v]
        return v

    def union(group: Iterable[Variable]) -> None:
        free = [v for v in group if v in parent]
        for v in free[1:]:
            parent[find(v)] = find(free[0])

    for net in problem.nets:
        union((net.tensor, *net.readers))
    for pair in problem.implies:
        union(pair)
    parts: dict[Variable, Problem] = {}
    for v in problem.low:
        parts.setdefault(find(v), Problem()).add(v, problem.low[v], problem.fp32[v])
    for net in problem.nets:
        inside = next((v for v in (net.tensor, *net.readers) if v in parent), None)
        if inside is not None:
            parts[find(inside)].nets.append(net)
    for pair in problem.implies:
        inside = next((v for v in pair if v in parent), None)
        if inside is not None:
            parts[find(inside)].implies.append(pair)
    return list(parts.values())


def _solve_region(problem: Problem) -> set[Variable]:
    graph: nx.DiGraph[Hashable] = nx.DiGraph()
    ends: Mapping[Variable, Hashable] = {LOW: "source", FP32: "sink"}

    def node(v: Variable) -> Hashable:
        return ends.get(v, ("v", v))

    graph.add_nodes_from(["source", "sink"])
    for v in problem.low:
        _edge(graph, "source", node(v), problem.fp32[v])
        _edge(graph, node(v), "sink", problem.low[v])
    for i, net in enumerate(problem.nets):
        tensor = node(net.tensor)
        if tensor != "sink":
            _edge(graph, tensor, ("up", i), net.cost)
        if tensor != "source":
            _edge(graph, ("down", i), tensor, net.cost)
        for reader in set(net.readers):
            if tensor != "sink" and reader != LOW:
                _infinite(graph, ("up", i), node(reader))
            if tensor != "source" and reader != FP32:
                _infinite(graph, node(reader), ("down", i))
    for v, w in problem.implies:
        if v != FP32 and w != LOW:
            _infinite(graph, node(v), node(w))
    if len(problem.low) == 0:
        return set()
    residual = nx.algorithms.flow.boykov_kolmogorov(graph, "source", "sink")
    # The FP32 side is what can still reach the sink: of all minimum cuts the one with the fewest values in FP32.
    fp32_side = {"sink"}
    front: list[Hashable] = ["sink"]
    while front:
        w = front.pop()
        for v, data in residual.pred[w].items():
            if v not in fp32_side and data["flow"] < data["capacity"]:
                fp32_side.add(v)
                front.append(v)
    return {v for v in problem.low if node(v) not in fp32_side}


def _infinite(graph: nx.DiGraph[Hashable], tail: Hashable, head: Hashable) -> None:
    """Make an edge that no cut may sever, whatever capacity it had."""
    graph.add_edge(tail, head)
    graph.edges[tail, head].pop("capacity", None)


def _edge(graph: nx.DiGraph[Hashable], tail: Hashable, head: Hashable, capacity: int) -> None:
    """Add a capacity; parallel edges add up. No capacity at all is infinity to networkx."""
    if capacity and not (graph.has_edge(tail, head) and "capacity" not in graph.edges[tail, head]):
        held = graph.edges[tail, head]["capacity"] if graph.has_edge(tail, head) else 0
        graph.add_edge(tail, head, capacity=held + capacity)
