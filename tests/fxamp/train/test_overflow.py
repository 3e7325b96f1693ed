"""Averages of weights, optimizers with closures, penalties, several losses."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxamp
from fxamp.train.step import TrainStep
from fxamp.train.window import close_window
from passes.contract.errors import PolicyError
from tests.support.small import loss_of as loss_times
from tests.support.small import weights_of as weights

X = torch.randn(8, 4, 4, generator=torch.Generator().manual_seed(0))  # micro-batches of 4 rows


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


# ------------------------------------------------------------------------------------- averages of the weights


@pytest.mark.usefixtures("eager_and_traced")
def test_an_average_follows_the_steps_that_were_taken() -> None:
    model = make_model()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    swa = AveragedModel(model)
    step = TrainStep(model, loss_times, SGD(model.parameters(), lr=0.5), scaler=8.0, ema=[ema, swa])
    expected = AveragedModel(copy.deepcopy(model), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for factor in (1.0, math.inf, 1.0, math.nan, 1.0):
        if step(X[0], factor).stepped:
            expected.update_parameters(model)
    assert int(ema.n_averaged) == int(swa.n_averaged) == 3
    assert all(map(torch.equal, ema.parameters(), expected.parameters()))


@pytest.mark.usefixtures("eager_and_traced")
def test_an_average_of_the_original_follows_its_conversion() -> None:
    model = make_model()
    converted = fxamp.convert(model, (X[0],), policy="O1,dtype=bf16")
    ema = AveragedModel(model)
    step = TrainStep(converted, loss_times, SGD(model.parameters(), lr=0.5), ema=ema, accumulate_steps=2)
    before = weights(ema)
    step(X[0])
    assert all(map(torch.equal, before, weights(ema)))
    step(X[1])
    assert all(map(torch.equal, weights(ema.module), weights(model)))


def test_an_average_of_another_model_is_refused() -> None:
    model = make_model()
    with pytest.raises(PolicyError, match=r"averages another model: '(weight|bias)' is not the same"):
        TrainStep(model, None, SGD(model.parameters(), lr=0.1), ema=AveragedModel(nn.Linear(4, 2, bias=False)))
    with pytest.raises(PolicyError, match="AveragedModel or a list of them, got Linear"):
        TrainStep(model, None, SGD(model.parameters(), lr=0.1), ema=model)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- closures


def fit_by_hand(model: nn.Module, steps: int, accumulate: int) -> None:
    optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for x in X[:accumulate]:
            loss = loss_times(model(x)) / accumulate
            loss.backward()
            total += loss.detach()
        return total

    for _ in range(steps):
        optimizer.step(closure)


@pytest.mark.parametrize("scaler", [None, 1024.0])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_lbfgs_trains_as_in_a_loop_by_hand(accumulate: int, scaler: float | None) -> None:
    model, other = make_model(), make_model()
    step = TrainStep(
        model, loss_times, LBFGS(model.parameters(), lr=0.5, max_iter=4), accumulate_steps=accumulate, scaler=scaler
    )
    for _ in range(3):
        results = [step(x) for x in X[:accumulate]]
    fit_by_hand(other, 3, accumulate)
    assert results[-1].stepped
    assert all(map(torch.equal, weights(model), weights(other)))  # a power of two as scale rounds nothing


def test_an_overflow_in_any_evaluation_takes_back_the_whole_step() -> None:
    model, calls, scaler = make_model(), [-100], fxamp.LossScaler(init_scale=8.0)

    def loss(output: Tensor) -> Tensor:
        calls[0] += 1
        return loss_times(output, math.inf if calls[0] == 5 else 1.0)

    step = TrainStep(model, loss, LBFGS(model.parameters(), lr=0.5, max_iter=4), scaler=scaler)
    step(X[0])  # one evaluation of its own, and some of the optimizer's
    before, state = weights(model), copy.deepcopy(step.optimizers[0].state_dict())
    calls[0] = 2
    result = step(X[0])
    assert (result.reason, step.scaler.get_scale()) == ("overflow", 4.0)
    assert all(map(torch.equal, before, weights(model)))
    assert str(step.optimizers[0].state_dict()) == str(state)
    assert step(X[0]).stepped


def test_what_has_no_meaning_with_a_closure_is_refused() -> None:
    model = make_model()
    lbfgs = LBFGS([model.weight])
    with pytest.raises(PolicyError, match=r"LBFGS evaluates the loss several times.*max_grad_norm"):
        TrainStep(model, loss_times, lbfgs, max_grad_norm=1.0)
    with pytest.raises(PolicyError, match="another optimizer"):
        TrainStep(model, loss_times, [lbfgs, SGD([model.bias], lr=0.1)])
    step = TrainStep(model, loss_times, LBFGS(model.parameters()))
    with pytest.raises(PolicyError, match="LBFGS runs the window again itself, without weights"):
        step(X[0], weight=2.0)
    with pytest.raises(PolicyError, match="LBFGS runs the window again itself, which takes a loss_fn"):
        step.backward(model(X[0]).sum())
    assert step(X[0]).stepped


def test_a_two_step_optimizer_is_a_loop_on_a_loss_scaler() -> None:
    """Sharpness-aware minimization: a step up along the gradient, and from there the gradient to step down by."""
    results = []
    for init_scale in (1.0, 1024.0):
        model, scaler = make_model(), fxamp.LossScaler("cpu", init_scale=init_scale)
        optimizer = SGD(model.parameters(), lr=0.5)
        for _ in range(5):
            up = scaler.grad(loss_times(model(X[0])), list(model.parameters()))
            start = weights(model)
            with torch.no_grad():
                for p, g in zip(model.parameters(), up, strict=True):
                    p.add_(g, alpha=0.05)
            scaler.scale(loss_times(model(X[0]))).backward()
            with torch.no_grad():
                for p, before in zip(model.parameters(), start, strict=True):
                    p.copy_(before)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(weights(model))
    assert all(map(torch.equal, *results))


# ------------------------------------------------------------------------------------- penalties, several losses


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.default_case(policy="O2,dtype=bf16")
@pytest.mark.parametrize("policy", ["O1,dtype=fp16", "O2,dtype=bf16"])
def test_a_gradient_penalty_is_the_same_at_every_scale_and_near_that_of_fp32(policy: str) -> None:
    torch.manual_seed(0)
    critic = Critic()
    penalties, gradients = [], []
    for model, scale in ((fxamp.convert(critic, (X[0],), policy=policy), s) for s in (1.0, 1024.0)):
        scaler = fxamp.LossScaler("cpu", init_scale=scale)
        x = X[0].clone().requires_grad_()
        (found,) = scaler.grad(model(x).sum(), x, create_graph=True)
        penalty = (found.norm(dim=1) - 1).square().mean()
        optimizer = Adam(critic.parameters())
        scaler.scale(penalty).backward()
        scaler.unscale_(optimizer)
        penalties.append(penalty.detach())
        gradients.append([p.grad for p in critic.parameters() if p.grad is not None])
        optimizer.zero_grad()
    x = X[0].clone().requires_grad_()
    (exact,) = torch.autograd.grad(critic(x).sum(), x)
    torch.testing.assert_close(penalties[1], (exact.norm(dim=1) - 1).square().mean(), rtol=0.05, atol=0.0)
    torch.testing.assert_close(penalties[0], penalties[1], rtol=0.02, atol=0.0)
    assert len(gradients[1]) == len(gradients[0]) == 5  # the last bias has no part in it
    assert all(g.isfinite().all() for g in gradients[1])


def test_a_penalty_within_a_train_step_uses_its_scaler() -> None:
    torch.manual_seed(0)
    critic = Critic()
    model = fxamp.convert(critic, (X[0],), policy="O1,dtype=bf16")
    grads = []
    for scale in (1.0, 1024.0):
        scaler = fxamp.LossScaler("cpu", init_scale=scale)

        def loss(output: Tensor, x: Tensor, scaler: fxamp.LossScaler = scaler) -> Tensor:
            (found,) = scaler.grad(output.sum(), x, create_graph=True)
            return output.mean() + found.square().sum()

        step = TrainStep(
            model, loss, SGD(critic.parameters(), lr=0.1), scaler=scaler, accumulate_steps=2, weights="per_step"
        )
        x = X[0].clone().requires_grad_()
        step(x, x)
        grads.append([p.grad / scale for p in critic.parameters() if p.grad is not None])
        close_window(step)
    assert len(grads[0]) == 6
    assert all(map(torch.equal, *grads))


def test_several_losses_each_with_a_step_and_a_scaler_do_not_disturb_each_other() -> None:
    torch.manual_seed(0)
    maker, critic = nn.Linear(4, 4), Critic()
    for_critic = TrainStep(
        critic, lambda o, t: F.mse_loss(o, t), SGD(critic.parameters(), lr=0.1), scaler=fxamp.LossScaler(init_scale=8.0)
    )
    both = nn.Sequential(maker, critic)
    for_maker = TrainStep(
        both, lambda o: o.mean(), SGD(maker.parameters(), lr=0.1), scaler=fxamp.LossScaler(init_scale=2.0)
    )
    assert for_critic(X[0], torch.full((4, 1), math.inf)).skipped
    before = weights(critic)
    assert for_maker(X[0]).stepped
    assert (for_critic.scaler.get_scale(), for_maker.scaler.get_scale()) == (4.0, 2.0)
    assert all(map(torch.equal, before, weights(critic)))
    assert all(p.grad is None for p in both.parameters())  # or the critic would be trained on the maker's loss
