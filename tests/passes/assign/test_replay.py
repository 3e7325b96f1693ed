"""A plan is carried out on the graph it was made for, and refused by name on any other."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from passes.contract.errors import PlanError
from passes.contract.plan import Plan
from passes.contract.policy import Policy
from tests.support.graphs import LAYER, compile_plain, parse, random_graph


def plan_for(text: str, plan: Plan | None = None, stack_trace: str = "") -> Plan:
    gm = parse(text)
    for node in gm.graph.nodes:
        node.meta["nn_module_stack"] = {"k": ("fc", nn.Linear)}
        node.meta["stack_trace"] = stack_trace
    policy = plan.policy if plan is not None else Policy("O1", dtype=torch.bfloat16, device="cpu")
    return compile_plain(gm, policy, plan=plan)


def test_a_plan_replays_to_itself() -> None:
    plan = plan_for(LAYER)
    assert plan_for(LAYER, plan) == plan


@pytest.mark.parametrize("seed", range(5))
def test_a_saved_plan_replays_to_the_same_graph(seed: int) -> None:
    original = random_graph(seed)
    first, second = copy.deepcopy(original), copy.deepcopy(original)
    policy = Policy("O2", dtype=torch.bfloat16, device="cpu")
    plan = compile_plain(first, policy)
    loaded = Plan.from_json(plan.to_json())
    assert compile_plain(second, loaded.policy, plan=loaded) == plan
    first.recompile()
    second.recompile()
    assert first.code == second.code


def test_a_node_that_the_model_does_not_have_is_named() -> None:
    plan = plan_for(LAYER)
    without = LAYER.replace("    relu: f32[2, 4] = relu(linear)\n", "").replace("return relu", "return linear")
    with pytest.raises(PlanError, match=r"decides on a node that the model does not have: fc/relu#0; 1 missing, 0 new"):
        plan_for(without, plan)


def test_a_node_that_the_plan_does_not_know_is_named_with_its_source() -> None:
    plan = plan_for(LAYER)
    more = LAYER.replace("return relu", "neg: f32[2, 4] = neg(relu)\n    return neg")
    trace = 'File "/home/me/model.py", line 7, in forward\n    return -y'
    with pytest.raises(
        PlanError, match=r"does not know a node of the model: fc/neg#0 \(model.py:7: return -y\); 0 missing, 1 new"
    ):
        plan_for(more, plan, trace)


def test_a_colour_that_this_torch_does_not_give_is_named() -> None:
    plan = plan_for(LAYER)
    changed = replace(plan, decisions=(replace(plan.decisions[0], colour="float32"), *plan.decisions[1:]))
    with pytest.raises(PlanError, match=r"runs fc/linear#0 \(\) in float32; its policy gives bfloat16 with torch"):
        plan_for(LAYER, changed)


def test_a_colour_that_is_no_dtype_is_named() -> None:
    plan = plan_for(LAYER)
    changed = replace(plan, decisions=(replace(plan.decisions[0], colour="nn"), *plan.decisions[1:]))
    with pytest.raises(PlanError, match="'nn', which is not a dtype"):
        plan_for(LAYER, changed)
