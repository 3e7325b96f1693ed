"""What a report shows, in each of its forms."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import fxamp
from fxamp.report.report import report
from fxamp.train.describe import describe
from passes.contract.errors import FxampError
from passes.contract.plan import Decision, Plan
from passes.contract.policy import Policy
from tests.fxamp.report.page.test_page import Page

PLAN = Plan(
    decisions=(
        Decision("fc/linear#0", 0, "linear", "fc", "net.py:12", "bfloat16", "bfloat16", "low", "autocast_low"),
        Decision("fc/linear#1", 0, "linear", "fc", "net.py:13", "bfloat16", "bfloat16", "low", "autocast_low"),
        Decision("mul#0", 0, "mul", "", "net.py:14", "float32", "bfloat16", "promote", "literal: 1e9 | x"),
    ),
    policy=Policy("O1", dtype="bf16", device="cpu"),
    notes=("gru kept whole",),
    inserted_casts=3,
    casts=2,
)


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_table_has_a_row_per_node() -> None:
    text = rows(str(report(PLAN)))
    assert ["fc/linear#0", "linear", "bfloat16", "autocast_low", "net.py:12"] in text
    assert ["fc/linear#1", "linear", "bfloat16", "autocast_low", "net.py:13"] in text


def test_autocast_dtype_is_shown_where_it_differs() -> None:
    assert ["mul#0", "mul", "float32", "bfloat16", "literal:", "1e9", "|", "x", "net.py:14"] in rows(str(report(PLAN)))


def test_totals_come_first() -> None:
    text = rows(str(report(PLAN)))
    for line in (
        ["policy", "O1,dtype=bf16,device=cpu"],
        ["nodes", "3"],
        ["colours", "2", "bfloat16,", "1", "float32"],
        ["casts", "inserted", "3"],
        ["casts", "after", "elimination", "2"],
        ["deviations", "from", "autocast", "1", "literal"],
    ):
        assert text.index(line) < text.index(["Nodes"])


def test_summary_counts_each_op_and_colour() -> None:
    text = rows(str(report(PLAN)))
    assert ["linear", "bfloat16", "2"] in text
    assert ["mul", "float32", "1"] in text


def test_rules_that_fired_are_counted_and_those_that_did_not_are_named_where_that_is_asked_for() -> None:
    plan = dataclasses.replace(PLAN, edits={"insert-casts/operand": 3, "eliminate-casts/share": 1, "legalize/loss": 0})
    text = report(plan).to_tree(edits=True)
    assert ["insert-casts/operand", "3"] in rows(text)
    assert text.endswith("\nRules that never fired: legalize/loss\n")
    for asked_for_nothing in (str(report(plan)), report(plan).to_markdown(), report(plan).to_tree(nodes=True)):
        assert "Edits" not in asked_for_nothing
        assert "never fired" not in asked_for_nothing
    assert "Edits" not in report(PLAN).to_tree(edits=True)


def test_notes_are_shown_only_when_there_are_any() -> None:
    assert "- gru kept whole" in str(report(PLAN))
    assert "Notes" not in str(report(Plan((), Policy())))


def test_nodes_of_several_graphs_say_which() -> None:
    second = Decision("mul#0", 1, "mul", "", "", "float32", "float32", "promote", "promote")
    text = str(report(Plan((*PLAN.decisions, second), Policy())))
    assert "0:mul#0" in text
    assert "1:mul#0" in text


def test_markdown_escapes_what_would_end_a_cell() -> None:
    text = report(PLAN).to_markdown()
    assert "## Nodes" in text
    row = next(line for line in text.splitlines() if line.startswith("| mul#0"))
    assert row.replace("\\|", "").count("|") == len(("node", "op", "colour", "autocast", "reason", "source")) + 1


def test_json_holds_the_whole_plan() -> None:
    data = json.loads(report(PLAN).to_json())
    assert Plan.from_json(json.dumps(data["plan"])) == PLAN
    assert data["ops"] == [
        {"op": "linear", "colour": "bfloat16", "count": 2},
        {"op": "mul", "colour": "float32", "count": 1},
    ]
    assert [decision["key"] for decision in data["deviations"]] == ["mul#0"]


def test_html_has_the_totals_and_every_node() -> None:
    text = report(PLAN).to_html()
    assert text.startswith("<!doctype html>")
    assert Page(text).keys() == [decision.key for decision in PLAN.decisions]
    assert Page(text).data["states"][0]["totals"]["casts"] == 2
    assert "O1,dtype=bf16,device=cpu" in text


def test_saved_plan_is_read(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert report(tmp_path / "plan.json").plan == PLAN


def test_model_without_a_plan_is_refused() -> None:
    with pytest.raises(FxampError, match="a Linear has no plan; give a Plan"):
        report(nn.Linear(2, 2))


def test_of_a_train_step_it_says_how_it_trains() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    model = fxamp.convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), (x,), policy="O1,dtype=fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = fxamp.LossScaler(init_scale=8.0)
    step = fxamp.TrainStep(model, lambda o, f: o.mean() * f, optimizer, scaler=scaler, accumulate_steps=2)
    for factor in (1.0, 1.0, 1.0, math.nan):
        step(x, factor)
    found = fxamp.report(step)
    assert dict(found.training) == {
        "window": "2 micro-batches, 2 windows finished",
        "weights": "per_step: 4 weights are cast once a window, instead of up to 2 times",
        "waits for the device": "once a window, since Python decides whether SGD steps, which "
        "fused=True leaves to the device",
        "loss scaling": "dynamic, scale 4",
        "steps skipped": "1 of the last 2",
        "skipped at update 2": "scale 8, 0.weight (NaN)",
    }
    assert "Training" in str(found)
    assert "## Training" in found.to_markdown()
    assert json.loads(found.to_json())["training"]["weights"].startswith("per_step")
    plain = nn.Linear(4, 1)
    with pytest.raises(FxampError, match="Linear is not converted, so this TrainStep trains it in FP32"):
        fxamp.report(fxamp.TrainStep(plain, None, torch.optim.SGD(plain.parameters(), lr=0.1)))


def test_of_a_train_step_it_names_what_is_cast_at_every_use() -> None:
    class Half(nn.Module):
        """One layer that is converted, one that is compiled in place."""

        def __init__(self) -> None:
            super().__init__()
            self.first = fxamp.convert(nn.Linear(4, 4), (torch.randn(2, 4),), policy="O1,dtype=bf16")
            self.second = Compiled()
            self.second.compile(backend=fxamp.backend("O1,dtype=bf16", "eager"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    why = "is compiled in place, by graphs that cast weights themselves"
    half = Half()
    step = fxamp.TrainStep(half, None, torch.optim.SGD(half.parameters(), lr=0.1), accumulate_steps=2)
    assert dict(describe(step)) | {"per use: second": why} == dict(describe(step))
    assert dict(describe(step))["weights"].startswith("per_step: 2 weights")
    wrapped = nn.Sequential(half.second)
    step = fxamp.TrainStep(wrapped, lambda o: o.mean(), torch.optim.SGD(half.parameters(), lr=0.1), accumulate_steps=2)
    step(torch.randn(2, 4))
    shown = dict(fxamp.report(step).training)
    assert (shown["weights"], shown["per use: 0"]) == ("per_use: at every use", why)
    many = nn.ModuleList(Compiled() for _ in range(7))
    for one in many:
        one.compile(backend="fxamp")
    step = fxamp.TrainStep(many, None, torch.optim.SGD(many.parameters(), lr=0.1))
    named = [text for name, text in describe(step) if name.startswith("per use")]
    assert named == [why] * 5 + ["2 more, listed in step.weights.per_use"]


def test_of_several_converted_parts_there_is_one_report_with_their_paths() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 6)
    encoder, head = (fxamp.convert(nn.Sequential(nn.Linear(6, 6), nn.GELU()), (x,), policy="O2") for _ in range(2))
    model = nn.ModuleDict({"encoder": encoder, "between": nn.Linear(6, 6), "head": head})
    plan = fxamp.plan_of(model)
    assert {d.key for d in plan.decisions} >= {"encoder.0/linear#0", "head.0/linear#0"}
    assert plan.casts == fxamp.plan_of(encoder).casts + fxamp.plan_of(head).casts
    step = fxamp.TrainStep(Chain(model), nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    assert "head.0/linear#0" in str(fxamp.report(step))


class Compiled(nn.Module):
    """A class of one's own, since torch compiles none of torch.nn in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


class Chain(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = part(x)
        return x
