"""`fxamp check --run` runs a step of its target, and fails where what ran is not what was planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxamp.cli.main import main

TARGETS = """
import torch
from torch import nn

import fxamp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, scale=None):
        x = self.down(self.up(x).relu())
        return x if scale is None else x * scale


X, Y = torch.randn(3, 8), torch.tensor([0, 1, 2])


def model():
    return Net(), (X,)


def named():
    return Net(), (X,), {"scale": torch.ones(4)}


def alone():
    return Net()


def step(loss=nn.functional.cross_entropy):
    model = Net()
    view = fxamp.convert(model, policy="O2,dtype=bf16")
    return fxamp.TrainStep(view, loss, torch.optim.SGD(model.parameters(), 0.1)), (X, Y)


def wrong():
    made = []
    found, batch = step(lambda out, y: nn.functional.cross_entropy(out, y) + made[0].up(X).sum())
    made.append(found.model)
    return found, batch


def unconverted():
    model = Net()
    return fxamp.TrainStep(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.1)), (X, Y)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(TARGETS)
    return tmp_path


@pytest.mark.parametrize("name", ["model", "named", "step"])
def test_a_target_that_runs_as_planned_passes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--here", "--run", f"net.py:{name}"]) == 0
    assert "ran as planned" in capsys.readouterr().out


def test_what_does_not_run_as_planned_fails_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--here", "--run", "net.py:wrong"]) == 1
    out = capsys.readouterr().out
    assert "2 differences in what ran" in out
    assert "module up: ran addmm in float32" in out
    assert main(["check", "--here", "--run", "net.py:wrong", "--output-format", "github", "--exit-zero"]) == 0
    assert "::error::net.py%3Awrong" in capsys.readouterr().out.replace("net.py:wrong", "net.py%3Awrong")


def test_what_cannot_be_run_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--here", "--run", "net.py:alone"]) == 2
    assert "needs a batch" in capsys.readouterr().err
    assert main(["check", "--here", "--run", "net.py:unconverted"]) == 2
    assert "nothing of the target is converted" in capsys.readouterr().err
    assert main(["check", "--here", "--run", "net.py:step", "--policy", "O1"]) == 2
    assert "its own policy" in capsys.readouterr().err
    assert main(["check", "--here", "--run", "net.py:model", "--device", "cuda"]) == 2
    assert "leave out --device" in capsys.readouterr().err


def test_a_target_of_pyproject_runs_a_step(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = '[tool.fxamp.targets.net]\ntarget = "net.py:wrong"\nrun = true\n'
    Path("pyproject.toml").write_text(table)
    assert main(["check", "--output-format", "json"]) == 1
    (outcome,) = json.loads(capsys.readouterr().out)
    assert any("module up" in text for text in outcome["ran"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('policy = "autocast,dtype=bf16"\ncensus = "c.json"', "net: ran as in c.json; no plan file is configured"),
        ('budget = ["casts=50"]', "net: within its budgets; no plan file is configured"),
        ("run = true", "net: ran as planned; no plan file is configured"),
        ('plan = "p.json"\ncensus = "c.json"\npolicy = "O1,dtype=bf16"', "net: as planned and ran as in c.json"),
        ('budget = ["casts=50"]\ncensus = "c.json"', "net: within its budgets, ran as in c.json; no plan file is "
         "configured"),
    ],
)  # fmt: skip
def test_the_gate_says_what_it_compared(settings: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("pyproject.toml").write_text(f'[tool.fxamp.targets.net]\ntarget = "net.py:model"\n{settings}\n')
    words = ["check", "--here"]
    assert main([*words, "--update"]) == 0
    capsys.readouterr()
    assert main([*words, "--output=text", "--output=junit=out.xml"]) == 0
    assert capsys.readouterr().out == f"{said}\n"
    assert ('name="plan"' in Path("out.xml").read_text()) == ("plan =" in settings)
