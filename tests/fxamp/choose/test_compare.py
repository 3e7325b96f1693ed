"""One table for the question which precision to train in, and one line of advice with its reason."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fxamp
from fxamp.choose import compare as module
from fxamp.choose.compare import Option, choose
from fxamp.cli.main import main
from fxamp.demo import LeNet5

CE = nn.functional.cross_entropy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS", 1.0)


X, Y = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3])


def lenet() -> Any:
    return LeNet5(), (X,)


def step() -> Any:
    model = LeNet5()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fxamp.TrainStep(fxamp.convert(model, policy="O1,dtype=bf16"), CE, optimizer), (X, Y)


def test_lenet_stays_in_fp32_and_all_is_as_before() -> None:
    torch.manual_seed(0)  # one batch is measured, and its max-pools flip
    model = LeNet5()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = fxamp.compare(model, X, Y, loss=CE)
    assert found.recommended == "FP32"
    assert found.reason.startswith("leave it in FP32")
    assert [option.name for option in found.options][:5] == ["FP32", "autocast", "O1", "O2", "O3"]
    assert (found["FP32"].casts, found["FP32"].predicted_loss) == (0, None)
    assert found["O1"].casts > 0
    assert found["O1"].saved_bytes < found["FP32"].saved_bytes
    assert found["O1"].gradient == pytest.approx(found["autocast"].gradient)
    assert 0.3 < found["O1"].gradient / (found["O1"].predicted_gradient or 1) < 3
    assert "ms a step" in str(found)
    assert "LeNet5: FP32: leave it" in found.to_markdown()
    assert json.loads(found.to_json())["options"][1]["name"] == "autocast"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_steps_that_fp16_skips_are_counted() -> None:
    model = nn.Linear(8, 4)
    found = fxamp.compare(model, torch.randn(4, 8), loss=lambda out: 30 * out.square().sum(), dtype="fp16")
    assert 5 < found["O1"].skipped <= 16
    assert found["FP32"].skipped == 0


PLAIN = Option("FP32", 0.100, 0.001, 0, 0, 10_000_000, 1e-8, 1e-7)
AUTOCAST = Option("autocast", 0.080, 0.001, 100, 9_000_000, 6_000_000, 1e-3, 0.005)
O1, O2, O3 = (replace(AUTOCAST, name=name) for name in ("O1", "O2", "O3"))


@pytest.mark.parametrize(
    ("options", "best", "why"),
    [
        ([PLAIN, AUTOCAST, replace(O1, seconds=0.070)], "O1", "70 % of the time of FP32 and 88 % of autocast's"),
        ([PLAIN, AUTOCAST, replace(O1, cast_bytes=8_000_000)], "O1", "autocast are as fast"),
        ([PLAIN, AUTOCAST, O1, replace(O2, seconds=0.060, gradient=0.009)], "O2", "1.80 times its error"),
        ([PLAIN, AUTOCAST, replace(O3, seconds=0.020, gradient=0.1)], "autocast", "80 % of the time of FP32"),
        ([PLAIN, replace(AUTOCAST, seconds=0.098)], "FP32", "leave it in FP32: the fastest option in 16 bits"),
        ([replace(PLAIN, spread=0.03), AUTOCAST], "FP32", "no difference beyond the spread of this machine"),
        ([PLAIN, replace(AUTOCAST, skipped=17)], "FP32", "no option stays finite"),
        ([PLAIN, AUTOCAST, replace(O2, seconds=0.079, gradient=0.009)], "autocast", "O2 are as fast"),
    ],
)
def test_the_fastest_near_autocasts_error_is_taken(options: list[Option], best: str, why: str) -> None:
    found, reason = choose(options)
    assert found == best
    assert why in reason


@pytest.mark.parametrize("target", ["lenet", "step"])
def test_the_command_prints_the_table(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["compare", f"{__file__}:{target}", "--dtype", "bf16"])
    out = capsys.readouterr()
    if target == "lenet":  # the loss of a model that returns logits is not known
        assert status == 2
        assert "has no loss; let TARGET return (fxamp.TrainStep(" in out.err
        return
    assert status == 0
    assert "LeNet5: " in out.out
