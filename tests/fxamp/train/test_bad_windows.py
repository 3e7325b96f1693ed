"""Windows in which something goes wrong: a micro-batch overflows, backward raises, a scheduler is another's."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fxamp.train.step import TrainStep
from passes.contract.errors import PolicyError
from tests.support.training import BF16, WEIGHTS, X, converted, equal, loss_times, sgd, state


@pytest.mark.usefixtures("eager_and_traced")
@pytest.mark.parametrize("weights", WEIGHTS)
def test_of_four_micro_batches_the_bad_third_skips_the_window(weights: Any) -> None:
    factors = (1.0, 1.0, math.inf, 1.0)
    whole = converted()
    step = TrainStep(whole, loss_times, sgd(whole), accumulate_steps=4, weights=weights)
    before = state(whole)
    result = [step(x, f) for x, f in zip(X, factors, strict=True)][-1]
    assert (result.reason, result.kept) == ("overflow", 4)
    assert equal(before, state(whole))
    assert all(p.grad is None for p in whole.parameters())


def test_gradients_that_the_caller_clears_within_a_window_are_missed_by_name() -> None:
    model = converted()
    optimizer = sgd(model)
    step = TrainStep(model, loss_times, optimizer, accumulate_steps=4)
    before = state(model)
    step(X[0], 1.0)
    step(X[1], 1.0)
    optimizer.zero_grad()
    with pytest.raises(PolicyError, match=r"gradients of 2 of the window's 4 micro-batches were cleared .*zero_grad"):
        step(X[2], 1.0)
    assert equal(before, state(model))
    assert [step(x, 1.0).reason for x in X] == ["accumulating"] * 3 + ["stepped"]


def test_what_steps_by_hand_too_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = converted()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = TrainStep(model, loss_times, optimizer, accumulate_steps=2, scheduler=scheduler)
    for x in X:
        step(x, 1.0)
    again = copy.deepcopy(step)
    again.load_state_dict(step.state_dict())
    again(X[0], 1.0)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    for _ in range(2):
        step(X[0], 1.0)
        optimizer.step()
        step(X[1], 1.0)
        optimizer.step()  # changes nothing: the gradients are cleared
        scheduler.step()
    step(X[0], 1.0)
    assert caplog.text.count("weights that SGD trains changed within a window of 2 micro-batches") == 1
    assert caplog.text.count("StepLR stepped outside its TrainStep") == 1


def test_a_model_that_was_left_in_eval_mode_is_named_each_time(caplog: pytest.LogCaptureFixture) -> None:
    model = converted()
    step = TrainStep(model, loss_times, sgd(model))
    for mode, said in ((True, 0), (False, 1), (False, 1), (True, 1), (False, 2)):
        model.train(mode)
        step(X[0], 1.0)
        assert caplog.text.count("in eval mode: dropout is off") == said


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    model = converted()
    scheduler = torch.optim.lr_scheduler.StepLR(sgd(model), 1)
    with pytest.raises(PolicyError, match="scheduler StepLR belongs to none of the optimizers given"):
        TrainStep(model, loss_times, sgd(model), scheduler=scheduler)


@pytest.mark.usefixtures("eager_and_traced")
@pytest.mark.parametrize("weights", WEIGHTS)
def test_after_an_error_in_backward_the_masters_are_back_and_the_next_window_is_whole(weights: Any) -> None:
    model, expected = converted(BF16), converted(BF16)

    def raise_once(gradient: Tensor) -> None:
        if len(seen) == 2:
            seen.append(0)
            raise RuntimeError("in a hook")
        seen.append(0)

    seen: list[int] = []
    model.get_parameter("first.weight").register_hook(raise_once)
    step = TrainStep(model, loss_times, sgd(model), accumulate_steps=4, weights=weights)
    masters = list(model.parameters())
    for x in X[:2]:
        step(x)
    with pytest.raises(RuntimeError, match="in a hook"):
        step(X[2])
    assert all(a is b and a.grad is None for a, b in zip(masters, model.parameters(), strict=True))
    assert not step.weights.is_open
    other = TrainStep(expected, loss_times, sgd(expected), accumulate_steps=4, weights="per_use")
    assert [step(x).reason for x in X] == [other(x).reason for x in X]
    assert equal(state(model), state(expected))
