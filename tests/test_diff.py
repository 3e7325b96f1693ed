"""What counts as a difference, how it is listed, and what cannot be compared."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fxamp.report.diff import PLAN_KEY, Change, diff
from passes.errors import FxampError, PlanError
from passes.plan import Decision, Plan
from passes.policy import Policy


def decision(key: str, colour: str = "bfloat16", graph: int = 0) -> Decision:
    path, _, rest = key.rpartition("/")
    reason = "autocast_low" if colour == "bfloat16" else "sensitive"
    return Decision(key, graph, rest.partition("#")[0], path, "net.py:12", colour, "bfloat16", "low", reason)


def plan(*decisions: Decision, policy: str = "O1,dtype=bf16,device=cpu") -> Plan:
    return Plan(decisions, Policy.parse(policy), torch_version="2.13.0")


LINEAR, RELU, SOFTMAX = decision("fc/linear#0"), decision("relu#0"), decision("head/softmax#0")


def traced(*layers: nn.Module) -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(nn.Sequential(*layers))


def test_equal_plans_do_not_differ() -> None:
    found = diff(plan(LINEAR, RELU), plan(LINEAR, RELU))
    assert not found
    assert "no difference" in str(found)
    assert "no difference" in found.to_markdown()


def test_moved_line_is_no_difference() -> None:
    assert not diff(plan(LINEAR), plan(dataclasses.replace(LINEAR, source="net.py:99")))


def test_other_torch_alone_is_no_difference() -> None:
    found = diff(plan(LINEAR), dataclasses.replace(plan(LINEAR), torch_version="2.14.0"))
    assert not found
    assert "torch 2.14.0" in str(found)


def test_other_colour_is_listed_with_its_reason() -> None:
    found = diff(plan(LINEAR, RELU), plan(LINEAR, decision("relu#0", "float32")))
    assert found.changes == (
        Change("changed", "relu#0", "colour", "bfloat16", "float32"),
        Change("changed", "relu#0", "reason", "autocast_low", "sensitive"),
    )


def test_another_policy_that_decides_the_same_is_no_difference() -> None:
    found = diff(plan(LINEAR), plan(LINEAR, policy="O2,dtype=bf16,device=cpu"))
    assert not found
    assert str(found).splitlines()[:2] == [
        "--- O1,dtype=bf16,device=cpu  fx, torch 2.13.0, 1 nodes",
        "+++ O2,dtype=bf16,device=cpu  fx, torch 2.13.0, 1 nodes",
    ]


def test_another_number_of_casts_is_a_difference() -> None:
    found = diff(plan(LINEAR), dataclasses.replace(plan(LINEAR), casts=7))
    assert [(change.key, change.field) for change in found.changes] == [(PLAN_KEY, "casts")]


def test_names_are_text_in_every_form() -> None:
    odd = Decision("\x1b[31m/<b>|`x\n::error::", 0, "linear", "", "", "bfloat16", "float32", "low", "x ##[error]")
    found = diff(plan(LINEAR), plan(LINEAR, odd))
    assert "+ \\x1b[31m/<b>|`x\\n::error::  colour: bfloat16" in str(found).splitlines()
    assert r"\\x1b\[31m/&lt;b>\|\`x\\n::error::" in found.to_markdown()


def test_other_number_of_casts_is_a_difference() -> None:
    assert diff(plan(LINEAR), dataclasses.replace(plan(LINEAR), casts=1))


def test_changes_come_in_graph_order() -> None:
    new = decision("new/gelu#0")
    found = diff(plan(LINEAR, RELU, SOFTMAX), plan(LINEAR, new, decision("head/softmax#0", "float32")))
    assert [(change.kind, change.key) for change in found.changes] == [
        ("removed", "relu#0"),
        ("added", "new/gelu#0"),
        ("changed", "head/softmax#0"),
        ("changed", "head/softmax#0"),
    ]


def test_first_node_removed_is_listed_first() -> None:
    found = diff(plan(RELU, LINEAR), plan(LINEAR, SOFTMAX))
    assert [change.key for change in found.changes] == ["relu#0", "head/softmax#0"]


def test_nodes_of_two_graphs_are_kept_apart() -> None:
    second = decision("relu#0", graph=1)
    found = diff(plan(RELU, second), plan(RELU))
    assert found.changes == (Change("removed", "1:relu#0", "colour", "bfloat16", None),)


def test_listing_reads_like_a_diff() -> None:
    found = diff(plan(LINEAR, RELU), plan(LINEAR, SOFTMAX, policy="O2,dtype=bf16,device=cpu"))
    assert str(found).splitlines() == [
        "--- O1,dtype=bf16,device=cpu  fx, torch 2.13.0, 2 nodes",
        "+++ O2,dtype=bf16,device=cpu  fx, torch 2.13.0, 2 nodes",
        "@@ 1 added, 1 removed, 0 changed @@",
        "- relu#0  colour: bfloat16",
        "+ head/softmax#0  colour: bfloat16",
    ]


def test_json_holds_every_change() -> None:
    data = json.loads(diff(plan(LINEAR), plan(LINEAR, RELU)).to_json())
    assert data["differ"] is True
    assert data["changes"] == [
        {"kind": "added", "key": "relu#0", "field": "colour", "before": None, "after": "bfloat16"}
    ]


def test_markdown_cell_cannot_be_broken_by_a_reason() -> None:
    piped = dataclasses.replace(RELU, reason="literal: a | b")
    table = diff(plan(RELU), plan(piped)).to_markdown()
    assert "literal: a \\| b" in table


def test_paths_are_read(tmp_path: Path) -> None:
    plan(LINEAR).save(tmp_path / "a.json")
    assert not diff(tmp_path / "a.json", plan(LINEAR))
    assert diff(str(tmp_path / "a.json"), plan(RELU))


def test_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"absent\.json"):
        diff(tmp_path / "absent.json", plan(LINEAR))


def test_module_with_a_plan_is_compared_by_it() -> None:
    before, after = traced(nn.Linear(2, 2)), traced(nn.Linear(2, 2))
    before.plan, after.plan = plan(LINEAR), plan(RELU)  # type: ignore[assignment]
    assert {change.key for change in diff(before, after).changes} == {"fc/linear#0", "relu#0"}


def test_equal_graphs_do_not_differ() -> None:
    assert not diff(traced(nn.Linear(2, 2), nn.ReLU()), traced(nn.Linear(2, 2), nn.ReLU()))


def test_renumbered_names_are_no_difference() -> None:
    before, after = traced(nn.ReLU(), nn.Tanh()), traced(nn.ReLU(), nn.Tanh())
    for node in after.graph.nodes:
        node.name = f"{node.name}_1"
    assert not diff(before, after)


def test_node_added_to_a_graph_is_listed_with_its_reader() -> None:
    before, after = traced(nn.Linear(2, 2)), traced(nn.Linear(2, 2))
    linear = next(node for node in after.graph.nodes if node.op == "call_module")
    with after.graph.inserting_before(linear):
        cast = after.graph.call_function(torch.ops.aten.to.dtype, (linear.args[0], torch.bfloat16))
    linear.replace_input_with(linear.all_input_nodes[0], cast)
    kinds = [(change.kind, change.field) for change in diff(before, after).changes]
    assert kinds == [("added", "target"), ("changed", "operands")]


def test_other_dtype_of_a_node_is_listed() -> None:
    before, after = traced(nn.ReLU()), traced(nn.ReLU())
    for graph, dtype in ((before, torch.float32), (after, torch.bfloat16)):
        next(iter(graph.graph.nodes)).meta["val"] = torch.empty(1, dtype=dtype)
    assert [(change.before, change.after) for change in diff(before, after).changes] == [("float32", "bfloat16")]


def test_model_and_plan_cannot_be_compared() -> None:
    with pytest.raises(FxampError, match="diff: before is a Linear, which cannot be compared here; give two plans"):
        diff(nn.Linear(2, 2), plan(LINEAR))


def test_plan_and_graph_without_one_cannot_be_compared() -> None:
    with pytest.raises(FxampError, match="diff: after is a Plan"):
        diff(traced(nn.ReLU()), plan(LINEAR))
