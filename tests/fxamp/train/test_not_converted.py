"""A model that nobody converted trains in FP32: that is said once, by its name, and by its report."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import fxamp
from passes.contract.errors import FxampError

X = torch.randn(3, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu())
        return out


def step_of(model: Any, **settings: Any) -> fxamp.TrainStep:
    return fxamp.TrainStep(model, lambda out: out.square().mean(), SGD(model.parameters(), lr=0.1), **settings)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "fxamp" and r.levelno == logging.WARNING]


@pytest.mark.parametrize("settings", [{}, {"compile": "eager"}])
def test_a_model_that_is_not_converted_is_named_once(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    step = step_of(Net(), **settings)
    for _ in range(3):
        step(X)
    (message,) = said(caplog)
    assert message.startswith("fxamp: TrainStep trains Net in FP32, since it is not converted: give it what")
    with pytest.raises(FxampError, match=r"report: Net is not converted, so this TrainStep trains it in FP32"):
        fxamp.report(step)


@pytest.fixture(scope="module")
def converted() -> Any:
    return fxamp.convert(Net(), (X,), policy="O1,dtype=bf16", check=False)


def test_converted_models_and_parts_are_not(converted: Any, caplog: pytest.LogCaptureFixture) -> None:
    for model in (converted, nn.Sequential(converted), fxamp.convert(Net(), (X,), policy="O0", check=False)):
        step_of(copy.deepcopy(model))(X)
    assert said(caplog) == []


def test_nor_are_models_that_are_converted_at_their_first_call(caplog: pytest.LogCaptureFixture) -> None:
    in_place: Any = Net()
    in_place.compile(backend="fxamp", options={"policy": "O1,dtype=bf16", "backend": "eager"})
    step_of(in_place)(X)
    step_of(fxamp.compile(Net(), policy="O1,dtype=bf16", backend="eager"))(X)
    step_of(Net(), compile={"backend": "fxamp", "options": {"policy": "O1,dtype=bf16", "backend": "eager"}})(X)
    assert said(caplog) == []


def test_nor_is_a_step_under_autocast(caplog: pytest.LogCaptureFixture) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        step_of(Net())(X)
    assert said(caplog) == []


def test_one_of_torchs_own_classes_is_named_where_torch_compiles_nothing_of_it_in_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: Any = nn.Linear(4, 1)
    model.compile(backend="fxamp", options={"policy": "O1,dtype=bf16", "backend": "eager"})
    step_of(model)(X)
    named = [message.partition(",")[0] for message in said(caplog)]
    assert named == ([] if torch.__version__ >= "2.14" else ["fxamp: TrainStep trains Linear in FP32"])
