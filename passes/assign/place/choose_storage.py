"""Choose the dtype of every free value so that the fewest bytes move. At O1 this changes no rounding.

    free     which values may be stored in either dtype
    problem  who reads each value, what must go together, and what each net costs
    cut      the cheapest placement
    here     its dtypes, casts and reasons

What is fixed stays as the simulation left it, and so does what each reader needs.

Before: t = view(logits: bf16); to(t, f32) -> loss; to(logits, f32) -> output
After:  w = to(logits, f32) -> output; view(w) -> loss
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from networkx import NetworkXUnbounded
from torch.fx import Node

from ...contract.costs import CostModel
from ...contract.errors import PlanError, VerificationError
from ...contract.plan import Plan
from ...contract.plan_format import REMEDY
from ...contract.policy import dtype_name
from ...contract.reasons import Code
from ...form import Cast, Choice, Colours, SetDtype
from ...graph.grad import requires_grad
from ...graph.values import ELIGIBLE, Dtypes, ValueDtype, dtype_reference, first_float, keys, recast
from ...ops import ops
from ...ops.rules import LOW, row_of
from ..colour.operand_casts import operand_casts
from ..colour.simulate import Simulation
from .cut import Problem, Variable, solve
from .free import free_nodes
from .problem import Uses, price, unpriced_problem


def choose_storage(
    simulation: Simulation, costs: CostModel, plan: Plan | None = None
) -> tuple[Colours, Dtypes, Mapping[str, int]]:
    """Choose the dtype of every free value by minimum cut; return decisions, dtypes of all values, and what was timed.

    With a plan to replay, its colours are taken: the cut depends on sizes, and another example may have others.
    """
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
    colours = {
        node: _compared(node, choice, dtypes)
        if uses.takes_either(node)
        else _recoloured(node, choice, simulation.low if node in low_side else torch.float32, dtypes, uses, costs)
        for node, choice in simulation.colours.items()
    }
    return colours, dtypes


def _compared(node: Node, choice: Choice, dtypes: Dtypes) -> Choice:
    """Return the decision on a comparison, which reads its operands in the dtypes in which they are stored."""
    floats = [d for o in ops.operands(node) if isinstance(d := dtypes[o.node], torch.dtype) and d in ELIGIBLE]
    return replace(choice, dtype=functools.reduce(torch.promote_types, floats)) if floats else choice


def _recoloured(node: Node, choice: Choice, side: torch.dtype, dtypes: Dtypes, uses: Uses, costs: CostModel) -> Choice:
    """Return the decision on a node, given how its value and its operands are stored."""
    before = uses.simulation.dtypes
    placed = choice.edited(*_casts(node, choice, side, dtypes, uses), but=Cast)
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


def _casts(node: Node, choice: Choice, side: torch.dtype, dtypes: Dtypes, uses: Uses) -> tuple[Cast, ...]:
    """Return the casts of a node, given how the cut stores its operands."""
    if uses.upcasts(node):  # the user's upcast needs no cast of ours
        return ()

    def wanted(operand: ops.Operand) -> ValueDtype:
        if dtypes[operand.node] not in ELIGIBLE:
            return choice.casts.get(operand.place)
        return uses.wanted(node, operand.place, side)

    return operand_casts(dtypes, ops.operands(node), wanted)
