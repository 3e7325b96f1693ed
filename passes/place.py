"""Where the free values of a graph are stored, so that the fewest bytes move. What is rounded does not change at O1.

At O1 a node is free when rounding may move across it in forward, and in backward where gradients flow, or when it is
FP32 only because autocast casts a low operand up for a kernel that computes in FP32 anyway. At O2 every node is free
that is not sensitive, and with measured costs a matrix product too: one that does not pay for its casts stays FP32.
What is fixed stays as the simulation left it, and so does what each reader needs. Without shapes every cast costs one.

Before: t = view(logits: bf16); to(t, f32) -> loss; to(logits, f32) -> output
After:  w = to(logits, f32) -> output; view(w) -> loss
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from . import ops
from .aliases import may_alias
from .costs import ByteCosts, Costs, Run, UnitCosts, requires_grad
from .cut import FP32, LOW, Net, Problem, Variable, solve
from .errors import PlanError
from .facts import facts_of
from .measured_costs import MeasuredCosts, Timer
from .plan import REMEDY, Plan
from .policy import Policy
from .rules import FOLLOW, PROMOTE, PROMOTING, lookup
from .rules import LOW as SEED
from .simulate import Colouring, Place, Simulation
from .values import ANY, ELIGIBLE, is_floating, keys, literal_dtype


def place(
    graph: Graph,
    policy: Policy,
    simulation: Simulation,
    plan: Plan | None = None,
    *,
    symbolic: bool = False,
    timer: Timer | None = None,
) -> int:
    """Choose the dtype of every free value by minimum cut; return how many were moved.

    Changes colours, casts and dtypes of the simulation. With a plan to replay, its colours are taken: the cut depends
    on sizes, and another example may have others.

    Args:
        graph: legalized, not changed.
        policy: with dtype and device filled in.
        simulation: what was decided so far.
        plan: one to replay.
        symbolic: no shapes are known.
        timer: gives measured costs, in place of bytes.

    Raises:
        PlanError: the plan stores a value low that a reader needs in FP32.
    """
    return _Placement(graph, policy, simulation, symbolic, timer).run(plan)


class _Placement:
    """One graph's free values, as a problem for the cut, and its answer, written back."""

    def __init__(
        self, graph: Graph, policy: Policy, simulation: Simulation, symbolic: bool, timer: Timer | None
    ) -> None:
        self.graph, self.policy, self.simulation = graph, policy, simulation
        self.device = policy.device or "cpu"
        self.low: Any = policy.dtype
        self.dtypes, self.colours = simulation.dtypes, simulation.colours
        self.grad = requires_grad(graph)
        self.costs: Costs = ByteCosts(self.device, self.grad)
        if symbolic:
            self.costs = UnitCosts()
        elif timer is not None:
            self.costs = MeasuredCosts(self.device, simulation.low, self.grad, timer)
        self.readers: dict[Node, list[tuple[Node, Place]]] = {}
        for node in graph.nodes:
            for o in ops.operands(node):
                self.readers.setdefault(o.node, []).append((node, (o.name, o.index)))
        self.needs = {n: self._needs(n) for n in graph.nodes}
        self.free = self._free()

    def run(self, plan: Plan | None) -> int:
        """Build the problem, solve it or look the answer up, write it back."""
        if not self.free:
            return 0
        problem = Problem()
        for node in self.free:
            problem.add(node, 0, 0)
            self._implications(problem, node)
        nets = {node: ends for node in self.graph.nodes if (ends := self._net(problem, node)) is not None}
        if plan is None:
            self._price(problem, nets)
            return self._write(solve(problem))
        return self._write(self._planned(problem, plan))

    def _price(self, problem: Problem, nets: dict[Node, tuple[Variable, ...]]) -> None:
        """Fill in what everything costs."""
        sides = [self._run(node, dtype) for node in self.free for dtype in (self.low, torch.float32)]
        runs, casts = self.costs.price(sides, list(nets))
        for node, low, fp32 in zip(self.free, runs[::2], runs[1::2], strict=True):
            problem.add(node, low, fp32)
        for (node, (tensor, *readers)), cost in zip(nets.items(), casts, strict=True):
            promoted = tensor == LOW and self._is_promoted(node)
            problem.nets.append(Net(tensor, tuple(readers), cost // 2 if promoted else cost))

    def _is_promoted(self, node: Node) -> bool:
        """Say whether the one reader of a value casts it up by itself, so that only its gradient takes a cast."""
        read = self.readers.get(node, ())
        return len(read) == 1 and ops.name(read[0][0]) in PROMOTING and node in self.grad

    def _run(self, node: Node, dtype: torch.dtype) -> Run:
        operands = [(o.name, o.index) for o in ops.operands(node)]
        return Run(node, dtype, {p: dtype if self._follows(node, p) else self.needs[node][p] for p in operands})

    def _planned(self, problem: Problem, plan: Plan) -> set[Variable]:
        """Return the low side as a plan has it; what is tied to a value goes with it."""
        colours, names = {d.key: d.colour for d in plan.decisions}, keys(self.graph.nodes)
        low = str(self.low).removeprefix("torch.")
        low_side: set[Variable] = set()
        for node in self.free:
            owner = node.args[0] if ops.name(node) == "getitem" else node
            if owner in low_side or colours.get(names[node]) == low:
                low_side.add(node)
        if problem.cost(low_side) == float("inf"):
            raise PlanError(f"the plan stores a value low that a reader needs in FP32; {REMEDY}")
        return low_side

    # Which nodes are free.

    def _free(self) -> dict[Node, None]:
        free: dict[Node, None] = {}
        for node in self.graph.nodes:
            item = ops.name(node) == "getitem" and node.args[0] in free and is_floating(self.dtypes[node])
            if item or (node in self.colours and self._is_free(node)):
                free[node] = None
        return free

    def _is_free(self, node: Node) -> bool:
        colouring, name = self.colours[node], ops.name(node)
        row, _ = lookup(name, self.device, self.low)
        if colouring.kind not in (PROMOTE, FOLLOW, "fp32") and not self._is_free_seed(colouring):
            return False
        if name.endswith("_") or node.meta.get("autocast_region"):
            return False
        if colouring.literals or literal_dtype(node) is not None or colouring.dtype not in (self.low, torch.float32):
            return False
        if self.simulation.aliases.is_mutated(node) or not is_floating(self.dtypes[node]):
            return False
        floats = [o for o in ops.operands(node) if is_floating(self.dtypes[o.node])]
        if not all(map(_is_known, [self.dtypes[node], *(self.dtypes[o.node] for o in ops.operands(node))])):
            return False
        if not floats or any(self.simulation.aliases.is_mutated(o.node) and may_alias(node) for o in floats):
            return False
        if any(
            self.dtypes[o.node] not in (self.low, torch.float32)
            for o in floats
            if not isinstance(self.dtypes[o.node], tuple)
        ):
            return False
        if self.policy.level in ("O2", "O3"):
            primary = floats[0]
            return (
                colouring.kind != "fp32"
                and row.out[0] in ("float", "first")
                and primary.name not in row.uncast
                and node not in self.simulation.extreme
                and not any(o.node in self.simulation.extreme for o in floats)
                and not any(o.node in self.simulation.upcast for o in floats)
                and _code(colouring) not in ("override", "literal", "mutated", "keep", "float64", "dtype_argument")
            )
        return self._commutes(node, row) or self._internal(node, floats)

    def _is_free_seed(self, colouring: Colouring) -> bool:
        """Say whether a matrix product may stay FP32: at O2, where it was measured what its casts cost."""
        measured = self.policy.level == "O2" and self.policy.cost == "measured"
        return measured and colouring.kind == SEED and _code(colouring) == "low"

    def _commutes(self, node: Node, row: Any) -> bool:
        """Say whether rounding may move across: moves of values, whatever the device."""
        if self.colours[node].kind == "fp32" or self.colours[node].casts:
            return False
        return row.commutes == "both" or (row.commutes == "forward" and node not in self.grad)

    def _internal(self, node: Node, floats: list[ops.Operand]) -> bool:
        """Say whether the node is FP32 only by autocast's list, over low values, in a kernel that computes in FP32."""
        if self.colours[node].kind != "fp32" or not all(self.dtypes[o.node] == self.low for o in floats):
            return False
        known = facts_of(node, self.device, self.low)
        return known.fp32_internal and known.status == "measured"

    # The problem.

    def _needs(self, node: Node) -> dict[Place, torch.dtype]:
        """Return the dtype each operand must have for the node as it is now."""
        casts = self.colours[node].casts if node in self.colours else {}
        if self.policy.level in ("O2", "O3") and self._upcasts(node):
            return {(o.name, o.index): torch.float32 for o in ops.operands(node)}  # nothing to do where it is FP32
        if node.op == "output":
            returned = self.simulation.returned()
            return {(o.name, o.index): returned[o.node] for o in ops.operands(node)}
        return {(o.name, o.index): casts.get((o.name, o.index), self.dtypes[o.node]) for o in ops.operands(node)}

    def _upcasts(self, node: Node) -> bool:
        """Say whether the author casts a value up here."""
        colouring = self.colours.get(node)
        if colouring is None or colouring.kind != "cast" or colouring.dtype != torch.float32:
            return False
        value: Any = node.args[0]
        return self.dtypes[value] in ELIGIBLE

    def _side(self, reader: Node, where: Place) -> Variable | None:
        """Return the variable, or the fixed side, that a reader needs its operand on; None when it does not matter."""
        if reader in self.free and self._follows(reader, where):
            return reader
        if reader not in self.colours and reader.op != "output":
            return None  # it asks for a size, or asserts what the exporter saw
        needed = self.needs[reader].get(where)
        return LOW if needed == self.low else FP32 if needed == torch.float32 else None

    def _follows(self, reader: Node, where: Place) -> bool:
        """Say whether an operand of a free node has the node's own dtype."""
        row = lookup(ops.name(reader), self.device, self.low)[0]
        return where[0] not in row.uncast and (not row.casts or where[0] in row.casts)

    def _net(self, problem: Problem, node: Node) -> tuple[Variable, ...] | None:
        """Return who makes a tensor and who reads it, where that is not all fixed; tie what comes in one tuple."""
        held = self.dtypes.get(node)
        tied = [r for r, _ in self.readers.get(node, ()) if ops.name(r) == "getitem"]
        for item in tied:  # an item has the dtype of what it is an item of, whether that is a tuple or a tensor
            if node in self.free and item in self.free:
                problem.implies += [(node, item), (item, node)]
        if isinstance(held, tuple):
            return None
        if held not in (self.low, torch.float32):
            return None
        tensor: Variable = node if node in self.free else LOW if held == self.low else FP32
        sides = [s for s in (self._side(r, w) for r, w in self.readers.get(node, ())) if s is not None]
        return (tensor, *dict.fromkeys(sides)) if any(s in self.free for s in [tensor, *sides]) else None

    def _implications(self, problem: Problem, node: Node) -> None:
        """At O1: an FP32 value may be stored low only where every use rounds it to this dtype."""
        if self.policy.level in ("O2", "O3") or isinstance(self.dtypes[node], tuple):
            return
        if self.colours.get(node) is not None and self.colours[node].kind == "fp32":
            problem.implies += [(node, o.node if o.node in self.free else LOW) for o in ops.operands(node)]
        if self.dtypes[node] == self.low:
            return
        for reader, where in self.readers.get(node, ()):
            if reader in self.free and self.dtypes[reader] != self.low and self._commutes_now(reader):
                problem.implies.append((node, reader))
            elif self.needs[reader].get(where) != self.low:
                problem.implies.append((node, FP32))

    def _commutes_now(self, reader: Node) -> bool:
        return ops.name(reader) == "getitem" or self.colours[reader].kind != "fp32"

    # The answer.

    def _write(self, low_side: set[Variable]) -> int:
        before = dict(self.dtypes)
        moved = 0
        for node in self.free:
            side = self.low if node in low_side else torch.float32
            if isinstance(self.dtypes[node], tuple):
                self.dtypes[node] = tuple(side if d in ELIGIBLE else d for d in self.dtypes[node])
            else:
                self.dtypes[node] = side
            if self.dtypes[node] != before[node]:
                moved += 1
        for node in self.graph.nodes:
            colouring = self.colours.get(node)
            if colouring is not None:
                self._rewrite(node, colouring, node in low_side, before)
        return moved

    def _rewrite(self, node: Node, colouring: Colouring, is_low: bool, before: dict[Node, Any]) -> None:
        side = self.low if is_low else torch.float32
        casts: dict[Place, torch.dtype] = {}
        for o in [] if self._upcasts(node) else ops.operands(node):  # the author's own cast is cast enough
            where, held = (o.name, o.index), self.dtypes[o.node]
            if held not in ELIGIBLE:
                if where in colouring.casts:
                    casts[where] = colouring.casts[where]
                continue
            needed = side if node in self.free and self._follows(node, where) else self.needs[node][where]
            if needed != held:
                casts[where] = needed
        colouring.casts = casts
        if node in self.free and self.dtypes[node] != before[node]:
            colouring.dtype = side
            word = "low" if is_low else "FP32"
            if colouring.kind == SEED:
                colouring.reason = "not_worth_casts: on this device it takes longer in low, its casts included"
            else:
                colouring.reason = f"cut: stored {word}, which {self.costs.least} ({_code(colouring)})"


def _code(colouring: Colouring) -> str:
    return colouring.reason.partition(":")[0]


def _is_known(dtype: Any) -> bool:
    """Say whether nothing about a dtype is unknown; a list of unknown length is one of which it is known."""
    return all(map(_is_known, dtype)) if isinstance(dtype, tuple) else dtype is not ANY
