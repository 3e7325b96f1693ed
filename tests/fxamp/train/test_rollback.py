"""A state that is loaded brings back the policy in force, and the scaler, as they were when it was saved."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import fxamp
from fxamp.train.step import TrainStep
from fxamp.view.view import runner_of
from tests.support.training import Net, converted, loss_times

O1 = "O1,dtype=bf16"
OTHER = f"{O1},modules.first=fp32"
X = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))


def step_of(policy: str, **settings: Any) -> TrainStep:
    model = converted(policy)
    return TrainStep(model, loss_times, SGD(model.parameters(), lr=0.1), **settings)


def asked(step: TrainStep) -> str:
    return str(runner_of(step.model).graphs.asked)


def run(step: TrainStep) -> list[Tensor]:
    return [step(x).loss for x in X]


@pytest.mark.parametrize("compile", [False, "aot_eager"])
def test_a_rollback_over_a_switch_goes_on_with_the_policy_of_the_state(compile: Any) -> None:
    step = step_of(O1, compile=compile)
    step(X[0])
    before = copy.deepcopy(step.state_dict())
    expected = run(step)
    step.load_state_dict(before)
    step.switch(OTHER)
    switched = copy.deepcopy(step.state_dict())
    other = run(step)
    assert not all(map(torch.equal, other, expected))
    for state, policy, losses in ((before, O1, expected), (switched, OTHER, other), (before, O1, expected)):
        step.load_state_dict(copy.deepcopy(state))
        assert asked(step) == policy
        assert all(map(torch.equal, run(step), losses))
    assert step.switches == ()
    fresh = step_of(O1, compile=compile)
    fresh.load_state_dict(switched)
    assert (asked(fresh), fresh.switches) == (OTHER, ((1, OTHER),))
    assert all(map(torch.equal, run(fresh), other))


def test_a_rollback_over_a_switch_replays_the_plan_that_the_view_was_made_with() -> None:
    plan = fxamp.plan(Net(), (X[0],), policy=f"{O1},modules.second=fp32")
    torch.manual_seed(0)
    model = fxamp.convert(Net(), plan=plan)
    step = TrainStep(model, loss_times, SGD(model.parameters(), lr=0.1))
    before = copy.deepcopy(step.state_dict())
    expected = run(step)
    step.switch(OTHER)
    run(step)
    step.load_state_dict(before)
    assert runner_of(model).graphs.replayed == plan
    assert all(map(torch.equal, run(step), expected))


@pytest.fixture
def undecided() -> Iterator[TrainStep]:
    """A step whose low dtype is FP16 by torch's default, as on CUDA, and not known before the first call."""
    low = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.manual_seed(0)
    model = fxamp.convert(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)))
    try:
        yield TrainStep(model, loss_times, SGD(model.parameters(), lr=0.1))
    finally:
        torch.set_autocast_dtype("cpu", low)


def test_a_census_before_the_first_call_leaves_a_step_of_an_open_dtype_as_it_was(undecided: TrainStep) -> None:
    before = [p.detach().clone() for p in undecided.model.parameters()]
    assert fxamp.census(undecided, X[0])
    assert all(map(torch.equal, before, undecided.model.parameters()))
    assert (undecided.windows, undecided.steps, undecided.scaler.history) == (0, 0, ())
    assert undecided(X[0]).scale == 2.0**16


def test_the_initial_state_of_a_step_of_an_open_dtype_is_loaded_later(undecided: TrainStep) -> None:
    initial = copy.deepcopy(undecided.state_dict())
    losses = run(undecided)
    assert undecided.scaler.history
    undecided.load_state_dict(initial)
    assert all(map(torch.equal, run(undecided), losses))


def test_a_census_leaves_no_update_in_the_history_of_the_scaler() -> None:
    step = step_of("O1,dtype=fp16")
    step(X[0])
    before = step.scaler.history
    fxamp.census(step, X[0])
    assert step.scaler.history == before
