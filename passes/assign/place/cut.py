"""Choose which values to store low so that the fewest bytes move: a minimum cut, solved block by block.

The source is the low side, the sink FP32; the cost is that of the edges from the low to the FP32 side. A node has edges
to both terminals, whose costs are those of running it in either dtype. A tensor's net costs one cast, however many
readers need the other dtype:

    u low, some reader FP32:   u -> a (cost of the upcast), a -> reader (inf)
    a reader that casts up by itself:      a -> reader (cost of its gradient's cast)
    u FP32, some reader low:   reader -> b (inf), b -> u (cost of the downcast)
    "v low implies w low":     v -> w (inf)

The time of a cut grows faster than its size, but between two layers there is often one variable that all paths go
through, such as the residual stream. There the problem splits into blocks, the biconnected components of the graph of
variables. Each is solved twice, for either side of the variable that it shares with its parent block, and the two costs
are added to that variable's own; once the parent has fixed the side, the solution of the block is known. This is exact.

Nothing here knows of ops. Of several minimum cuts the one with the smallest FP32 side is taken, so that plans are
reproducible: minimum cuts are closed under intersection, so it is unique, and within each block the smallest too.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

import networkx as nx

from ...contract.costs import PricedNet

Variable = Hashable


class Side(enum.Enum):
    """The terminals of a cut: readers and tensors whose side is fixed."""

    LOW = "low"
    FP32 = "fp32"


Cost = int | float  # float("inf") rules a side out
INFINITY = float("inf")


@dataclass
class Problem:
    """A placement problem."""

    low: dict[Variable, Cost] = field(default_factory=dict)  # what each variable costs on the low side
    fp32: dict[Variable, Cost] = field(default_factory=dict)  # what each variable costs on the FP32 side
    # Tensors with their readers, each a variable, or a side if its dtype is fixed.
    nets: list[PricedNet] = field(default_factory=list)
    # Pairs (v, w): v low implies w low. Side.FP32 as w forbids v to be low; Side.LOW as v forces w low.
    implies: list[tuple[Variable, Variable]] = field(default_factory=list)

    def add(self, variable: Variable, low: Cost, fp32: Cost) -> None:
        """Add a free variable with its costs on both sides."""
        self.low[variable], self.fp32[variable] = low, fp32

    def cost(self, low_side: Iterable[Variable]) -> Cost:
        """Return the cost of a placement; infinite when it breaks an implication."""
        side = {Side.LOW, *low_side}
        if any(v in side and w not in side for v, w in self.implies):
            return INFINITY
        total = sum(self.low[v] if v in side else self.fp32[v] for v in self.low)
        return total + sum(net.cost(side) for net in self.nets)


def solve(problem: Problem) -> set[Variable]:
    """Return the variables on the low side of the cheapest placement.

    Raises:
        networkx.NetworkXUnbounded: no placement keeps all implications.
    """
    own: dict[Variable, dict[Variable, Cost]] = {Side.LOW: dict(problem.low), Side.FP32: dict(problem.fp32)}
    solved: list[tuple[Variable, dict[Variable, set[Variable]]]] = []
    for block, top in blocks(problem):
        for v in block.low:
            block.add(v, own[Side.LOW][v], own[Side.FP32][v])
        if top is None:
            solved.append((Side.FP32, {Side.FP32: _solve_part(block)}))
            continue
        answers: dict[Variable, set[Variable]] = {}
        for side, costs in own.items():
            part = _with_top(block, top, side)
            try:
                answers[side] = _solve_part(part)
                costs[top] += part.cost(answers[side])
            except nx.NetworkXUnbounded:
                costs[top] = INFINITY
        solved.append((top, answers))
    low_side: set[Variable] = set()
    for top, answers in reversed(solved):
        low_side |= answers[Side.LOW if top in low_side else Side.FP32]
    return low_side


def blocks(problem: Problem) -> list[tuple[Problem, Variable | None]]:
    """Split a problem into parts, leaves first, each with the one variable that a later part shares, if any."""
    graph: nx.Graph[Variable] = nx.Graph()
    graph.add_nodes_from(problem.low)
    ties: list[PricedNet | tuple[Variable, Variable]] = [*problem.nets, *problem.implies]
    for tie in ties:
        if len(free := _free(problem, tie)) > 1:
            nx.add_cycle(graph, free)  # a cycle lies in one block, so tied variables stay together
    components = [*nx.biconnected_component_edges(graph), *([(v, v)] for v in nx.isolates(graph))]
    members = [list(dict.fromkeys(itertools.chain(*edges))) for edges in components]
    left = Counter(itertools.chain(*members))
    parts: list[tuple[Problem, Variable | None]] = []
    home: dict[frozenset[Variable], Problem] = {}  # a part that has this edge, or this variable
    for edges, inside in zip(components, members, strict=True):
        left.subtract(inside)
        top = next((v for v in inside if left[v]), None)
        part = Problem()
        for v in inside:
            home.setdefault(frozenset([v]), part)
            if v is not top:
                part.add(v, problem.low[v], problem.fp32[v])
        home.update((frozenset(edge), part) for edge in edges if edge[0] != edge[1])
        parts.append((part, top))
    for net in problem.nets:
        if free := _free(problem, net):
            home[frozenset(free[:2])].nets.append(net)
    for pair in problem.implies:
        if free := _free(problem, pair):
            home[frozenset(free[:2])].implies.append(pair)
    return parts


def _free(problem: Problem, tie: PricedNet | tuple[Variable, Variable]) -> list[Variable]:
    """Return the variables of a net or an implication, each once."""
    ends = (tie.value, *tie.readers) if isinstance(tie, PricedNet) else tie
    return [v for v in dict.fromkeys(ends) if v in problem.low]


def _with_top(part: Problem, top: Variable, side: Variable) -> Problem:
    """Return a part in which the side of its top is fixed."""

    def end(v: Variable) -> Variable:
        return side if v == top else v

    nets = [replace(n, value=end(n.value), readers=tuple(map(end, n.readers))) for n in part.nets]
    return Problem(part.low, part.fp32, nets, [(end(v), end(w)) for v, w in part.implies])


def _solve_part(problem: Problem) -> set[Variable]:
    graph: nx.DiGraph[Hashable] = nx.DiGraph()
    graph.add_nodes_from(Side)
    for v in problem.low:
        _edge(graph, Side.LOW, v, problem.fp32[v])
        _edge(graph, v, Side.FP32, problem.low[v])
    for i, net in enumerate(problem.nets):
        up, down = ("up", i), ("down", i)  # two vertices, by which a cast of a tensor is paid once
        if net.value != Side.FP32:
            _edge(graph, net.value, up, net.up)
        if net.value != Side.LOW:
            _edge(graph, down, net.value, net.down)
        for reader, alone in zip(net.readers, net.alone or itertools.repeat(None), strict=False):
            if net.value != Side.FP32 and reader != Side.LOW:
                _edge(graph, up, reader, INFINITY if alone is None else alone)
            if net.value != Side.LOW and reader != Side.FP32:
                _edge(graph, reader, down, INFINITY)
    for v, w in problem.implies:
        if v != Side.FP32 and w != Side.LOW:
            _edge(graph, v, w, INFINITY)
    residual = nx.algorithms.flow.boykov_kolmogorov(graph, Side.LOW, Side.FP32)
    fp32_side = residual.graph["trees"][1]  # what can still reach the sink: the smallest FP32 side of all minimum cuts
    return {v for v in problem.low if v not in fp32_side}


def _edge(graph: nx.DiGraph[Hashable], tail: Hashable, head: Hashable, capacity: Cost) -> None:
    """Add a capacity; parallel edges add up. No cut may sever an infinite one."""
    if capacity:
        before = graph.edges[tail, head]["capacity"] if graph.has_edge(tail, head) else 0
        graph.add_edge(tail, head, capacity=before + capacity)
