"""What counts as a difference, how it is listed, and what cannot be compared."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxamp
from fxamp.report.diff.changes import compared
from fxamp.report.diff.diff import PLAN_KEY, Change, diff
from fxamp.report.diff.match import Item, match
from passes.contract.errors import FxampError, PlanError
from passes.contract.plan import Decision, Plan
from passes.contract.policy import Policy
from tests.support.helpers import Layers
from tests.support.zoo import GPT, CausalBlock


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
        "--- O1,dtype=bf16,device=cpu  graph, torch 2.13.0, 1 nodes",
        "+++ O2,dtype=bf16,device=cpu  graph, torch 2.13.0, 1 nodes",
    ]


def test_another_number_of_casts_is_a_difference() -> None:
    found = diff(plan(LINEAR), dataclasses.replace(plan(LINEAR), casts=7))
    assert [(change.key, change.field) for change in found.changes] == [(PLAN_KEY, "casts")]


def test_names_are_text_in_every_form() -> None:
    odd = Decision("\x1b[31m/<b>|`x\n::error::", 0, "linear", "", "", "bfloat16", "float32", "low", "x ##[error]")
    found = diff(plan(LINEAR), plan(LINEAR, odd))
    assert "+ \\x1b[31m/<b>|`x\\n::error::  colour: bfloat16" in str(found).splitlines()
    assert r"\\x1b\[31m/&lt;b>\|\`x\\n::error::" in found.to_markdown()


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
        "--- O1,dtype=bf16,device=cpu  graph, torch 2.13.0, 2 nodes",
        "+++ O2,dtype=bf16,device=cpu  graph, torch 2.13.0, 2 nodes",
        "@@ 1 added, 1 removed, 0 changed @@",
        "@@ (model): 1 removed",
        "- relu#0  colour: bfloat16",
        "@@ head: 1 added",
        "+ head/softmax#0  colour: bfloat16",
    ]


def test_changes_are_listed_module_by_module() -> None:
    other = [decision(f"{path}#0", "float32") for path in ("a/relu", "b/relu", "a/add", "b/add")]
    same = [dataclasses.replace(d, colour="bfloat16", reason="autocast_low") for d in other]
    lines = str(diff(plan(*same), plan(*other))).splitlines()
    assert [line.split()[1] for line in lines if line.startswith(("@@", "!"))][1:] == [
        "a:", "a/relu#0", "a/relu#0", "a/add#0", "a/add#0", "b:", "b/relu#0", "b/relu#0", "b/add#0", "b/add#0"
    ]  # fmt: skip


def layers(*paths: str, colour: str = "bfloat16") -> list[Decision]:
    names = ("norm/layer_norm#0", "attention/linear#0", "attention/softmax#0", "attention/linear#1", "add#0")
    return [decision(f"{path}.{name}" if "/" in name else f"{path}/{name}", colour) for path in paths for name in names]


def test_a_layer_put_in_between_is_all_that_differs() -> None:
    before = [decision("embed/embedding#0"), *layers("h.0", "h.1", "h.2"), decision("norm/layer_norm#0")]
    adapter = [decision("h.1.down/linear#0"), decision("h.1/tanh#0"), decision("h.1.up/linear#0")]
    after = [before[0], *layers("h.0"), *adapter, *layers("h.2", "h.3"), before[-1]]
    found = diff(plan(*before), plan(*after))
    assert [(c.kind, c.key) for c in found.changes] == [("added", d.key) for d in adapter]
    assert [(c.before, c.after, len(c.nodes)) for c in found.renamed] == [("h.1 to 2", "h.2 to 3", 10)]
    assert "= h.1 to 2  is now  h.2 to 3  (10 nodes)" in str(found).splitlines()
    assert "h.1 to 2" in found.to_markdown()
    assert json.loads(found.to_json())["renamed"][0]["after"] == "h.2 to 3"


class Adapter(nn.Module):
    """A layer that is none of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(32, 8), nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.up(torch.tanh(self.down(x)))
        return made


@pytest.mark.parametrize("inserted", [Adapter, lambda: CausalBlock(32, 4, 0.1)], ids=["another", "equal"])
def test_of_gpt2_with_a_layer_more_that_layer_and_its_neighbours_differ(inserted: Callable[[], nn.Module]) -> None:
    def planned(at: int | None) -> Plan:
        model = GPT()
        model.blocks = nn.ModuleList(CausalBlock(32, 4, 0.1) for _ in range(5))
        if at is not None:
            model.blocks.insert(at, inserted())
        return fxamp.plan(torch.fx.symbolic_trace(model), torch.randint(0, 50, (2, 8)), policy="O2,dtype=bf16")

    found = diff(planned(None), planned(2))
    nodes = [c for c in found.changes if c.key != PLAN_KEY]
    (layer,) = {c.module.split(".")[1] for c in nodes if c.kind == "added"}
    near = {f"blocks.{int(layer) + step}" for step in (-1, 0, 1)}
    assert {".".join(c.module.split(".")[:2]) for c in nodes} <= near | {"norm"}
    assert not [c for c in nodes if c.kind == "removed"]
    moved = [("blocks.2 to 4", "blocks.3 to 5")] if inserted is Adapter else []
    assert [(c.before, c.after) for c in found.renamed] == moved


def test_an_equal_layer_more_is_the_last() -> None:
    tail = decision("norm/layer_norm#0")
    found = diff(plan(*layers("h.0", "h.1"), tail), plan(*layers("h.0", "h.1", "h.2"), tail))
    assert {c.module.partition("/")[0] for c in found.changes} == {"h.2.norm", "h.2.attention", "h.2"}
    assert not found.renamed


def test_edits_in_two_places_leave_what_is_between_them_alone() -> None:
    before = layers("h.0", "h.1", "h.2", "h.3")
    first, last = decision("first/gelu#0"), decision("last/tanh#0")
    after = [*layers("h.0"), first, *layers("h.1", "h.2"), last, *layers("h.3", colour="float32")]
    found = diff(plan(*before), plan(*after))
    assert [c.key for c in found.changes if c.kind == "added"] == ["first/gelu#0", "last/tanh#0"]
    assert {c.key for c in found.changes if c.kind == "changed"} == {d.key for d in layers("h.3")}


def test_layers_that_moved_apart_are_named_one_by_one() -> None:
    before = [d for i in range(5) for d in layers(f"h.{i}")]
    others = [decision(f"{path}/gelu#0") for path in ("h.1", "h.3")]
    after = [*layers("h.0"), others[0], *layers("h.2"), others[1], *layers("h.4", "h.5", "h.6")]
    found = diff(plan(*before), plan(*after))
    assert [c.key for c in found.changes] == [d.key for d in others]
    assert [(c.before, c.after) for c in found.renamed] == [("h.1", "h.2"), ("h.2 to 4", "h.4 to 6")]


def test_a_renamed_module_is_one_line_and_a_difference() -> None:
    found = diff(plan(*layers("encoder.0", "encoder.1")), plan(*layers("model.encoder.0", "model.encoder.1")))
    assert found.changes == ()
    assert [(c.before, c.after) for c in found.renamed] == [("(model)", "model")]
    assert found


def test_a_node_that_stands_elsewhere_says_where() -> None:
    a, b, c = layers("a"), layers("b"), layers("c")
    moved = decision("a/dropout#0")
    found = diff(plan(*a, moved, *b, *c), plan(*a, *b, moved, *c))
    assert found.changes == (Change("changed", "a/dropout#0", "position", "after a/add#0", "after b/add#0"),)
    inside = dataclasses.replace(moved, key="b/dropout#0", module_path="b")
    found = diff(plan(*a, moved, *b, *c), plan(*a, inside, *b, *c))
    assert found.changes == (Change("changed", "b/dropout#0", "position", "a/dropout#0", "b/dropout#0"),)


def test_a_rule_that_another_torch_has_changed_is_one_line() -> None:
    def made(torch_version: str, colour: str, kind: str) -> Plan:
        norms = [dataclasses.replace(decision(f"h.{i}/rms_norm#0", colour), kind=kind) for i in range(24)]
        both = [d for i, norm in enumerate(norms) for d in (*layers(f"h.{i}"), norm)]
        return dataclasses.replace(plan(*both), torch_version=torch_version)

    before, after = made("2.11.0", "bfloat16", "follow"), made("2.12.1", "float32", "fp32")
    found = diff(before, after)
    line = "! torch 2.11 to 2.12: rule rms_norm, 24 decisions: follow, bfloat16 -> fp32, float32"
    assert str(found).splitlines()[2:] == ["@@ 0 added, 0 removed, 24 changed @@", line]
    assert len(json.loads(found.to_json())["changes"][0]["nodes"]) == 24
    newer = dataclasses.replace(after, torch_version="2.11.0", fxamp_version="99")
    lines = str(diff(before, newer)).splitlines()
    assert "fxamp 99, torch 2.11.0" in lines[1]
    assert lines[-1].startswith(f"! fxamp {before.fxamp_version} to 99: rule rms_norm, 24 decisions")
    same = diff(before, dataclasses.replace(after, torch_version="2.11.1"))
    assert {c.key for c in same.changes} == {f"h.{i}/rms_norm#0" for i in range(24)}


def test_a_plan_of_another_model_is_one_line() -> None:
    other = [decision(f"stage.{i}.conv/{op}#0") for i in range(9) for op in ("conv2d", "batch_norm", "relu")]
    found = diff(plan(*layers(*(f"h.{i}" for i in range(9)))), plan(*other))
    said = "! (plan)  model: 45 nodes -> another model: 27 nodes, 0 of them as before"
    assert str(found).splitlines()[3:] == [said]


def test_fifty_thousand_nodes_are_compared_in_seconds() -> None:
    def many(layer: int) -> list[Item]:
        names = ["norm", "split", "scores", "softmax", "mix", "out", "add", "up", "gelu", "down"] * 5
        keys = [(f"h.{i}", f"h.{i}/{name}#{at // 10}", name) for i in range(1000) for at, name in enumerate(names)]
        new = [("adapter", f"adapter/{name}#0", name) for name in ("linear", "tanh")]
        keys[50 * layer : 50 * layer] = new
        low = {"colour": "bfloat16"}
        return [Item(k, m, name, (at - 1,) if at else (), low) for at, (m, k, name) in enumerate(keys)]

    before, after = many(500), many(200)
    start = time.process_time()
    pairs, _ = match(before, after)
    changes = compared(before, after, pairs, "colour")
    assert time.process_time() - start < 5
    assert {(c.kind, c.module) for c in changes} == {("changed", "adapter")}
    assert len(pairs) == len(before) > 50_000


def test_html_is_a_table_in_which_names_are_text() -> None:
    odd = Decision("\x1b[31m/<b>|`x\n", 0, "linear", "<script>", "", "bfloat16", "float32", "low", "x <i>")
    page = diff(plan(LINEAR), plan(LINEAR, odd)).to_html()
    assert re.fullmatch(r"(<[^<>]*>|[^<>\x1b])*", page)
    assert not re.search("<(b|i|script)>", page)
    assert "&lt;b&gt;|`x\\n" in page


def test_markdown_shortens_itself_and_says_so() -> None:
    long = [decision(f"{'m' * 500}.{i}/relu#0") for i in range(3000)]
    text = diff(plan(LINEAR), plan(LINEAR, *long)).to_markdown()
    assert len(text.encode()) < 2**20
    assert re.search(r"\d+ more changes are left out here", text)


def test_casts_of_converted_modules_are_compared() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.randn(2, 4),)
    low, kept = (fxamp.convert(model, x, policy=f"O1,dtype=bf16{more}") for more in ("", ",modules.0=fp32"))
    fields = {c.field: (c.before, c.after) for c in diff(low, kept).changes if c.key == "0/linear#0"}
    assert fields["casts"] == ("float32 to bfloat16 (3)", "none")
    assert "casts" not in {c.field for c in diff(fxamp.plan_of(low), kept).changes if c.key == "0/linear#0"}
    assert not diff(low, fxamp.plan_of(low))


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
    layers, x = (nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), torch.randn(3, 2)
    before, after = (fxamp.convert(traced(*some), x, policy="O1,dtype=bf16") for some in (layers[:2], layers))
    assert {change.key for change in diff(before, after).changes if change.kind == "added"} == {"2/linear#0"}
    assert not diff(after, fxamp.plan_of(after))


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


def test_a_call_of_the_authors_is_called_as_its_decision_is_and_no_other_node_is() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight).to(torch.float64)  # of the op and the module that casts have

    model, x = Layers(forward, weight=nn.Parameter(torch.randn(4, 4))), torch.randn(2, 4)
    view = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    graphs = (fxamp.graphs(v)[0] for v in (fxamp.convert(model, (x,), policy="O0"), view))
    found = diff(*(torch.fx.GraphModule(graph, graph.graph) for graph in graphs))  # which have no plan
    decisions = {d.key for d in fxamp.plan_of(view).decisions}
    assert {c.key for c in found.changes if c.kind == "changed"} <= decisions
    added = [c.key for c in found.changes if c.kind == "added"]
    assert added
    assert not decisions & set(added)
    assert len(added) == len(set(added))


def test_other_dtype_of_a_node_is_listed() -> None:
    before, after = traced(nn.ReLU()), traced(nn.ReLU())
    for graph, dtype in ((before, torch.float32), (after, torch.bfloat16)):
        next(iter(graph.graph.nodes)).meta["val"] = torch.empty(1, dtype=dtype)
    assert [(change.before, change.after) for change in diff(before, after).changes] == [("float32", "bfloat16")]


def test_of_a_view_alone_each_captured_graph_is_beside_the_emitted_one() -> None:
    class Net(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = super().forward(x) if self.training else self[0](x)  # type: ignore[no-untyped-call]
            return made

    model, x = Net(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    view = fxamp.convert(model, x, policy="O1,dtype=bf16")
    found = diff(view)
    assert {(c.kind, c.field) for c in found.changes} == {("added", "cast"), ("changed", "dtype")}
    assert sum(line.endswith("bfloat16") for line in found.code) == 2
    model.eval()
    view(x)
    states = [line for line in diff(view).code if line.endswith(":")]
    assert states == ["train, grad:", "eval, grad:"]
    with pytest.raises(FxampError, match=r"after is a view of 2 graphs; give fxamp\.graphs\(view\)\[i\]"):
        diff(torch.fx.symbolic_trace(model), view)
    assert diff(torch.fx.symbolic_trace(model), fxamp.graphs(view)[1]).code


def test_what_is_no_view_has_nothing_to_be_compared_with_alone() -> None:
    with pytest.raises(FxampError, match="a Linear alone has nothing to be compared with"):
        diff(nn.Linear(2, 2))
    with pytest.raises(FxampError, match="a Plan alone has nothing to be compared with"):
        diff(plan(LINEAR))


def test_a_plan_cannot_be_compared_with_a_model_or_a_graph_without_one() -> None:
    with pytest.raises(FxampError, match="diff: before is a Linear, which cannot be compared here; give two plans"):
        diff(nn.Linear(2, 2), plan(LINEAR))
    with pytest.raises(FxampError, match="diff: after is a Plan"):
        diff(traced(nn.ReLU()), plan(LINEAR))
