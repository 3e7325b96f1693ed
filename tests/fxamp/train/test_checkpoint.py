"""A run that was stopped anywhere and resumed is bit-equal to one that was not; what does not fit is refused."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

import fxamp
from fxamp.train.step import TrainStep
from passes.contract.errors import PolicyError
from tests.support.helpers import saved
from tests.support.processes import in_another_process
from tests.support.small import loss_of as loss_times

X = torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(0))
FACTORS = [1.0, 0.5, math.inf, 1.0, 1.0, 2.0, 0.25, 1.0, 1.0, math.nan, 1.0, 1.0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.first(x).relu()))


@functools.cache
def converted(policy: str) -> Any:
    return fxamp.convert(Net(), (X[0],), policy=policy)


def build(policy: str = "O1,dtype=bf16", seed: int = 0, **settings: Any) -> TrainStep:
    model = copy.deepcopy(converted(policy))
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(-0.5, 0.5)
    first, last = model.get_submodule("first"), model.get_submodule("last")
    optimizers = [AdamW(first.parameters(), lr=0.05), SGD(last.parameters(), lr=0.1, momentum=0.9)]
    settings = {
        "scaler": fxamp.LossScaler(init_scale=8.0, growth_interval=2, max_skips=3), "accumulate_steps": 3,
        "max_grad_norm": 1.0, "scheduler": [StepLR(o, 2, 0.5) for o in optimizers], "ema": AveragedModel(model),
        **settings,
    }  # fmt: skip
    return TrainStep(model, loss_times, optimizers, **settings)


through_a_file = functools.partial(saved, weights_only=True)


def test_the_options_of_a_step_are_one_value_which_its_state_has_whole() -> None:
    step = build(max_skips=7, check_finite=False, on_gradients=lambda params: None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.options.max_skips = 8  # type: ignore[misc]
    with pytest.raises(AttributeError):
        step.accumulate_steps = 8
    kept = through_a_file(step.state_dict())["options"]
    assert list(kept) == [field.name for field in dataclasses.fields(step.options)]
    assert (kept["max_skips"], kept["check_finite"], kept["optimizers"]) == (7, False, ["AdamW", "SGD"])
    assert (kept["scaler"], kept["on_gradients"], kept["compile"]) == ("LossScaler", "function", None)


def tensors_of(step: TrainStep) -> list[Tensor]:
    return [*step.model.parameters(), *step.averages[0].parameters()]


@pytest.mark.usefixtures("eager_and_traced")
@pytest.mark.parametrize("policy", ["O1,dtype=fp16", pytest.param("O2,dtype=bf16", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("stop", [3, 4, 5, 6])
def test_a_run_stopped_anywhere_goes_on_bit_for_bit(stop: int, policy: str) -> None:
    step = build(policy)
    torch.manual_seed(7)  # for dropout
    for x, factor in zip(X[:stop], FACTORS, strict=False):
        step(x, factor)
    saved = through_a_file(step.state_dict())
    expected = [step(x, factor) for x, factor in zip(X[stop:], FACTORS[stop:], strict=True)]
    resumed = build(policy, seed=1)
    resumed.load_state_dict(saved)
    got = [resumed(x, factor) for x, factor in zip(X[stop:], FACTORS[stop:], strict=True)]
    assert [(r.reason, r.scale, r.kept) for r in got] == [(r.reason, r.scale, r.kept) for r in expected]
    assert all(
        torch.equal(a.loss, b.loss) or (a.loss.isnan() and b.loss.isnan()) for a, b in zip(got, expected, strict=True)
    )
    assert all(map(torch.equal, tensors_of(resumed), tensors_of(step)))
    assert resumed.scaler.state_dict() == step.scaler.state_dict()
    assert (resumed.windows, step.windows) == (4, 4)
    assert [s.last_epoch for s in resumed.schedulers] == [s.last_epoch for s in step.schedulers]


class Tempered(nn.Module):
    """A loss with a parameter and a buffer of its own, and the model, which is saved without it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor
        self.model = model

    def forward(self, output: Tensor, factor: float) -> Tensor:
        self.calls += 1
        return (output * self.temperature).square().mean() * factor + self.calls * self.temperature * 0.01


def build_with_a_loss(as_module: bool) -> tuple[TrainStep, list[Tensor]]:
    model = copy.deepcopy(converted("O1,dtype=bf16")).eval()
    loss = Tempered(model)
    step = TrainStep(
        model, loss if as_module else lambda output, factor: loss(output, factor),
        [SGD(model.parameters(), lr=0.1), AdamW([loss.temperature], lr=0.1)], accumulate_steps=2,
    )  # fmt: skip
    shown: list[Tensor] = [*model.parameters(), loss.temperature]
    return step, [*shown, loss.calls] if as_module else shown


@pytest.mark.parametrize("as_module", [True, False])
@pytest.mark.parametrize("by", ["state_dict", "save_checkpoint"])
def test_what_is_trained_beside_the_model_goes_on_bit_for_bit(by: str, as_module: bool, tmp_path: Path) -> None:
    stop = 3 if by == "state_dict" and as_module else 4  # a loss that nobody knows of keeps a buffer to itself
    step, expected = build_with_a_loss(as_module)
    for x in X[:stop]:
        step(x, 1.0)
    resumed, got = build_with_a_loss(as_module)
    if by == "state_dict":
        resumed.load_state_dict(through_a_file(step.state_dict()))
    else:
        fxamp.save_checkpoint(step, tmp_path)
        fxamp.load_checkpoint(resumed, tmp_path)
    if as_module:
        for x in X[stop:]:
            assert torch.equal(step(x, 1.0).loss, resumed(x, 1.0).loss)
    assert expected[-1] != 1.0
    assert all(map(torch.equal, got, expected))


def test_the_state_of_another_loss_is_refused() -> None:
    step, before = build_with_a_loss(True)
    saved = step.state_dict()
    assert saved["beside"].keys() == {"loss_fn.temperature", "loss_fn.calls"}
    del saved["beside"]["loss_fn.calls"]
    with pytest.raises(
        PolicyError, match=r"another model: what is trained or kept outside the model differs at 'loss_fn\.calls'"
    ):
        step.load_state_dict(saved)
    assert all(map(torch.equal, before, build_with_a_loss(True)[1]))


def test_a_scale_given_for_a_window_is_kept_with_it() -> None:
    step = build()
    step(X[0], 1.0, scale=64.0)
    saved = through_a_file(step.state_dict())
    resumed = build(seed=1)
    resumed.load_state_dict(saved)
    assert resumed(X[1], 1.0).scale == 64.0
    with pytest.raises(PolicyError, match=r"within a window that began with 64\.0"):
        resumed(X[1], 1.0, scale=8.0)


@pytest.mark.parametrize("scale", [None, 64.0])
def test_a_window_that_was_loaded_may_end_at_once(scale: float | None) -> None:
    step, resumed = build(), build(seed=1)
    step(X[0], 1.0, scale=scale)
    resumed.load_state_dict(through_a_file(step.state_dict()))
    ended, expected = resumed.flush(), step.flush()
    assert ended.stepped_each == expected.stepped_each == (True, True)
    assert ended.scale == expected.scale == (scale or 8.0)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(resumed), tensors_of(step), strict=True))


def test_the_run_of_one_level_goes_on_at_another() -> None:
    step = build("O1,dtype=bf16")
    step(X[0], 1.0)
    other = build("O2,dtype=bf16", seed=1)
    other.load_state_dict(through_a_file(step.state_dict()), allow=["policy"])
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(other), tensors_of(step), strict=True))
    assert other(X[1], 1.0).reason == "accumulating"


@pytest.mark.usefixtures("eager_and_traced")
def test_gradients_within_a_window_are_those_saved_and_no_others() -> None:
    step = build()
    step(X[0], 1.0)
    saved = through_a_file(step.state_dict())
    resumed = build(seed=1)
    resumed(X[5], 1.0)
    resumed(X[6], 1.0)
    resumed.load_state_dict(saved)
    for a, b in zip(step.model.parameters(), resumed.model.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


def go_on(file: str) -> None:
    """Train from a saved state to the end, and leave there what came of it."""
    step = build(seed=1)
    step.load_state_dict(torch.load(file, weights_only=True))
    for x, factor in zip(X[4:], FACTORS[4:], strict=True):
        step(x, factor)
    torch.save([t.detach() for t in tensors_of(step)], file)


def test_a_run_goes_on_in_another_process(tmp_path: Path) -> None:
    step, file = build(), str(tmp_path / "state.pt")
    for x, factor in zip(X[:4], FACTORS, strict=False):
        step(x, factor)
    torch.save(step.state_dict(), file)
    for x, factor in zip(X[4:], FACTORS[4:], strict=True):
        step(x, factor)
    in_another_process(go_on, file)
    assert all(map(torch.equal, torch.load(file), tensors_of(step)))


# ------------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accumulate_steps": 4}, "saved with accumulate_steps 4, and here it is 3"),
        ({"scaler": None}, "saved with loss scaling 'none', and here it is 'dynamic'"),
        ({"scaler": 8.0}, "saved with loss scaling 'static', and here it is 'dynamic'"),
        ({"ema": None}, "saved with ema 0, and here it is 1"),
        ({"scheduler": None}, r"saved with schedulers \[\], and here it is \['StepLR', 'StepLR'\]"),
    ],
)
def test_the_state_of_other_settings_is_refused_and_changes_nothing(settings: dict[str, Any], message: str) -> None:
    other = build(seed=1, **settings)
    other(X[0], 1.0)
    refused(build(), other.state_dict(), message)


def refused(step: TrainStep, state: Any, message: str) -> None:
    step(X[0], 1.0)
    before = copy.deepcopy(step.state_dict())
    with pytest.raises(PolicyError, match=message):
        step.load_state_dict(state)
    assert str(before) == str(step.state_dict())


def test_the_state_of_another_optimizer_or_model_is_refused_and_changes_nothing() -> None:
    def simple(model: nn.Module, kind: Any) -> TrainStep:
        return TrainStep(model, loss_times, kind(model.parameters(), lr=0.1), accumulate_steps=2)

    refused(simple(nn.Linear(4, 1), SGD), simple(nn.Linear(4, 1), AdamW).state_dict(), r"optimizers \['AdamW'\]")
    refused(simple(nn.Linear(4, 1), SGD), simple(nn.Linear(4, 2), SGD).state_dict(), "another model.* at 'weight'")
    refused(
        simple(nn.Linear(4, 1), SGD), simple(nn.Linear(4, 1, bias=False), SGD).state_dict(), r"parameters \[\[1\]\]"
    )
    renamed = simple(nn.Sequential(nn.Linear(4, 1)), SGD)
    refused(simple(nn.Linear(4, 1), SGD), renamed.state_dict(), "another model.* at 'weight'")
    refused(simple(nn.Linear(4, 1), SGD), {"epoch": 3}, "it lacks beside, ema, gradients")


@pytest.mark.parametrize("part", ["rng", "scaler", "schedulers", "optimizers"])
def test_a_window_goes_on_after_a_state_of_which_a_part_does_not_fit(part: str) -> None:
    step, alone, other = build(), build(), build(seed=1)
    for x, factor in zip(X[:4], FACTORS, strict=False):
        other(x, factor)
    state = other.state_dict()
    wrong = {"rng": {"cpu": state["rng"]["cpu"]}, "scaler": {"scale": 1.0}, "schedulers": [state["schedulers"][0], "x"]}
    state[part] = wrong.get(part, [state["optimizers"][0], {}])
    torch.manual_seed(7)
    expected = [alone(x, factor) for x, factor in zip(X[:5], FACTORS, strict=False)]
    torch.manual_seed(7)
    got = [step(x, factor) for x, factor in zip(X[:2], FACTORS, strict=False)]
    with pytest.raises(PolicyError, match="a part of the state does not fit this step"):
        step.load_state_dict(state)
    got += [step(x, factor) for x, factor in zip(X[2:5], FACTORS[2:5], strict=True)]
    assert [(r.reason, r.scale) for r in got] == [(r.reason, r.scale) for r in expected]
    assert all(map(torch.equal, tensors_of(step), tensors_of(alone)))
    assert str(step.state_dict()) == str(alone.state_dict())


def test_a_window_that_would_have_to_be_run_again_is_refused() -> None:
    def lbfgs() -> TrainStep:
        model = nn.Linear(4, 1)
        return TrainStep(model, lambda o: o.square().mean(), LBFGS(model.parameters()), accumulate_steps=2)

    step = lbfgs()
    step(X[0])
    with pytest.raises(PolicyError, match=r"micro-batches are not saved.*flush\(\)"):
        lbfgs().load_state_dict(step.state_dict())
    step.flush()
    lbfgs().load_state_dict(step.state_dict())


def test_a_state_loaded_before_a_compiled_model_is_captured_reaches_the_scaler_it_then_gets() -> None:
    def compiled() -> TrainStep:
        torch.manual_seed(0)
        model: Any = fxamp.compile(Net(), policy="O1,dtype=fp16", backend="eager")
        return TrainStep(model, loss_times, SGD(model.parameters(), lr=0.1))

    step = compiled()
    step(X[0], 1.0)
    step(X[0], math.inf)
    state = through_a_file(step.state_dict())
    resumed = compiled()
    resumed.load_state_dict(state)
    assert resumed(X[0], 1.0).reason == "stepped"
    assert resumed.scaler.get_scale() == step.scaler.get_scale() == 2.0**15
