"""The placement of free values as a problem for the cut: what must go together, and what each net costs.

A net is a tensor and its readers: it costs one cast, however many readers need the other dtype. At O1 an FP32 value may
be stored low only where every use rounds it to this dtype; from O2 on only the costs decide.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ...colouring import Place
from ...ops import ops
from ...ops.rules import row_of, rule
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
            if ops.name(reader) == "getitem" and reader in uses.free:
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
        if follows and (ops.name(reader) == "getitem" or colours[reader].kind != "fp32"):
            problem.implies.append((node, reader))
        elif uses.needs[reader].get(where) != low:
            problem.implies.append((node, FP32))


def price(problem: Problem, simulation: Simulation, uses: Uses, costs: Costs, grad: frozenset[Node]) -> None:
    """Fill in what everything costs: each free node on both sides, and a net for each value that may need a cast.

    Of placements that cost the same, the one that rounds the fewest results is the cheapest. Without measured costs, an
    op whose result leaves the graph in FP32 costs the same on both sides. Running it low would move fewer bytes, but it
    would only round a result that is then cast back to FP32.
    """
    sides = [_run(node, dtype, uses) for node in uses.free for dtype in (simulation.low, torch.float32)]
    nets = {n: ends for n in simulation.graph.nodes if (ends := _net(n, simulation, uses)) is not None}
    runs, casts = costs.price(sides, list(nets))
    finer = len(uses.free) + 1  # one unit of cost weighs more than the roundings of all nodes together
    returned = set() if costs.measured else _returned(uses)
    for node, low, fp32 in zip(uses.free, runs[::2], runs[1::2], strict=True):
        problem.add(node, (max(low, fp32) if node in returned else low) * finer + _rounds(node), fp32 * finer)
    for (node, (tensor, *readers)), cost in zip(nets.items(), casts, strict=True):
        if tensor == LOW and _is_promoted(node, simulation, uses):
            cost = cost // 2 if node in grad else 0
        problem.nets.append(Net(tensor, tuple(readers), cost * finer))


def _rounds(node: Node) -> bool:
    """Say whether an op rounds its result; an op that only moves values does not."""
    row = rule(ops.name(node))
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


def _net(node: Node, simulation: Simulation, uses: Uses) -> tuple[Variable, ...] | None:
    """Return the variable that makes a tensor and its readers; None if all of them are fixed."""
    held = simulation.dtypes.get(node)
    if held not in (simulation.low, torch.float32):
        return None
    tensor: Variable = node if node in uses.free else LOW if held == simulation.low else FP32
    read = [_side(reader, where, simulation, uses) for reader, where in uses.readers[node]]
    sides = [s for s in read if s is not None]
    return (tensor, *dict.fromkeys(sides)) if any(s in uses.free for s in [tensor, *sides]) else None


def _side(reader: Node, where: Place, simulation: Simulation, uses: Uses) -> Variable | None:
    """Return the variable, or the fixed side, that sets the dtype a reader needs; None if any dtype will do."""
    if uses.follows(reader, where):
        return reader
    if reader not in simulation.colours and reader.op != "output":
        return None  # it reads a size, or is an assertion of the exporter's
    needed = uses.needs[reader].get(where)
    return LOW if needed == simulation.low else FP32 if needed == torch.float32 else None


def _is_promoted(node: Node, simulation: Simulation, uses: Uses) -> bool:
    """Say whether the only reader of a value promotes it by itself, so that at most the gradient needs a cast.

    The reader does so if another operand is an FP32 tensor with at least one dimension.
    """
    read = uses.readers[node]
    if len(read) != 1 or not row_of(read[0][0]).promotes_inside:
        return False
    others = [o.node for o in ops.operands(read[0][0]) if o.node is not node]
    return any((n in uses.free or simulation.dtypes[n] == torch.float32) and _rank(n) > 0 for n in others)


def _rank(node: Node) -> int:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else 1
