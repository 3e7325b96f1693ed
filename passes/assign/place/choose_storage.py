"""Choose the dtype of every free value so that the fewest bytes move. At O1 this changes no rounding.

Which values may be stored in either dtype says `free.py`. Here it becomes a problem: who reads each value, what must go
together, and what each net costs, a value and its readers. At O1 an FP32 value may be stored low only where every use
rounds it to this dtype; from O2 on only the costs decide. `cut.py` finds the cheapest placement, which gives dtypes,
casts and reasons. What is fixed stays as the simulation left it, and so does what each reader needs.

Before: t = view(logits: bf16); to(t, f32) -> loss; to(logits, f32) -> output
After:  w = to(logits, f32) -> output; view(w) -> loss
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from networkx import NetworkXUnbounded
from torch.fx import Node

from ...contract.costs import Candidate, CostModel, Net, Read, Run, priced
from ...contract.errors import PlanError, VerificationError
from ...contract.plan import Plan
from ...contract.plan_format import REMEDY
from ...contract.policy import dtype_name
from ...contract.reasons import CAST, Code
from ...form import Cast, Choice, Colours, Position, Replace, SetDtype
from ...graph.aliases import mutated_operands
from ...graph.grad import grad_modes, requires_grad, shares_cast, shares_storage, sums_apart, what_it_reads
from ...graph.outputs import Outputs
from ...graph.values import ELIGIBLE, Dtypes, ValueDtype, dtype_reference, first_float, keys, recast
from ...ops import ops
from ...ops.facts import absorbs_cast
from ...ops.rules import FOLLOW, FP32, LOW, PROMOTE, row_of
from ..colour.extremes import is_scalar
from ..colour.kernels import operand_casts
from ..colour.simulate import Simulation
from .cut import Problem, Side, Variable, solve
from .free import free_nodes


def choose_storage(
    simulation: Simulation, costs: CostModel, plan: Plan | None = None
) -> tuple[Colours, Dtypes, Mapping[str, int]]:
    """Choose the dtype of every free value by minimum cut, or by a plan; return decisions, all dtypes, and timings."""
    grad = requires_grad(simulation.graph)
    free = free_nodes(simulation, grad)
    if not free:
        return simulation.colours, simulation.dtypes, {}
    uses = Uses(simulation, free, grad)
    problem = unpriced_problem(uses)
    if plan is not None:
        return *_placed(_planned(problem, plan, uses), uses, costs), {}
    timings = price(problem, uses, costs)
    try:
        return *_placed(solve(problem), uses, costs), timings
    except NetworkXUnbounded as e:
        raise VerificationError(
            "dtypes of values in this graph have conflicting constraints. This is a bug in fxamp; please report it."
        ) from e


def _planned(problem: Problem, plan: Plan, uses: Uses) -> set[Variable]:
    """Return the low side that a plan gives; values that are tied to a low value are low too."""
    colours, names = {d.key: d.colour for d in plan.decisions}, keys(uses.simulation.graph.nodes)
    low, low_side = dtype_name(uses.simulation.low), set[Variable]()
    for node in uses.free:
        owner = node.args[0] if row_of(node).asks == "item" else node
        if owner in low_side or colours.get(names[node]) == low:
            low_side.add(node)
    if problem.cost(low_side) == float("inf"):
        raise PlanError(f"the plan stores a value in 16 bits that an op reading it needs in FP32; {REMEDY}")
    return low_side


def _placed(low_side: set[Variable], uses: Uses, costs: CostModel) -> tuple[Colours, Dtypes]:
    """Return the decisions and the dtypes of all values, with the free values where the cut stores them."""
    simulation, dtypes = uses.simulation, dict(uses.simulation.dtypes)
    for node in uses.free:
        dtypes[node] = recast(dtypes[node], simulation.low if node in low_side else torch.float32)
    sides = {node: simulation.low if node in low_side else torch.float32 for node in simulation.colours}
    return {n: _recoloured(n, c, sides[n], dtypes, uses, costs) for n, c in simulation.colours.items()}, dtypes


def _recoloured(node: Node, choice: Choice, side: torch.dtype, dtypes: Dtypes, uses: Uses, costs: CostModel) -> Choice:
    """Return the decision on a node, given how its value and its operands are stored."""
    before = uses.simulation.dtypes
    if uses.takes_either(node):  # it reads its operands in the dtypes in which they are stored
        floats = [d for o in ops.operands(node) if isinstance(d := dtypes[o.node], torch.dtype) and d in ELIGIBLE]
        return replace(choice, dtype=functools.reduce(torch.promote_types, floats)) if floats else choice

    def wanted(operand: ops.Operand) -> ValueDtype:
        if dtypes[operand.node] not in ELIGIBLE:
            return choice.casts.get(operand.place)
        return uses.wanted(node, operand.place, side)

    # The user's upcast needs no cast of ours.
    casts = () if uses.upcasts(node) else operand_casts(dtypes, ops.operands(node), wanted)
    placed = choice.edited(*casts, but=Cast)
    if dtypes[node] != before[node] and node in uses.free:
        word = "FP32" if side == torch.float32 else "low"
        why = Code.CUT(f"stored {word}, which {costs.objective} ({choice.reason.code})")
        if choice.reason.kind == LOW:
            why = Code.NOT_WORTH_CASTS("on this device it takes longer in low, counting its casts")
        placed = replace(placed, dtype=side, reason=choice.reason.because(why))
    reference, relative = dtype_reference(node), node in uses.free and row_of(node).is_cast
    if relative or (reference is not None and any(dtypes[n] != before[n] for n in (node, reference))):
        dtype: Any = first_float(dtypes[node])
        placed = placed.edited(SetDtype(dtype), but=SetDtype)  # the dtype that it follows has changed
    return placed


class Uses:
    """Who reads each value of a graph, at which operand, and in which dtype it must find it, by the simulation."""

    def __init__(self, simulation: Simulation, free: Mapping[Node, None], grad: frozenset[Node]) -> None:
        self.simulation, self.free, self.grad, self._returned = simulation, free, grad, simulation.returned()
        wide = [n for n, d in self._returned.items() if d == torch.float32 and n.op.startswith("call")]
        lowered = [n for n in wide if n in free or simulation.dtypes.get(n) == simulation.low]
        # Of each output that is handed out in FP32 and may be low, the readers that other outputs come from.
        self.outputs = Outputs(simulation.graph, lowered).readers if lowered else {}
        self.scalars = {n: self._scalars(n) for n in simulation.graph.nodes}
        # The dtype that each operand of a node must have, given the node's present dtype.
        self.needs = {n: self._needs(n) for n in simulation.graph.nodes}
        self.readers: dict[Node, list[tuple[Node, Position]]] = {n: [] for n in simulation.graph.nodes}
        for node in simulation.graph.nodes:
            for o in ops.operands(node):
                self.readers[o.node].append((node, o.place))

    def _scalars(self, node: Node) -> frozenset[Position]:
        """Return the operands of no dimension that a kernel reads as they are, for another one decides the dtype."""
        if node not in self.free or not self.simulation.policy.level.stores_low or not row_of(node).promotes_inside:
            return frozenset()
        floats = [o for o in ops.operands(node) if self.simulation.dtypes[o.node] in ELIGIBLE]
        scalars = frozenset(o.place for o in floats if is_scalar(o.node))
        return scalars if len(scalars) < len(floats) else frozenset()

    def follows(self, reader: Node, where: Position) -> bool:
        """Say whether an operand must have the dtype of its reader, whichever dtype is chosen for that."""
        return reader in self.free and where[0] not in row_of(reader).uncast and where not in self.scalars[reader]

    def wanted(self, reader: Node, where: Position, dtype: torch.dtype) -> ValueDtype:
        """Return the dtype that an operand must have if its reader is to run in a dtype."""
        return dtype if self.follows(reader, where) else self.needs[reader].get(where)

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
        row, why = row_of(node), choice.reason
        plain = why.kind in (PROMOTE, FOLLOW) and not (why.final or choice.casts or choice.has(Replace))
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
        places = {p: n for p, n in places.items() if p not in self.scalars[node]}
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
    """Fill in what free nodes and nets cost, least where the fewest results are rounded; return what was measured."""
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
        at = Side.FP32 if priced_net.wide else uses.variable(value)
        problem.nets.append(replace(priced_net, value=at, readers=readers))
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

    `nodes` are the value, an attribute perhaps at several places. Casts that share a storage are two things: one cast
    of the value for all, and one of the gradient for each.
    """
    simulation, value = uses.simulation, nodes[0]
    if simulation.dtypes.get(value) not in (simulation.low, torch.float32):
        return
    mode = simulation.policy.sharing
    storage = value in uses.grad and shares_storage(mode, value, simulation.device)
    casts: dict[Any, list[_Read]] = {}
    storages: dict[Any, list[_Read]] = {}
    back = _read_back(value, uses)
    through, cast_anyway = {read.reader for read in back}, any(read.side is Side.LOW for read in back)
    for node, (reader, where) in ((n, read) for n in nodes for read in uses.readers[n]):
        side = uses.side(reader, where)
        if side is None or reader in through:
            continue
        by_rule = reader in simulation.colours and simulation.colours[reader].lowers and not sums_apart(reader)
        when = modes.get(reader), simulation.aliases.epoch(node, reader)
        key = when if (shared := shares_cast(mode, node, reader, by_rule, uses.grad)) else reader
        pays = not cast_anyway or reader.op == "output"  # else it reads a cast that is made for others
        if pays or not shared:
            casts.setdefault((shared, key), []).append(_Read(node, reader, side))
        if pays and storage:
            storages.setdefault(when, []).append(_Read(node, reader, side))
    for (shared, _), group in casts.items():
        count = 1 if shared else len(group)
        yield from _net(value, group, (0 if storage else count, count), shared, uses)
    for group in storages.values():
        yield from _net(value, group, (1, 0), False, uses)
    for net, sides in _net(value, back, (1, 1), True, uses) if back else ():
        yield replace(net, wide=True), sides


def _read_back(value: Node, uses: Uses) -> list[_Read]:
    """Return the reads of an output through the FP32 that is handed out, where readers of that share casts."""
    through = uses.outputs.get(value, ())
    if len(through) != 1 and not shares_cast(uses.simulation.policy.sharing, value, value, False, uses.grad):
        return []
    sides = [(r, uses.side(r, place)) for r, place in uses.readers[value] if r in through]
    either = {r: uses.variable(value) for r, side in sides if side is None and uses.takes_either(r)}
    return [_Read(value, r, either[r] if side is None else side) for r, side in sides if side or r in either]


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
    """Return how many upcasts of a value are left where its reader casts it up by itself; None if it does not."""
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
