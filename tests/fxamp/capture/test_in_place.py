"""A model that is compiled in place says where its plan does not run: nothing of fxamp is called there by itself."""

import copy
import io
import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fxamp

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A layer, an early exit, and an attribute of which each value makes a graph."""

    steps = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        if x.shape[0] == 1:
            return x
        for _ in range(self.steps):
            x = torch.relu(self.a(x))
        return x


def by_compile(model: nn.Module) -> Any:
    model.compile(backend=fxamp.backend("O1,dtype=bf16", "eager"))
    return model


def by_torch(model: nn.Module) -> Any:
    return torch.compile(model, backend=fxamp.backend("O1,dtype=bf16", "eager"))


def runs_low(call: Any, model: nn.Module) -> bool:
    return not torch.equal(call(X), model.forward(X))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("fxamp") and r.levelno == logging.WARNING]


doors = pytest.mark.parametrize("door", [by_compile, by_torch])


@doors
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
def test_a_call_under_a_dispatch_mode_is_said_and_loses_the_plan_for_that_call_alone(
    door: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    model = Net()
    call = door(model)
    assert runs_low(call, model)
    assert not said(caplog)
    for _ in range(2):
        with FlopCounterMode(display=False) as mode:
            assert torch.equal(call(X), model.forward(X))
        assert mode.get_total_flops() > 0
    [line] = said(caplog)
    assert "Net: a call did not run its plan, but as written: FlopCounterMode" in line
    assert runs_low(call, model)
    assert any("FlopCounterMode" in note for note in fxamp.plan_of(call).notes)


@doors
def test_a_call_beyond_the_recompile_limit_is_said(door: Any, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    model = Net()
    call = door(model)
    with torch._dynamo.config.patch(recompile_limit=2):
        for model.steps in (1, 2):
            assert runs_low(call, model)
        assert not said(caplog)
        for model.steps in (3, 4):
            assert not runs_low(call, model)
    [line] = said(caplog)
    assert "'forward' (" in line
    assert "recompile limit" in line
    assert any("recompile limit" in note for note in fxamp.plan_of(call).notes)


@doors
def test_a_call_without_a_graph_is_said(door: Any, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    model = Net()
    call = door(model)
    call(X)
    call(X[:1])  # Dynamo gives up code of which a call has no op
    assert "left it to Python" in said(caplog)[0]
    with torch.compiler.set_stance("force_eager"), torch.autocast("cpu"):
        call(X)
    assert "under autocast: torch.compiler.set_stance('force_eager')" in said(caplog)[1]
    assert len(said(caplog)) == 2


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_a_model_compiled_in_place_is_said_not_to_be(how: str, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    model = by_compile(Net())
    model(X)
    for _ in range(2):
        if how == "deepcopy":
            made: Any = copy.deepcopy(model)
        else:
            torch.save(model, file := io.BytesIO())
            file.seek(0)
            made = torch.load(file, weights_only=False)
        assert not runs_low(made, made)
    [line] = said(caplog)
    assert "Net" in line
    assert "compile" in line
    by_compile(made)
    assert runs_low(made, made)
    assert made.state_dict().keys() == model.state_dict().keys()


def test_a_copy_for_fxamps_own_use_and_the_copy_of_what_torch_compile_returns_are_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch._dynamo.reset()
    model = Net()
    call = by_torch(model)
    call(X)
    made = copy.deepcopy(call)
    assert runs_low(made, made._orig_mod)
    inner = nn.Sequential(by_compile(Net()))
    inner[0](X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxamp.convert(inner, (X,))
    assert not said(caplog)
