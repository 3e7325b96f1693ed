"""The placement of free values as a problem for the cut: what must go together, and what each net costs.

A net is a tensor and its readers: it costs one cast, however many readers need the other dtype. At O1 an FP32 value may
be stored low only where every use rounds it to this dtype; from O2 on only the costs decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ...colouring import Place
from ...graph.grad import grad_modes
from ...graph.notes import is_parameter
from ...ops import ops
from ...ops.rules import row_of
from ..colour.simulate import Simulation
from .costs import Costs, Run
from .cut import FP32, LOW, Net, Problem, Variable
from .uses import Uses


def unpriced_problem(simulation: Simulation, uses: Uses) -> Problem:
    """Return a problem with the free nodes as its variables, and with all constraints on them."""
    problem = Problem()
    for node in uses.free:
        problem.add(node, 0, 0)
        _imply(problem, node, simulation, uses)
    for node in uses.free:
        for reader, _ in uses.readers[node]:  # x[i] has the dtype of x, a tuple or a tensor
            if row_of(reader).asks == "item" and reader in uses.free:
                problem.implies += [(node, reader), (reader, node)]
    return problem


def _imply(problem: Problem, node: Node, simulation: Simulation, uses: Uses) -> None:
    """At O1: an FP32 value may be stored low only where every use rounds it to this dtype."""
    colours, dtypes, low = simulation.colours, simulation.dtypes, simulation.low
    if simulation.policy.level.stores_low or isinstance(dtypes[node], tuple):
        return
    if node in colours and colours[node].kind == "fp32":
        problem.implies += [(node, o.node if o.node in uses.free else LOW) for o in ops.operands(node)]
    if dtypes[node] == low:
        return
    for reader, where in uses.readers[node]:
        follows = reader in uses.free and dtypes[reader] != low
        if follows and (reader not in colours or colours[reader].kind != "fp32"):
            problem.implies.append((node, reader))
        elif uses.needs[reader].get(where) != low:
            problem.implies.append((node, FP32))


def price(
    problem: Problem, simulation: Simulation, uses: Uses, costs: Costs, grad: frozenset[Node], *, symbolic: bool = False
) -> None:
    """Fill in what everything costs: each free node on both sides, and nets for each value that may need casts.

    Of placements that cost the same, the one that rounds the fewest results is the cheapest. Without measured costs, an
    op whose result leaves the graph in FP32 costs the same on both sides. Running it low would move fewer bytes, but it
    would only round a result that is then cast back to FP32.
    """
    sides = [_run(node, dtype, uses) for node in uses.free for dtype in (simulation.low, torch.float32)]
    modes = grad_modes(simulation.graph)
    nets = [net for n in simulation.graph.nodes for net in _nets(n, simulation, uses, modes)]
    runs, casts = costs.price(sides, [net.value for net in nets])
    finer = len(uses.free) + 1  # one unit of cost weighs more than the roundings of all nodes together
    returned = set() if costs.measured else _returned(uses)
    for node, low, fp32 in zip(uses.free, runs[::2], runs[1::2], strict=True):
        problem.add(node, (max(low, fp32) if node in returned else low) * finer + _rounds(node), fp32 * finer)
    for net, cost in zip(nets, (c * finer for c in casts), strict=True):
        gradient = cost // 2 if net.value in grad else 0
        absorbs = [None if n is None or symbolic else n * cost + gradient for n in net.absorbs]
        problem.nets.append(Net(net.tensor, net.sides, net.casts * cost, net.casts * cost, tuple(absorbs)))


def _rounds(node: Node) -> bool:
    """Say whether an op rounds its result; an op that only moves values does not."""
    row = row_of(node)
    return ops.name(node) != "getitem" and (row is None or row.commutes == "")


def _returned(uses: Uses) -> set[Node]:
    """Return the free nodes whose result leaves the graph in FP32, moved on the way or not."""
    found: set[Node] = set()
    for node in reversed([*uses.free]):
        for reader, where in uses.readers[node]:
            leaves = reader.op == "output" and uses.needs[reader].get(where) == torch.float32
            if leaves or (reader in found and not _rounds(reader)):
                found.add(node)
    return found


def _run(node: Node, dtype: torch.dtype, uses: Uses) -> Run:
    places = [(o.name, o.index) for o in ops.operands(node)]
    return Run(node, dtype, {p: dtype if uses.follows(node, p) else uses.needs[node][p] for p in places})


@dataclass(frozen=True)
class _Casts:
    """The reads of a value that share its casts, as the emitted graph does.

    Attributes:
        value: what is cast.
        tensor: the variable that makes it, or its fixed side.
        sides: the variable or fixed side of each reader.
        absorbs: for each reader, how many casts up are left where it casts up by itself; None if it does not.
        casts: how many casts are made: one, or one for each operand of a reader.
    """

    value: Node
    tensor: Variable
    sides: tuple[Variable, ...]
    absorbs: tuple[int | None, ...]
    casts: int


def _nets(
    node: Node, simulation: Simulation, uses: Uses, modes: Mapping[Node, tuple[bool | None, int]]
) -> Iterator[_Casts]:
    """Yield the groups of reads of a value that share casts; none where everything is fixed."""
    held = simulation.dtypes.get(node)
    if held not in (simulation.low, torch.float32):
        return
    tensor: Variable = node if node in uses.free else LOW if held == simulation.low else FP32
    shared = _shares_casts(simulation.policy.share_casts, node)
    groups: dict[Any, list[tuple[Variable, Node]]] = {}
    for reader, where in uses.readers[node]:
        side = _side(reader, where, simulation, uses)
        if side is not None:
            key = (modes.get(reader), simulation.aliases.epoch(node, reader)) if shared else reader
            groups.setdefault(key, []).append((side, reader))
    for group in groups.values():
        if any(s in uses.free for s in (tensor, *(side for side, _ in group))):
            reads = Counter(reader for _, reader in group)
            sides = dict(zip((reader for _, reader in group), (side for side, _ in group), strict=True))
            absorbs = (_left_of_upcasts(node, r, n, shared, simulation, uses) for r, n in reads.items())
            yield _Casts(node, tensor, tuple(sides[r] for r in reads), tuple(absorbs), 1 if shared else len(group))


def _left_of_upcasts(
    value: Node, reader: Node, times: int, shared: bool, simulation: Simulation, uses: Uses
) -> int | None:
    """Return how many upcasts of a value are left where its reader casts it up by itself; None if it does not.

    It casts the value up by its `dtype=` argument, or promotes it beside an FP32 tensor of at least one dimension. Of
    two operands that may both be low only the first counts.
    """
    row = row_of(reader)
    if row.absorbs_cast:
        return 0 if ops.argument(reader, "dtype") is None else None
    if not row.promotes_inside or simulation.aliases.is_mutated(value) or simulation.aliases.is_mutated(reader):
        return None
    if times > 1:  # a cast for each operand, of which the other one is read in FP32
        return None if shared else times - 1
    operands = [o.node for o in ops.operands(reader)]
    for other in operands:
        fp32 = simulation.dtypes[other] == torch.float32 and other not in uses.free
        later = other in uses.free and (value not in uses.free or operands.index(other) > operands.index(value))
        if other is not value and (fp32 or later) and _rank(other) > 0:
            return 0
    return None


def _rank(node: Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else 1


def _shares_casts(mode: str, value: Node) -> bool:
    """Say whether readers of a value share one cast of it, as `eliminate_casts` lets them."""
    return mode == "always" or (mode == "weights" and is_parameter(value))


def _side(reader: Node, where: Place, simulation: Simulation, uses: Uses) -> Variable | None:
    """Return the variable, or the fixed side, that sets the dtype a reader needs; None if any dtype will do."""
    if uses.follows(reader, where):
        return reader
    if uses.takes_either(reader) or (reader not in simulation.colours and reader.op != "output"):
        return None  # a comparison; or it reads a size, or is an assertion of the exporter's
    needed = uses.needs[reader].get(where)
    return LOW if needed == simulation.low else FP32 if needed == torch.float32 else None
