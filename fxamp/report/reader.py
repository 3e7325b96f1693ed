"""Read the plan, the graphs and the record of a converted model, of a plan, or of the path of a saved one."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TypeAlias, Union, cast

from torch import nn
from torch.fx import GraphModule

from passes.contract.errors import FxampError
from passes.contract.plan import Plan

from ..capture.emitted import record_on
from ..capture.graphs import is_compiled
from ..convert import converted_in, graphs, plan_of
from ..train.step import TrainStep
from ..view.graphs import bound, captured_of, numbered
from ..view.view import is_view, runner_of
from .record.build import Emitted
from .record.build import record_of as record_of_plan
from .record.record import TOTALS, Record

Readable: TypeAlias = Union[Plan, nn.Module, TrainStep, str, "os.PathLike[str]"]


def plan_in(value: object) -> Plan | None:
    """Find the plan in an argument: the plan, the path of one, or a module or a step that has one; else None."""
    if isinstance(value, Plan):
        return value
    if isinstance(value, str | os.PathLike):
        return Plan.load(value)
    module = module_in(value)
    if module is None or not (converted_in(module) or any(map(is_compiled, module.modules()))):
        return None
    return value.plan() if isinstance(value, TrainStep) else plan_of(module)


def module_in(value: object) -> nn.Module | None:
    """Find the module in an argument: the module itself, or that of a step; else None."""
    found = value.converted_model if isinstance(value, TrainStep) else value
    return found if isinstance(found, nn.Module) else None


def emitted(given: object) -> list[Emitted]:
    """Return the graphs of a converted model, numbered as in its plan; none for one that torch.compile returned."""
    module = module_in(given)
    found = [] if module is None else converted_in(module)
    if not found or found[0][0]:
        return []
    made = [(gm, record) for gm in graphs(cast("nn.Module", module)) if (record := record_on(gm)) is not None]
    once = {record["number"]: (gm, record) for gm, record in reversed(made)}  # of states that share a part of the plan
    out = []
    for number, (gm, record) in sorted(once.items()):
        kept = record.get("kept")
        of = (kept.by, kept.bytes) if kept is not None else ("", None)
        out.append(Emitted(number, record.get("part", ""), gm, *of))
    return out


def captured_and_emitted(view: object) -> list[tuple[str, GraphModule, GraphModule]]:
    """Return the state, the captured graph and the emitted graph of each graph of a view; FxampError without any."""
    if not isinstance(view, nn.Module) or not is_view(view):
        raise FxampError(f"a {type(view).__name__} alone has nothing to be compared with; give a view, or two sides")
    plan_of(view)  # says that nothing was captured yet
    found = [(placed.runner, placed.graph) for placed, _, _ in numbered(runner_of(view))]
    return [(str(graph.state), captured_of(each, graph), bound(each, graph)) for each, graph in found]


def record_of(given: object, plan: Plan | None = None) -> Record:
    """Return the record of a converted module; or of a plan, without sizes and the places of casts."""
    found = plan or plan_in(given)
    assert found is not None, "a plan, the path of one, or what has one"
    return record_of_plan(found, emitted(given), module_in(given))


def model_name(given: object) -> str:
    """Return the name of the class of the model that was converted."""
    runner = runner_of(module_in(given))
    return type(runner.model).__name__ if runner is not None else "model"


def with_totals(given: nn.Module | TrainStep) -> tuple[Plan, Record]:
    """Return the plan of a converted module, or of a step of one, with its totals, and its record.

    A model of one state has the totals by name; one of several has those of each, as "casts (evaluation)". Where no
    sizes are known, the totals count decisions only.
    """
    plan = plan_in(given) or plan_of(cast("nn.Module", given))  # which says that it was not converted
    record = record_of(given, plan)
    totals = {
        f"{key} ({state.name})" if len(record.states) > 1 else key: value
        for state in record.states for key in TOTALS if (value := getattr(state.totals, key)) is not None
    }  # fmt: skip
    return replace(plan, totals=totals), record
