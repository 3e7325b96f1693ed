"""Read the plan, the graphs and the record of a converted model, of a plan, or of the path of a saved one."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TypeAlias, Union

from torch import nn

from passes.contract.plan import Plan

from ...convert import graphs, plan_of
from ...dynamo import compiled
from ...module.module import ConvertedModule
from ..record.build import Emitted
from ..record.build import record_of as record_of_plan
from ..record.record import TOTALS, Record

Readable: TypeAlias = Union[Plan, nn.Module, str, "os.PathLike[str]"]


def plan_in(value: object) -> Plan | None:
    """Find the plan in an argument: the plan itself, the path of one, or a module that has one; else None.

    Raises:
        CaptureError: nothing was converted yet for a module that is compiled.
        PlanError: the file cannot be read.
    """
    if isinstance(value, Plan):
        return value
    if isinstance(value, str | os.PathLike):
        return Plan.load(value, newer=True)
    plan = getattr(value, "plan", None)
    if isinstance(plan, Plan):
        return plan
    if not isinstance(value, nn.Module):
        return None
    inside = compiled.is_compiled(value) or any(isinstance(m, ConvertedModule) for m in value.modules())
    return plan_of(value) if inside else None


def emitted(module: nn.Module, plan: Plan) -> list[Emitted]:
    """Return the graphs of a converted module, numbered as in its plan; none for one that torch.compile returned."""
    if isinstance(module, ConvertedModule):  # deleted together with that class: a view is all that is converted then
        firsts = [int(state.partition(":")[0]) for state in plan.states] or [0]
        names = [state.partition(": ")[2] for state in plan.states] or [""]
        leaves = [call.call_spec.leaves for call in module.variants]
        inputs = [[leaf.name for leaf in found if leaf.tensor] for found in leaves]
        return [Emitted(*made) for made in zip(firsts, names, graphs(module), inputs, strict=True)]
    if compiled.runner_of(module) is None:
        return []
    out, first = [], 0
    for entry, graph in zip(compiled.entries(module), graphs(module), strict=True):
        state = str(getattr(graph, "state", "")).removeprefix("call: ")
        out.append(Emitted(first, state, graph, ()))
        first += entry.plan.graphs
    return out


def record_of(given: object, plan: Plan | None = None) -> Record:
    """Return the record of a converted module; or of a plan, without sizes and the places of casts.

    Args:
        given: a module or a plan.
        plan: that of the module, if it is known already.

    Raises:
        CaptureError: the module was compiled and not called yet, or not converted at all.
    """
    if not isinstance(given, nn.Module):
        found = plan if plan is not None else plan_in(given)
        assert found is not None, "a plan, or the path of one"
        return record_of_plan(found)
    found = plan_of(given) if plan is None else plan
    return record_of_plan(found, emitted(given, found), given)


def model_name(given: object) -> str:
    """Return the name of the class of the model that was converted."""
    if isinstance(given, ConvertedModule):
        return given.original
    runner = compiled.runner_of(given)
    return type(runner.model).__name__ if runner is not None else "model"


def with_totals(module: nn.Module) -> tuple[Plan, Record]:
    """Return the plan of a converted module with its totals, and its record.

    A model of one state has the totals by name; one of several has those of each, as "casts (evaluation)". Where no
    sizes are known, the totals count decisions only.
    """
    record = record_of(module)
    totals = {
        f"{key} ({state.name})" if len(record.states) > 1 else key: value
        for state in record.states for key in TOTALS if (value := getattr(state.totals, key)) is not None
    }  # fmt: skip
    return replace(plan_of(module), totals=totals), record
