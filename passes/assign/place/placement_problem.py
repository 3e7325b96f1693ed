"""The placement of free values as a problem for the cut: what must go together, and what each net costs.

A net is a tensor and its readers: it costs one cast, however many readers need the other dtype. At O1 an FP32 value may
be stored low only where every use rounds it to this dtype; from O2 on only the costs decide.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ...colouring import Position
from ...contract.penalties import Penalties
from ...graph.grad import grad_modes
from ...graph.sharing import shares_cast, shares_storage
from ...graph.values import keys
from ...ops import ops
from ...ops.rules import FP32, LOW, row_of
from ..colour.simulate import Simulation
from .costs import Costs, Run
from .cut import Net, Problem, Side, Variable
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
    if node in colours and colours[node].kind == FP32:
        problem.implies += [(node, o.node if o.node in uses.free else Side.LOW) for o in ops.operands(node)]
    if dtypes[node] == low:
        return
    for reader, where in uses.readers[node]:
        follows = reader in uses.free and dtypes[reader] != low
        if follows and (reader not in colours or colours[reader].kind != FP32):
            problem.implies.append((node, reader))
        elif uses.needs[reader].get(where) != low:
            problem.implies.append((node, Side.FP32))


def price(
    problem: Problem, simulation: Simulation, uses: Uses, costs: Costs, grad: frozenset[Node], *,
    symbolic: bool = False, penalties: Penalties | None = None,
) -> None:  # fmt: skip
    """Fill in what everything costs: each free node on both sides, and nets for each value that may need casts.

    Of placements that cost the same, the one that rounds the fewest results is the cheapest. Without measured costs, an
    op whose result leaves the graph in FP32 costs the same on both sides. Running it low would move fewer bytes, but it
    would only round a result that is then cast back to FP32.
    """
    sides = [_run(node, dtype, uses) for node in uses.free for dtype in (simulation.low, torch.float32)]
    modes = grad_modes(simulation.graph)
    nets = [net for n in simulation.graph.nodes for net in _nets(n, simulation, uses, modes, grad)]
    runs, casts = costs.price(sides, [net.value for net in nets])
    scale = len(uses.free) + 1  # one unit of cost weighs more than the roundings of all nodes together
    returned = set() if costs.measured else _returned(uses)
    for node, low, fp32 in zip(uses.free, runs[::2], runs[1::2], strict=True):
        problem.add(node, (max(low, fp32) if node in returned else low) * scale + _rounds(node), fp32 * scale)
    for net, cost in zip(nets, (c * scale for c in casts), strict=True):
        backward = cost // 2 if net.value in grad else 0
        of = functools.partial(_cost, cost - backward, backward)
        absorbs = [None if left is None or symbolic else of(left) for left in net.absorbs]
        problem.nets.append(Net(net.tensor, net.sides, of(net.casts), of(net.casts), tuple(absorbs)))
    if penalties is not None:
        _penalise(problem, simulation, uses, penalties, scale)


def _penalise(problem: Problem, simulation: Simulation, uses: Uses, penalties: Penalties, scale: int) -> None:
    """Add what errors cost: a node that rounds pays on the low side, and an FP32 value for each reader that is low."""
    names = keys(simulation.graph.nodes)
    for node in uses.free:
        if _rounds(node):
            problem.low[node] += round(penalties.values.get(names[node], 0.0) * scale)
    for node in simulation.graph.nodes:
        held = simulation.dtypes.get(node)
        tensor: Variable = node if node in uses.free else Side.FP32
        if held not in (simulation.low, torch.float32) or (tensor is Side.FP32 and held == simulation.low):
            continue
        for reader, where in uses.readers[node]:
            side = _side(reader, where, simulation, uses)
            cost = round(penalties.casts.get((names.get(reader, ""), names.get(node, node.name)), 0.0) * scale)
            if cost and side not in (None, Side.FP32) and (tensor in uses.free or side in uses.free):
                problem.nets.append(Net(tensor, (side,), 0, cost))


def _cost(forward: int, backward: int, casts: tuple[int, int]) -> int:
    return forward * casts[0] + backward * casts[1]


def _rounds(node: Node) -> bool:
    """Say whether an op rounds its result; an op that only moves values does not."""
    row = row_of(node)
    return row_of(node).asks != "item" and (row is None or row.commutes == "")


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
        absorbs: for each reader, the casts that are left where it casts up by itself; None if it does not.
        casts: the casts of the value, and those of its gradient.
    """

    value: Node
    tensor: Variable
    sides: tuple[Variable, ...]
    absorbs: tuple[tuple[int, int] | None, ...]
    casts: tuple[int, int]


def _nets(
    node: Node,
    simulation: Simulation,
    uses: Uses,
    modes: Mapping[Node, tuple[bool | None, int]],
    grad: frozenset[Node],
) -> Iterator[_Casts]:
    """Yield the groups of reads of a value that share casts; none where everything is fixed.

    Casts that share a storage are two things: one cast of the value for all, and one of the gradient for each.
    """
    held = simulation.dtypes.get(node)
    if held not in (simulation.low, torch.float32):
        return
    tensor: Variable = node if node in uses.free else Side.LOW if held == simulation.low else Side.FP32
    mode = simulation.policy.sharing
    storage = node in grad and shares_storage(mode, node, simulation.device)
    casts: dict[Any, list[tuple[Variable, Node]]] = {}
    storages: dict[Any, list[tuple[Variable, Node]]] = {}
    for reader, where in uses.readers[node]:
        side = _side(reader, where, simulation, uses)
        if side is None:
            continue
        by_rule = reader in simulation.colours and simulation.colours[reader].kind == LOW
        when = modes.get(reader), simulation.aliases.epoch(node, reader)
        key = when if (shared := shares_cast(mode, node, by_rule, grad)) else reader
        casts.setdefault((shared, key), []).append((side, reader))
        if storage:
            storages.setdefault(when, []).append((side, reader))
    for (shared, _), group in casts.items():
        count = 1 if shared else len(group)
        yield from _net(node, tensor, group, (0 if storage else count, count), shared, simulation, uses)
    for group in storages.values():
        yield from _net(node, tensor, group, (1, 0), False, simulation, uses)


def _net(
    node: Node, tensor: Variable, group: list[tuple[Variable, Node]], casts: tuple[int, int], shared: bool,
    simulation: Simulation, uses: Uses,
) -> Iterator[_Casts]:  # fmt: skip
    """Yield a group of reads with the casts that it needs, unless everything is fixed."""
    if not any(s in uses.free for s in (tensor, *(side for side, _ in group))):
        return
    sides, reads = {reader: side for side, reader in group}, Counter(reader for _, reader in group)
    left = [_left_of_upcasts(node, r, n, shared, simulation, uses) for r, n in reads.items()]
    forward, backward = casts
    absorbs = [
        None if n is None or not forward else (n, k if backward else 0)
        for n, k in zip(left, reads.values(), strict=True)
    ]
    yield _Casts(node, tensor, tuple(sides[r] for r in reads), tuple(absorbs), casts)


def _left_of_upcasts(
    value: Node, reader: Node, times: int, shared: bool, simulation: Simulation, uses: Uses
) -> int | None:
    """Return how many upcasts of a value are left where its reader casts it up by itself; None if it does not.

    It casts the value up by its `dtype=` argument, or promotes it beside an FP32 tensor of at least one dimension. Of
    operands that may all be low one stays cast: rather one whose cast another reader needs anyway, as `promote` has it.
    """
    row = row_of(reader)
    if row.absorbs_cast:
        return 0 if ops.argument(reader, "dtype") is None else None
    if not row.promotes_inside or simulation.aliases.is_mutated(value) or simulation.aliases.is_mutated(reader):
        return None
    if times > 1:  # a cast for each operand, of which the other one is read in FP32
        return None if shared else times - 1
    operands = [o.node for o in ops.operands(reader)]

    def order(operand: Node) -> tuple[bool, bool, int]:
        stays = shared and _is_cast_up_anyway(operand, simulation, uses)
        return stays, operand in uses.free, operands.index(operand)

    for other in operands:
        fp32 = simulation.dtypes[other] == torch.float32 and other not in uses.free
        if other is not value and (fp32 or order(value) < order(other)) and _rank(other) > 0:
            return 0
    return None


def _is_cast_up_anyway(value: Node, simulation: Simulation, uses: Uses) -> bool:
    """Say whether a reader whose dtype is fixed needs a value in FP32, and does not cast it up by itself."""
    return any(
        _side(reader, where, simulation, uses) is Side.FP32
        and not (row_of(reader).promotes_inside or row_of(reader).absorbs_cast)
        for reader, where in uses.readers[value]
    )


def _rank(node: Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else 1


def _side(reader: Node, where: Position, simulation: Simulation, uses: Uses) -> Variable | None:
    """Return the variable, or the fixed side, that sets the dtype a reader needs; None if any dtype will do."""
    if uses.follows(reader, where):
        return reader
    if uses.takes_either(reader) or (reader not in simulation.colours and reader.op != "output"):
        return None  # a comparison; or it reads a size, or is an assertion of the exporter's
    needed = uses.needs[reader].get(where)
    return Side.LOW if needed == simulation.low else Side.FP32 if needed == torch.float32 else None
