"""The verbs that run a step: census, error, overflow, tune and compare, each with the options of its function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fxamp
from fxamp.cli.main import main
from passes.contract.plan import Plan

NET = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())


torch.manual_seed(0)
X, Y = torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])


def make():
    return Net(), (X,)


def pair():
    return Net(), (X, Y)


def keywords():
    return Net(), ({"x": X}, Y)


def large():
    model = Net()
    nn.init.constant_(model.up.weight, 1e4)
    return model, (X.abs() * 100, Y)


def step():
    import fxamp

    model = Net()
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    return fxamp.TrainStep(view, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1)), (X, Y)


def batches():
    return [(X, Y), (X + 1, Y)]


def loss(output, y):
    return F.cross_entropy(output, y)


def distance(view):
    model = Net()
    return 0.0 if "float32" in {d.colour for d in __import__("fxamp").plan_of(view).decisions} else 1.0
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET, encoding="utf-8")
    return tmp_path


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: str, status: int = 0) -> str:
        assert main(words) == status, capsys.readouterr()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("policy", "dtype", "note"),
    [
        ([], "bfloat16", "it ran under torch.autocast, in bfloat16"),
        (["--policy", "autocast,dtype=fp16"], "float16", "it ran under torch.autocast, in float16"),
        (["--policy", "FP32"], "float32", "no torch.autocast region was entered"),
        (["--policy", "O1,dtype=bf16"], "bfloat16", None),
    ],
)
def test_a_census_says_what_ran_under_what(said: Any, policy: list[str], dtype: str, note: str | None) -> None:
    data = json.loads(said("census", "net.py:pair", "--loss", "net.py:loss", *policy, "--output-format=json"))
    assert {tuple(set(row["operands"])) for row in data["ran"] if row["product"]} == {(dtype,)}
    assert (note in " ".join(data["notes"])) if note else (data["planned"] is not None)
    assert not any("mean of the float outputs" in text for text in data["notes"])  # the loss is the one given


@pytest.mark.parametrize("target", ["pair", "keywords"])
def test_inputs_and_a_target_without_a_loss_ask_for_one(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["census", f"net.py:{target}"]) == 2
    assert "returns (model, (inputs, target)): give the loss of them" in capsys.readouterr().err


def test_a_census_of_a_step_is_by_its_own_plan(said: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert "as planned: 100.0 %" in said("census", "net.py:step")
    assert main(["census", "net.py:step", "--policy", "O1"]) == 2
    assert "its own policy" in capsys.readouterr().err


def test_errors_are_predicted_and_measured(said: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--loss=net.py:loss", "--batches=net.py:batches", "--policy=O1,dtype=bf16", "--output-format=json")
    predicted, measured = (json.loads(said("error", "net.py:make", *words, *more)) for more in ([], ["--measure"]))
    assert (predicted["measured"], measured["measured"]) == (False, True)
    assert predicted["batches"] == measured["batches"] == 2
    assert main(["error", "net.py:pair", "--loss=net.py:loss", "--policy=O1,dtype=bf16", "--tolerance=1e-6"]) == 1
    assert "is above --tolerance 1e-06" in capsys.readouterr().err
    assert "nodes" in said("error", "net.py:step", "--gradients=nodes", "--output-format=json")
    assert main(["error", "net.py:step", "--gradients=no", "--measure"]) == 2


def test_an_overflow_is_named_with_its_cure(said: Any) -> None:
    found = said("overflow", "net.py:large", "--loss=net.py:loss", status=1)
    assert found.startswith("up/linear#0")
    assert "in FP32 cure it" in found
    assert said("overflow", "net.py:pair", "--loss=net.py:loss").startswith("no overflow")
    data = json.loads(said("overflow", "net.py:large", "--loss=net.py:loss", "--output-format=json", status=1))
    assert (data["where"], data["kind"]) == ("up/linear#0", "inf")


def test_a_plan_is_tuned_to_a_tolerance_or_to_a_metric(said: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = said("tune", "net.py:pair", "--loss=net.py:loss", "--tolerance=0.1", "--save-plan=tuned.json")
    assert "bytes" in text.splitlines()[0]  # what the search came to
    assert Plan.load("tuned.json").certificate["measured"] <= 0.1
    text = said("tune", "net.py:make", "--metric=net.py:distance", "--bound=0.5", "--policy=O1,dtype=bf16")
    assert "the metric is 0, at most 0.5" in text
    assert main(["tune", "net.py:make", "--metric=net.py:distance"]) == 2
    assert "go together" in capsys.readouterr().err


def test_options_are_compared(said: Any) -> None:
    data = json.loads(said("compare", "net.py:pair", "--loss=net.py:loss", "--dtype=bf16", "--output-format=json"))
    assert [option["name"] for option in data["options"]][:3] == ["FP32", "autocast", "O1"]


@pytest.mark.parametrize(("former", "verb"), [("verify", "error --measure"), ("advise", "compare")])
def test_a_former_name_works_and_says_the_present_one(
    former: str, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([former, "net.py:make", "--output-format", "none"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"fxamp: warning: `fxamp {former}` is now `fxamp {verb}`; the old name will go"
    assert "invalid choice: 'none'" in second


def test_a_census_of_a_model_that_nobody_converted_is_gated(said: Any, here: Path) -> None:
    check = ("check", "--here", "net.py:make", "--census", "kept/net.json")
    assert "wrote kept/net.json" in said(*check, "--update")
    saved = (here / "kept" / "net.json").read_text(encoding="utf-8")
    said("census", "net.py:make", "--save", "own.json")
    assert json.loads(Path("own.json").read_text())["ran"] == json.loads(saved)["ran"]
    Path("net.py").write_text(NET.replace("class Net", "# a line more\n\nclass Net"), encoding="utf-8")
    assert said(*check) == "net.py:make: ran as in kept/net.json; no plan file is configured\n"
    Path("net.py").write_text(NET.replace("(self.up(x).relu())", "(self.up(x).relu().float().exp())"), encoding="utf-8")
    text = said(*check, status=1)
    assert "net.py:13: exp ran in float32, and not at all in kept/net.json" in text
    assert text.splitlines()[-1].startswith("If this is intended, run fxamp check --update")
    said(*check, "--update")
    said(*check)


def test_a_census_under_autocast_is_not_compared_with_that_of_a_view(said: Any, capsys: Any) -> None:
    said("census", "net.py:make", "--save", "own.json")
    check = ("check", "--here", "net.py:make", "--census", "own.json")
    assert main([*check, "--policy", "O1,dtype=bf16"]) == 2
    text = capsys.readouterr().err
    assert "own.json is a census of a model that nobody converted, and what ran now is a view at O1,dtype=bf16" in text
    assert '"autocast,dtype=bf16" under torch.autocast' in text
    said(*check, "--policy", "autocast,dtype=bf16")
    said(*check, "--policy", "O1,dtype=bf16", "--update")
    said(*check, "--policy", "O1,dtype=bf16")


def test_a_loss_that_is_missing_is_no_fault_of_autocast(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "net.py:make"]) == 2
    text = capsys.readouterr().err
    assert "has no loss" in text
    assert "fails under torch.autocast" not in text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"version": 2, "name": "Net", "ran": []}', "a census of format 2, and this fxamp reads format 1"),
        ('{"version": true, "name": "Net", "ran": []}', "not a census"),
        ('{"version": 1, "name": "Net", "ran": [{"where": 3}]}', "not a census"),
        ("[]", "not a census"),
        ("{", "not JSON, or cut short"),
    ],
)
def test_a_file_that_is_no_census_is_named(text: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.json").write_text(text, encoding="utf-8")
    assert main(["check", "--here", "net.py:make", "--census=bad.json"]) == 2
    error = capsys.readouterr().err
    assert "bad.json" in error
    assert problem in error


def test_a_plan_of_autocast_is_o1(said: Any) -> None:
    check = ("check", "--here", "net.py:make", "--policy=autocast,dtype=bf16", "--plan=p.json", "--census=c.json")
    said(*check, "--update")
    assert Plan.load("p.json").policy == fxamp.Policy("O1", dtype="bf16", device="cpu")
    assert said(*check) == "net.py:make: as planned and ran as in c.json\n"
