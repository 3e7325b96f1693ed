"""The placement of free values as a problem for the cut: what must go together, and what each net costs.

A net is a tensor and its readers: it costs one cast, however many readers need the other dtype. At O1 an FP32 value may
be stored low only where every use rounds it to this dtype; from O2 on only the costs decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ...contract.costs import Candidate, CostModel, Net, Read, Run
from ...contract.reasons import CAST
from ...form import Position, Replace
from ...graph.aliases import mutated_operands
from ...graph.grad import grad_modes, shares_cast, shares_storage, what_it_reads
from ...graph.values import ELIGIBLE, ValueDtype
from ...ops import ops
from ...ops.facts import absorbs_cast
from ...ops.rules import FOLLOW, FP32, LOW, PROMOTE, row_of
from ..colour.simulate import Simulation
from .costs import priced
from .cut import Problem, Side, Variable


class Uses:
    """Who reads each value of a graph, at which operand, and in which dtype it must find it, as the simulation left it.

    Attributes:
        readers: for each value, who reads it, and at which operand.
        needs: the dtype that each operand of a node must have, given the node's present dtype.
    """

    def __init__(self, simulation: Simulation, free: Mapping[Node, None], grad: frozenset[Node]) -> None:
        self.simulation, self.free, self.grad, self._returned = simulation, free, grad, simulation.returned()
        self.needs = {n: self._needs(n) for n in simulation.graph.nodes}
        self.readers: dict[Node, list[tuple[Node, Position]]] = {n: [] for n in simulation.graph.nodes}
        for node in simulation.graph.nodes:
            for o in ops.operands(node):
                self.readers[o.node].append((node, o.place))

    def follows(self, reader: Node, where: Position) -> bool:
        """Say whether an operand must have the dtype of its reader, whichever dtype is chosen for that."""
        if reader not in self.free:
            return False
        row = row_of(reader)
        return where[0] not in row.uncast and (not row.cast_arguments or where[0] in row.cast_arguments)

    def wanted(self, reader: Node, where: Position, dtype: torch.dtype) -> ValueDtype:
        """Return the dtype that an operand must have if its reader is to run in a dtype."""
        return dtype if self.follows(reader, where) else self.needs[reader][where]

    def upcasts(self, node: Node) -> bool:
        """Say whether the user casts a value up here."""
        choice = self.simulation.colours.get(node)
        if choice is None or choice.reason.kind != CAST or choice.dtype != torch.float32:
            return False
        value: Any = node.args[0]
        return self.simulation.dtypes[value] in ELIGIBLE

    def takes_either(self, node: Node) -> bool:
        """Say whether a fixed node reads its operands in whatever dtype they are stored: a comparison, from O2 on."""
        choice = self.simulation.colours.get(node)
        if choice is None or not self.simulation.policy.level.stores_low or node in self.free:
            return False
        row = row_of(node)
        plain = choice.reason.kind in (PROMOTE, FOLLOW) and not (
            choice.reason.final or choice.casts or choice.has(Replace)
        )
        return plain and row.gives in ("bool", "int") and not row.same_dtype and not mutated_operands(node)

    def side(self, reader: Node, where: Position) -> Variable | None:
        """Return the variable, or the fixed side, that sets the dtype a reader needs; None if any dtype will do."""
        if self.follows(reader, where):
            return reader
        if self.takes_either(reader) or (reader not in self.simulation.colours and reader.op != "output"):
            return None  # a comparison; or it reads a size, or is an assertion of the exporter's
        needed = self.needs[reader].get(where)
        return Side.LOW if needed == self.simulation.low else Side.FP32 if needed == torch.float32 else None

    def variable(self, value: Node) -> Variable:
        """Return the variable that a value is, or its side if its dtype is fixed."""
        fixed = Side.LOW if self.simulation.dtypes.get(value) == self.simulation.low else Side.FP32
        return value if value in self.free else fixed

    def _needs(self, node: Node) -> dict[Position, ValueDtype]:
        simulation, places = self.simulation, {o.place: o.node for o in ops.operands(node)}
        if simulation.policy.level.stores_low and self.upcasts(node):
            return dict.fromkeys(places, torch.float32)  # the user's upcast needs an FP32 operand to do nothing
        if node.op == "output":
            return {p: self._returned[n] for p, n in places.items()}
        casts = simulation.colours[node].casts if node in simulation.colours else {}
        return {p: casts[p] if p in casts else simulation.dtypes[n] for p, n in places.items()}


def unpriced_problem(uses: Uses) -> Problem:
    """Return a problem with the free nodes as its variables, and with all constraints on them."""
    problem = Problem()
    for node in uses.free:
        problem.add(node, 0, 0)
        _imply(problem, node, uses)
    for node in uses.free:
        for reader, _ in uses.readers[node]:  # x[i] has the dtype of x, a tuple or a tensor
            if row_of(reader).asks == "item" and reader in uses.free:
                problem.implies += [(node, reader), (reader, node)]
    return problem


def _imply(problem: Problem, node: Node, uses: Uses) -> None:
    """At O1: an FP32 value may be stored low only where every use rounds it to this dtype."""
    simulation, low = uses.simulation, uses.simulation.low
    colours, dtypes = simulation.colours, simulation.dtypes
    if simulation.policy.level.stores_low or isinstance(dtypes[node], tuple):
        return
    if node in colours and colours[node].reason.kind == FP32:
        problem.implies += [(node, o.node if o.node in uses.free else Side.LOW) for o in ops.operands(node)]
    if dtypes[node] == low:
        return
    for reader, where in uses.readers[node]:
        follows = reader in uses.free and dtypes[reader] != low
        if follows and (reader not in colours or colours[reader].reason.kind != FP32):
            problem.implies.append((node, reader))
        elif uses.needs[reader].get(where) != low:
            problem.implies.append((node, Side.FP32))


def price(problem: Problem, uses: Uses, costs: CostModel) -> Mapping[str, int]:
    """Fill in what everything costs: each free node on both sides, and nets; return what was measured for it.

    Of placements that cost the same, the one that rounds the fewest results is the cheapest.
    """
    low, returned, modes = uses.simulation.low, _returned(uses), grad_modes(uses.simulation.graph)

    def run(node: Node, dtype: torch.dtype) -> Run:
        return Run(node, dtype, {o.place: uses.wanted(node, o.place, dtype) for o in ops.operands(node)})

    nodes = [Candidate(run(n, low), run(n, torch.float32), uses.grad, _rounds(n), n in returned) for n in uses.free]
    values: dict[Any, list[Node]] = {}
    for node in uses.simulation.graph.nodes:
        values.setdefault(what_it_reads(node), []).append(node)
    nets, sides = list[Net](), dict[tuple[Any, Any], Variable]()
    for alike in values.values():
        for net, of_readers in _nets(alike, uses, modes):
            nets.append(net)
            sides |= {(net.value, reader): side for reader, side in of_readers.items()}
    prices = priced(costs, nodes, nets)
    scaled = prices.times(len(nodes) + 1)  # one unit of cost weighs more than the roundings of all nodes together
    for node, (in_low, in_fp32) in zip(nodes, scaled.nodes, strict=True):
        problem.add(node.node, in_low + node.rounds, in_fp32)
    for priced_net in scaled.nets:
        value: Any = priced_net.value
        readers = tuple(sides[value, reader] for reader in priced_net.readers)
        problem.nets.append(replace(priced_net, value=uses.variable(value), readers=readers))
    return prices.timings


def _rounds(node: Node) -> bool:
    """Say whether an op rounds a result of its own: one that only moves values does not, nor does a cast."""
    return row_of(node).commutes == "" and not row_of(node).is_cast


def _returned(uses: Uses) -> set[Node]:
    """Return the free nodes whose result leaves the graph in FP32, moved on the way or not."""
    nodes: set[Node] = set()
    for node in reversed([*uses.free]):
        for reader, where in uses.readers[node]:
            leaves = reader.op == "output" and uses.needs[reader].get(where) == torch.float32
            if leaves or (reader in nodes and not _rounds(reader)):
                nodes.add(node)
    return nodes


def _nets(
    nodes: Sequence[Node], uses: Uses, modes: Mapping[Node, tuple[bool | None, int]]
) -> Iterator[tuple[Net, dict[Node, Variable]]]:
    """Yield the groups of reads of a value that share casts, and the side of each reader; none where all are fixed.

    Casts that share a storage are two things: one cast of the value for all, and one of the gradient for each.
    `nodes` are the value; of an attribute that is read at several places there are several.
    """
    simulation, value = uses.simulation, nodes[0]
    if simulation.dtypes.get(value) not in (simulation.low, torch.float32):
        return
    mode = simulation.policy.sharing
    storage = value in uses.grad and shares_storage(mode, value, simulation.device)
    casts: dict[Any, list[_Read]] = {}
    storages: dict[Any, list[_Read]] = {}
    for node, (reader, where) in ((n, read) for n in nodes for read in uses.readers[n]):
        side = uses.side(reader, where)
        if side is None:
            continue
        by_rule = reader in simulation.colours and simulation.colours[reader].reason.kind == LOW
        when = modes.get(reader), simulation.aliases.epoch(node, reader)
        key = when if (shared := shares_cast(mode, node, reader, by_rule, uses.grad)) else reader
        casts.setdefault((shared, key), []).append(_Read(node, reader, side))
        if storage:
            storages.setdefault(when, []).append(_Read(node, reader, side))
    for (shared, _), group in casts.items():
        count = 1 if shared else len(group)
        yield from _net(value, group, (0 if storage else count, count), shared, uses)
    for group in storages.values():
        yield from _net(value, group, (1, 0), False, uses)


class _Read(NamedTuple):
    node: Node
    reader: Node
    side: Variable


def _net(
    value: Node, group: Sequence[_Read], casts: tuple[int, int], shared: bool, uses: Uses
) -> Iterator[tuple[Net, dict[Node, Variable]]]:
    """Yield a group of reads with the casts that it needs, unless everything is fixed."""
    if not any(s in uses.free for s in (uses.variable(value), *(read.side for read in group))):
        return
    grad, times = value in uses.grad, Counter(read.reader for read in group)
    casts = casts[0], casts[1] * grad
    reads: dict[Node, Read] = {}
    for node, reader, _ in group:
        left = _left_of_upcasts(node, reader, times[reader], shared, uses) if casts[0] else None
        reads[reader] = Read(times[reader], None if left is None else (left, times[reader] if casts[1] else 0))
    yield Net(value, reads, casts, uses.simulation.low, grad), {read.reader: read.side for read in group}


def _left_of_upcasts(value: Node, reader: Node, times: int, shared: bool, uses: Uses) -> int | None:
    """Return how many upcasts of a value are left where its reader casts it up by itself; None if it does not.

    It casts the value up by its `dtype=` argument, or promotes it beside an FP32 tensor of at least one dimension. Of
    operands that may all be low one stays cast: rather one whose cast another reader needs anyway, as `promote` has it.
    """
    row, simulation = row_of(reader), uses.simulation
    if absorbs_cast(reader, simulation.device):
        return 0
    if not row.promotes_inside or simulation.aliases.is_mutated(value) or simulation.aliases.is_mutated(reader):
        return None
    if times > 1:  # a cast for each operand, of which the other one is read in FP32
        return None if shared else times - 1
    operands = [o.node for o in ops.operands(reader)]

    def order(operand: Node) -> tuple[bool, bool, int]:
        # Does a reader whose dtype is fixed need it in FP32, and not cast it up by itself?
        fixed = (r for r, where in uses.readers[operand] if uses.side(r, where) is Side.FP32)
        stays = shared and any(not (row_of(r).promotes_inside or absorbs_cast(r, simulation.device)) for r in fixed)
        return stays, operand in uses.free, operands.index(operand)

    for other in operands:
        fp32 = simulation.dtypes[other] == torch.float32 and other not in uses.free
        tensor = other.meta.get("val")
        promotes = not isinstance(tensor, torch.Tensor) or tensor.dim() > 0
        if other is not value and (fp32 or order(value) < order(other)) and promotes:
            return 0
    return None
