"""Choose the dtype of every free value so that the fewest bytes move. At O1 this changes no rounding.

    free               which values may be stored in either dtype
    uses               who reads each value, and what each reader needs
    placement_problem  what must go together, and what each net costs
    cut                the cheapest placement
    apply_cut          its dtypes, casts and reasons

What is fixed stays as the simulation left it, and so does what each reader needs. Without shapes every cast costs one.

Before: t = view(logits: bf16); to(t, f32) -> loss; to(logits, f32) -> output
After:  w = to(logits, f32) -> output; view(w) -> loss
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from networkx import NetworkXUnbounded
from torch.fx import Graph, Node

from ...colouring import Colours
from ...contract.dtypes import dtype_name
from ...contract.errors import PlanError, VerificationError
from ...contract.penalties import Penalties
from ...contract.plan import Plan
from ...contract.plan_format import REMEDY
from ...contract.policy import Policy
from ...contract.timing import Timer
from ...graph.grad import requires_grad
from ...graph.values import Dtypes, keys
from ...ops.rules import row_of
from ..colour.simulate import Simulation
from .apply_cut import apply_cut
from .costs import ByteCosts, Costs, UnitCosts
from .cut import Problem, Variable, solve
from .free import free_nodes
from .measured_costs import MeasuredCosts
from .placement_problem import price, unpriced_problem
from .uses import Uses


def choose_storage(
    graph: Graph,
    policy: Policy,
    simulation: Simulation,
    plan: Plan | None = None,
    *,
    symbolic: bool = False,
    timer: Timer | None = None,
    penalties: Penalties | None = None,
) -> tuple[Colours, Dtypes]:
    """Choose the dtype of every free value by minimum cut; return the decisions and the dtypes of all values.

    With a plan to replay, its colours are taken: the cut depends on sizes, and another example may have others.

    Args:
        graph: legalized, not changed.
        policy: with dtype and device filled in.
        simulation: what was decided so far.
        plan: one to replay.
        symbolic: no shapes are known.
        timer: gives measured costs, in place of bytes.
        penalties: what errors cost beside.

    Raises:
        PlanError: the plan stores a value low that a reader needs in FP32.
        VerificationError: no placement is possible, which is a bug.
    """
    low: Any = policy.dtype
    grad = requires_grad(graph)
    free = free_nodes(simulation, grad)
    if not free:
        return simulation.colours, simulation.dtypes
    uses, costs = Uses(simulation, free), _costs(policy.device or "cpu", low, grad, symbolic, timer)
    problem = unpriced_problem(simulation, uses)
    if plan is None:
        price(problem, simulation, uses, costs, grad, symbolic=symbolic, penalties=penalties)
        try:
            low_side = solve(problem)
        except NetworkXUnbounded as e:
            raise VerificationError(
                "dtypes of values in this graph have conflicting constraints. This is a bug in fxamp; please report it."
            ) from e
    else:
        low_side = _planned(problem, plan, graph, free, low)
    return apply_cut(low_side, simulation, uses, costs)


def _costs(device: str, low: torch.dtype, grad: frozenset[Node], symbolic: bool, timer: Timer | None) -> Costs:
    """Return the costs by which placements are compared."""
    if symbolic:
        return UnitCosts()
    return ByteCosts(device, grad) if timer is None else MeasuredCosts(device, low, grad, timer)


def _planned(problem: Problem, plan: Plan, graph: Graph, free: Iterable[Node], low: torch.dtype) -> set[Variable]:
    """Return the low side that a plan gives; values that are tied to a low value are low too."""
    colours, names = {d.key: d.colour for d in plan.decisions}, keys(graph.nodes)
    low_side: set[Variable] = set()
    for node in free:
        owner = node.args[0] if row_of(node).asks == "item" else node
        if owner in low_side or colours.get(names[node]) == dtype_name(low):
            low_side.add(node)
    if problem.cost(low_side) == float("inf"):
        raise PlanError(f"the plan stores a value in 16 bits that an op reading it needs in FP32; {REMEDY}")
    return low_side
