"""Pass 2: decide in which dtype every node runs, and say why. The graph is not changed.

Two simulations run forwards over the graph (`simulate.py`). The first does what `torch.autocast` would do on this
device: every node gets its `autocast` dtype. The second follows the policy: its overrides, the casts in the user's
code, and each rule as the level interprets it.

Before: linear(x, w); softmax(linear)          no dtype decided
After:  linear: bfloat16, "low: matrix product"; softmax: bfloat16, "follow: its operand's dtype"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Graph, Node

from ..colouring import Assignment, Colouring
from ..contract.errors import PolicyError
from ..contract.plan import Plan
from ..contract.policy import Policy
from ..contract.reasons import Code
from ..contract.timing import Timer
from ..form import Ensures, Unit
from ..graph.bodies import Border
from ..graph.by_rows import SymbolicInference, original_dtypes
from ..graph.notes import note_of
from ..graph.values import ANY, Aliases, Inference, is_floating, is_known, keys, module_types, source
from ..ops.rules import KEEP, LOW, is_registered, row_of
from .colour.kernels import refuse_untold_writes
from .colour.simulate import Simulation
from .place.place import place
from .place.saturate import saturate


@dataclass(frozen=True)
class AssignPrecision:
    """Decide for every node of a graph.

    Attributes:
        policy: with dtype and device filled in.
        plan: the plan to carry out instead of choosing.
        timer: measures calls, for a policy with cost="measured".
    """

    name: ClassVar = "assign-precision"
    ensures: ClassVar = Ensures.NOTHING_NEW
    policy: Policy
    plan: Plan | None = None
    timer: Timer | None = None

    def __call__(self, unit: Unit) -> dict[str, int]:
        """Decide, without an edit; the plan gives the reason for each node."""
        original = original_dtypes(unit.graph, unit.attribute)
        plan = None if self.plan is None else self.plan.of_graph(unit.index)
        unit.assignment = assign_precision(
            unit.graph, self.policy, original, plan, unit.border, self.timer, unit.simulated
        )
        return {}


def assign_precision(
    graph: Graph,
    policy: Policy,
    original: dict[Node, Any],
    plan: Plan | None = None,
    border: Border | None = None,
    timer: Timer | None = None,
    simulated: Any = None,
) -> Assignment:
    """Colour every node that touches a floating value.

    Args:
        graph: legalized, not changed.
        policy: with dtype and device filled in.
        original: the dtype of every value as captured.
        plan: colours of free values to take instead of choosing them.
        border: the dtypes at the edges of the graph, and the graphs inside it.
        timer: measures calls; for a policy with cost="measured", unless its plan is replayed.
        simulated: the run through this graph that its caller made, if it is the body of a higher-order op.

    Raises:
        PlanError: the plan stores a value low that a reader needs in FP32.
        PolicyError: two overrides contradict each other; an op is banned or, with unknown_ops="error", unknown; costs
            are to be measured, but nothing can be run.
    """
    symbolic = any(n.op == "placeholder" and original[n] is ANY for n in graph.nodes)
    measured = policy.cost == "measured"
    if measured and policy.level.rounds and plan is None and (symbolic or timer is None):
        raise PolicyError(
            "cost='measured' needs shapes to measure: give convert example inputs, and capture='export' or 'auto'; or "
            "choose cost='bytes', the default."
        )
    if policy.level.rounds:
        refuse_untold_writes(graph, policy.device or "cpu")
    infer: Any = SymbolicInference() if symbolic else Inference()
    simulation = simulated or _simulation(graph, policy, original, infer, border)
    reference: Any = simulation.reference
    returned = simulation.returned()
    if policy.level.rounds:
        place(graph, policy, simulation, plan, symbolic=symbolic, timer=timer if measured else None)
        saturate(simulation)
    elif measured:
        simulation.colours = {n: c for n in graph.nodes if (c := _as_it_is(n, original)) is not None}
    _name_fused(simulation)
    if plan is not None:
        _keep_reasons(graph, simulation, plan)
    autocast = {n: c.dtype for n, c in reference.colours.items()}
    seen = [*_disagreements(graph, reference), *_false_claims(simulation)] if policy.level.rounds else []
    return Assignment(
        simulation.colours, simulation.dtypes, simulation.original, autocast, returned, simulation.infer, symbolic,
        seen, simulation.bodies,
    )  # fmt: skip


def _simulation(
    graph: Graph, policy: Policy, original: dict[Node, Any], infer: Any, border: Border | None
) -> Simulation:
    """Return what the policy decides before any value is placed, beside what autocast does."""
    aliases = Aliases(graph)
    plain = Policy("O1" if policy.level.rounds else "O0", dtype=policy.dtype, device=policy.device)
    reference = Simulation(plain, graph, original, infer, aliases, autocast=True, border=border)
    reference.settle()
    simulation = Simulation(policy, graph, original, infer, aliases, stacks=module_types(graph), border=border)
    simulation.reference = reference
    simulation.settle()
    return simulation


def _disagreements(graph: Graph, reference: Simulation) -> list[str]:
    """Compare the dtypes that the rules derive for autocast with those seen in a capture under it, value by value.

    A node counts only if the rules are right about its operands, so that one wrong rule is reported once.
    """
    out, wrong, names = [], set[Node](), keys(graph.nodes)
    for node in graph.nodes:
        seen, ours = note_of(node).autocast, reference.dtypes.get(node)
        compared = node.op.startswith("call") and is_floating(seen) and is_known(ours)
        if not compared or seen == ours:
            continue
        if wrong.isdisjoint(node.all_input_nodes):
            out.append(f"torch.autocast gives {seen} at {names[node]}, the rules say {ours}: {source(node)}")
        wrong.add(node)
    return out


def _false_claims(simulation: Simulation) -> list[str]:
    """Say which registered rules run an op low that has no low kernel here."""
    names = keys(simulation.graph.nodes)
    return [
        f"register_rule({row.name!r}, 'low') does not hold at {names[node]}, which has {colouring.reason.detail} and "
        f"stays FP32: register it as 'fp32', or choose another dtype ({source(node)})"
        for node, colouring in simulation.colours.items()
        if is_registered((row := row_of(node)).name) and colouring.kind == KEEP
        and row.kind(simulation.device) == LOW and colouring.reason.code in (Code.KEEP, Code.AS_WRITTEN)
    ]  # fmt: skip


def _as_it_is(node: Node, original: dict[Node, Any]) -> Colouring | None:
    """Return the decision of a plan at O0 with measured costs: that a node runs as written."""
    dtypes = original[node] if isinstance(original[node], tuple) else (original[node],)
    dtype = next((d for d in dtypes if is_floating(d) and not isinstance(d, tuple)), None)
    if not node.op.startswith("call") or dtype is None:
        return None
    return Colouring(dtype, "keep", Code.AS_WRITTEN("nothing is rounded"))


def _name_fused(simulation: Simulation) -> None:
    """Give the ops that eager evaluation runs in a fused kernel that reason, once it no longer decides anything."""
    for node, colouring in simulation.colours.items():
        if note_of(node).fused and not row_of(node).commutes and simulation.policy.level.rounds:
            colouring.reason = Code.FASTPATH(f"a fused kernel in eager evaluation ({colouring.reason})")


def _keep_reasons(graph: Graph, simulation: Simulation, plan: Plan) -> None:
    """Give every node the reason from the replayed plan, since the measurements behind it are not repeated."""
    reasons = {d.key: d.because for d in plan.decisions}
    for node, key in keys(graph.nodes).items():
        if node in simulation.colours and key in reasons:
            simulation.colours[node].reason = reasons[key]
