"""Pass 2: decide in which dtype every node runs, and say why. The graph is not changed.

Two simulations run forwards over the graph (`simulate.py`). The first does what `torch.autocast` would do on this
device: every node gets its `autocast` dtype. The second follows the policy: its overrides, the casts in the user's
code, and each rule as the level interprets it. Then each value is stored where the fewest bytes move
(`choose_storage.py`).

Before: linear(x, w); softmax(linear)          no dtype decided
After:  linear: bfloat16, "low: matrix product"; softmax: bfloat16, "follow: its operand's dtype"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from ..contract.costs import CostModel
from ..contract.errors import PlanError, PolicyError
from ..contract.plan import Decision, Plan
from ..contract.plan_format import REMEDY
from ..contract.policy import Policy, dtype_name
from ..contract.reasons import DEVIATIONS, Code, Reason
from ..form import Assignment, Choice, Colours, Ensures, UnderAutocast, Unit
from ..graph.aliases import Aliases
from ..graph.grad import is_leaf, requires_grad
from ..graph.notes import note_of
from ..graph.outputs import Outputs, views_of
from ..graph.values import Inference, first_float, is_floating, keys, module_path, original_dtypes, source
from ..ops import ops
from ..ops.rules import KEEP, LOW, is_registered, row_of
from .colour.decide import AutocastRules, PolicyRules
from .colour.kernels import refuse_untold_writes
from .colour.simulate import Simulation
from .place.choose_storage import choose_storage
from .place.costs import ByteCosts
from .place.saturate import saturate


@dataclass(frozen=True)
class AssignPrecision:
    """Decide for every node of a graph; the options are arguments of `compile_graph`."""

    name: ClassVar = "assign-precision"
    ensures: ClassVar = Ensures.NOTHING_NEW
    policy: Policy
    plan: Plan | None = None
    exact: bool = True
    costs: CostModel | None = None

    def __call__(self, unit: Unit) -> Assignment:
        """Decide on one legalized graph, which is not changed."""
        plan = None if self.plan is None else self.plan.of_graph(unit.index)
        try:
            assignment = self._assigned(unit, plan)
        except PlanError:
            if self.exact:
                raise
            assignment = self._assigned(unit, None)
        decisions = _decisions(unit, assignment)
        if plan is not None:
            decisions = replay(decisions, plan, self.exact)
        return replace(assignment, decisions=decisions)

    def _assigned(self, unit: Unit, plan: Plan | None) -> Assignment:
        """Colour every node that touches a floating value; `plan` has the colours of free values to take."""
        graph, policy = unit.graph, self.policy
        if not policy.level.rounds:
            original = original_dtypes(graph, unit.attribute)
            returned = {n: original[n] for n in graph.output_node().all_input_nodes}
            colours: Colours = {
                n: Choice(dtype, Reason(Code.AS_WRITTEN, "nothing is rounded", KEEP))
                for n in graph.nodes
                if n.op.startswith("call") and (dtype := first_float(original[n])) is not None
            }
            return Assignment(colours, original, original, returned, Inference())
        if policy.cost == "measured" and plan is None and self.costs is None:
            raise PolicyError(
                "cost='measured' needs shapes to measure: give convert example inputs, or choose cost='bytes', the "
                "default."
            )
        refuse_untold_writes(graph, unit.target.device)
        simulation = unit.simulated or _simulation(unit, policy)
        costs = self.costs or ByteCosts(unit.target.device)
        colours, dtypes, timings = choose_storage(simulation, costs, plan)
        colours = _named(simulation, saturate(simulation, colours, dtypes))
        reference: Any = simulation.reference
        assignment = Assignment(
            colours, dtypes, simulation.original, simulation.returned(), simulation.infer,
            (*_disagreements(graph, reference), *_false_claims(simulation)), simulation.bodies,
            {n: c.dtype for n, c in reference.colours.items()}, timings=timings,
        )  # fmt: skip
        return replace(assignment, colours=_outputs_named(graph, assignment))


def _simulation(unit: Unit, policy: Policy) -> Simulation:
    """Return what the policy decides before any value is placed, beside what autocast does."""
    graph, original = unit.graph, original_dtypes(unit.graph, unit.attribute)
    common = unit.target, graph, original, Inference(), Aliases(graph), unit.border
    reference = Simulation(AutocastRules(), Policy("O1"), *common)
    reference.rules.settle(reference)
    simulation = Simulation(PolicyRules(policy.level), policy, *common, reference)
    simulation.rules.settle(simulation)
    return simulation


def _disagreements(graph: Graph, reference: Simulation) -> tuple[str, ...]:
    """Say where the rules derive other dtypes for autocast than a capture under it has seen, each wrong rule once."""
    out, wrong, names = [], set[Node](), keys(graph.nodes)
    for node in graph.nodes:
        seen, ours = note_of(node).autocast, reference.dtypes.get(node)
        if not (node.op.startswith("call") and is_floating(seen)) or seen == ours:
            continue
        if wrong.isdisjoint(node.all_input_nodes):
            out.append(f"torch.autocast gives {seen} at {names[node]}, the rules say {ours}: {source(node)}")
        wrong.add(node)
    return tuple(out)


def _false_claims(simulation: Simulation) -> tuple[str, ...]:
    """Say which registered rules run an op low that has no low kernel here."""
    names = keys(simulation.graph.nodes)
    return tuple(
        f"register_rule({row.name!r}, 'low') does not hold at {names[node]}, which has {choice.reason.detail} and "
        f"stays FP32: register it as 'fp32', or choose another dtype ({source(node)})"
        for node, choice in simulation.colours.items()
        if is_registered((row := row_of(node)).name) and choice.reason.kind == KEEP
        and row.kind(simulation.device) == LOW and choice.reason.code in (Code.KEEP, Code.AS_WRITTEN)
    )  # fmt: skip


def _named(simulation: Simulation, colours: Colours) -> Colours:
    """Return the decisions with the ops named that autocast's own kernels or sums differ from, and with ranges."""
    named, policy = dict(colours), simulation.policy
    sums = policy.level.is_autocasts and policy.sharing.endswith("storage")
    grad = requires_grad(simulation.graph) if sums else frozenset()
    for node, choice in colours.items():
        row, why = row_of(node), choice.reason
        if note_of(node).fused and not row.commutes:
            why = why.because(Code.FASTPATH(f"a fused kernel in eager evaluation ({why})"))
        apart = [o.node for o in ops.operands(node) if o.place not in choice.casts] if row.recomputed else []
        if any(len(n.users) > 1 and n in grad and is_leaf(n) for n in apart):
            why = why.because(Code.SUM_ORDER(f"casts weights that are read elsewhere too ({why})"))
        wide = row.recurrent and (x := node.all_input_nodes[0]) in grad and simulation.dtypes[x] == torch.float32
        once = ops.argument(node, row.casts_again) and not choice.has(UnderAutocast)
        if wide and (once or (len(x.users) > 1 and is_leaf(x))):
            said = Code.SUM_ORDER(f"casts its input once for both directions or other readers ({why})")
            why = why.because(said)
        kept = why.code is Code.LITERAL or (policy.level.stores_low and choice.dtype == torch.float32)
        ranges = simulation.extremes.ranges_of(node.all_input_nodes) if kept else ()
        if why is not choice.reason or ranges:
            named[node] = replace(choice, reason=replace(why, ranges=ranges))
    return named


def _outputs_named(graph: Graph, assignment: Assignment) -> Colours:
    """Return the decisions with those named that make an output that other outputs are computed from."""
    colours = dict(assignment.colours)
    read = Outputs(graph, assignment.widened).readers if assignment.widened else {}
    for value in (n for n, readers in read.items() if readers):
        node = next((n for n in (value, *views_of(value)) if n in colours), None)  # an item or a view may have none
        if node is not None and (why := colours[node].reason).code not in DEVIATIONS:
            said = Code.OUTPUT(f"it is handed out in FP32 as the tensor that is read ({why})")
            colours[node] = replace(colours[node], reason=why.because(said))
    return colours


def _decisions(unit: Unit, assignment: Assignment) -> tuple[Decision, ...]:
    """Return the decisions on a graph in the form of a plan, in the graph's order."""
    names, colours, autocast = keys(unit.graph.nodes), assignment.colours, assignment.autocast
    choices = ((n, colours[n].dtype, colours[n].reason) for n in unit.graph.nodes if n in colours)
    return tuple(
        Decision(
            key=names[node],
            graph=unit.index,
            op=ops.name(node),
            module_path=module_path(node),
            source=source(node),
            colour=dtype_name(dtype),
            autocast_dtype=dtype_name(autocast.get(node, dtype)),
            kind=why.kind,
            reason=str(why),
            code=why.code.value,
            causes=tuple(names[c] for c in why.causes if c in names),
            ranges=why.ranges,
        )
        for node, dtype, why in choices
    )


def replay(decisions: Sequence[Decision], plan: Plan, exact: bool = True) -> tuple[Decision, ...]:
    """Check that a plan fits a graph and gives the colours decided here; return the decisions with the plan's reasons.

    Colours follow from one another, so a plan is replayed as a whole, and what was measured for it is not repeated. One
    that is not `exact` is of the model in another state: it gives the reason where it decides the same.
    """
    ours, theirs = {d.key: d for d in decisions}, {d.key: d for d in plan.decisions}
    if exact:
        _refuse_unfit(ours, theirs)
    for key, decision in theirs.items() if exact else ():
        if not isinstance(getattr(torch, decision.colour, None), torch.dtype):
            raise PlanError(f"the plan gives {key} the colour {decision.colour!r}, which is not a dtype; {REMEDY}")
        if ours[key].colour != decision.colour:
            raise PlanError(
                f"the plan runs {key} ({ours[key].source}) in {decision.colour}; its policy gives {ours[key].colour} "
                f"with torch {torch.__version__} (the plan was made with {plan.torch_version}). {REMEDY}"
            )
    agreed = {key: theirs[key] for key, d in ours.items() if key in theirs and theirs[key].colour == d.colour}
    return tuple(
        d if (planned := agreed.get(d.key)) is None else replace(d, reason=planned.reason, code=planned.code)
        for d in decisions
    )


def _refuse_unfit(ours: Mapping[str, Decision], theirs: Mapping[str, Decision]) -> None:
    """Raise PlanError if graph or plan lacks a decision that the other has."""
    missing = [k for k in theirs if k not in ours]
    extra = [k for k in ours if k not in theirs]
    if missing or extra:
        key = (missing or extra)[0]
        where = f" ({ours[key].source})" if key in ours else ""
        kind = "decides on a node that the model does not have" if missing else "does not know a node of the model"
        raise PlanError(
            f"the plan does not fit this model: it {kind}: {key}{where}; {len(missing)} missing, {len(extra)} new. "
            f"{REMEDY}"
        )
