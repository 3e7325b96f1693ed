"""Gradients that are not finite skip a step and count, with loss scaling and without; there is one limit of skips."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

import fxamp
from fxamp.train.step import TrainStep
from fxamp.train.window import holds_inf_or_nan
from tests.support.training import converted, equal, loss_times

BF16 = "O1,dtype=bf16"
X = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))
OPTIMIZERS: dict[str, Any] = {
    "fused": lambda ps: AdamW(ps, lr=0.01, fused=True),
    "foreach": lambda ps: AdamW(ps, lr=0.01, foreach=True),
    "for-loop": lambda ps: AdamW(ps, lr=0.01, foreach=False),
    "momentum": lambda ps: SGD(ps, lr=0.01, momentum=0.9),
    "fused momentum": lambda ps: SGD(ps, lr=0.01, momentum=0.9, fused=True),
    "LBFGS": lambda ps: LBFGS(ps, lr=0.01, max_iter=2),
}


def of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bf16_skips_a_step_whose_gradients_are_not_finite(optimizer: str, value: float) -> None:
    model = converted(BF16)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    rates = StepLR(stepper, 100)
    step = fxamp.TrainStep(model, loss_times, stepper, scheduler=rates)
    for bad_first in (True, False):
        before = of(model)
        result = step(X[0], value)
        assert (result.reason, result.stepped, result.skipped) == ("overflow", False, True), bad_first
        assert equal(before, of(model))
        assert step(X[1]).reason == "stepped"
        assert not equal(before, of(model))
    assert (step.windows, step.steps, step.skipped, rates.last_epoch) == (4, 2, 2, 2)
    clean = converted(BF16)  # a skipped step leaves no trace
    other = fxamp.TrainStep(clean, loss_times, OPTIMIZERS[optimizer](clean.parameters()))
    other(X[1])
    other(X[1])
    assert equal(of(model), of(clean))


def test_without_the_guard_an_optimizer_steps() -> None:
    model = converted(BF16)
    step = fxamp.TrainStep(model, loss_times, SGD(model.parameters(), lr=0.1), check_finite=False)
    assert step.waits == ()
    assert step(X[0], math.nan).reason == "stepped"
    assert all(bool(p.isnan().all()) for p in model.parameters())
    with pytest.raises(fxamp.PolicyError, match="check_finite must be True or False, got 1"):
        fxamp.TrainStep(model, loss_times, SGD(model.parameters(), lr=0.1), check_finite=1)  # type: ignore[arg-type]


def test_large_gradients_whose_norm_is_not_finite_are_no_reason_to_skip() -> None:
    model = converted(BF16, lambda: nn.Linear(6, 1, bias=False))
    step = fxamp.TrainStep(
        model, lambda out: out.sum() * 1e20, SGD(model.parameters(), lr=1e-30), max_grad_norm=math.inf
    )
    result = step(torch.ones(4, 6))
    assert (result.reason, float(result.grad_norm)) == ("stepped", math.inf)  # type: ignore[arg-type]


def test_a_loss_that_alone_is_not_finite_is_counted() -> None:
    model = converted(BF16)

    def shown(output: Tensor, value: float) -> Tensor:
        return loss_times(output) + value

    step = fxamp.TrainStep(model, shown, SGD(model.parameters(), lr=0.1), accumulate_steps=3)
    results = [step(x, value) for x, value in zip(X[:3], (0.0, math.inf, math.nan), strict=True)]
    assert results[-1].reason == "stepped"
    assert [r.metrics()["nonfinite_losses"] for r in results] == [0, 1, 2]


@pytest.mark.default_case(policy="O1,dtype=fp16")
@pytest.mark.parametrize("policy", [BF16, "O1,dtype=fp16"])
def test_there_is_one_limit_of_skipped_steps(policy: str) -> None:
    model = converted(policy)
    step = fxamp.TrainStep(model, loss_times, SGD(model.parameters(), lr=0.1), max_skips=3)
    for _ in range(2):
        for _ in range(2):
            assert step(X[0], math.nan).skipped
        assert step(X[0]).stepped
    for _ in range(2):
        step(X[0], math.nan)
    with pytest.raises(
        fxamp.ScaleCollapseError, match=r"3 steps in a row were skipped.*first\.weight \(NaN\)"
    ) as raised:
        step(X[0], math.nan)
    assert ("loss scale" in str(raised.value).partition("First bad")[0]) is (policy != BF16)
    assert (step.windows, step.steps, step.skipped, step.position) == (9, 2, 7, 0)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x) * factor, self.b(x)


@pytest.mark.default_case(policy="O1,dtype=fp16")
@pytest.mark.parametrize("policy", [BF16, "O1,dtype=fp16"])
def test_at_the_limit_what_stepped_is_counted_and_its_scheduler_has_stepped(policy: str) -> None:
    model = converted(policy, Two)
    a, b = (SGD(part.parameters(), lr=0.1) for part in (model.a, model.b))
    rates = StepLR(b, 100)
    average = AveragedModel(model)
    step = fxamp.TrainStep(
        model, lambda out: out[0].sum() + out[1].square().mean(), [a, b], scheduler=rates, ema=average, max_skips=3,
        scaler=None if policy == BF16 else fxamp.LossScaler(init_scale=8.0),
    )  # fmt: skip
    for _ in range(2):
        assert step((X[0], torch.tensor(math.inf))).stepped_each == (False, True)
    before = of(model.b)
    with pytest.raises(fxamp.ScaleCollapseError):
        step((X[0], torch.tensor(math.inf)))
    assert not equal(before, of(model.b))
    assert (rates.last_epoch, step.steps, step.skipped, step.windows) == (3, 3, 3, 3)
    assert int(average.n_averaged) == 3


def test_the_limit_of_a_scaler_that_is_handed_in_holds() -> None:
    model = converted("O1,dtype=fp16")
    scaler = fxamp.LossScaler(max_skips=2)
    step = fxamp.TrainStep(model, loss_times, SGD(model.parameters(), lr=0.1), scaler=scaler, max_skips=5)
    step(X[0], math.nan)
    with pytest.raises(fxamp.ScaleCollapseError, match=r"^2 steps in a row"):
        step(X[0], math.nan)


def test_rates_are_those_of_the_window_also_where_they_are_tensors() -> None:
    model = converted(BF16)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-3), foreach=False)
    step = fxamp.TrainStep(model, loss_times, optimizer, scheduler=StepLR(optimizer, 1, 0.1))
    assert [step(X[0]).metrics()["lr"] for _ in range(2)] == [pytest.approx(1e-3), pytest.approx(1e-4)]


def test_sparse_gradients_are_looked_at() -> None:
    torch.manual_seed(0)
    words = nn.Embedding(8, 4, sparse=True)
    step = TrainStep(words, lambda out, factor: out.sum() * factor, torch.optim.SparseAdam(words.parameters(), lr=0.1))
    before = words.weight.detach().clone()
    ids = torch.tensor([1, 1, 3])
    assert step(ids, torch.tensor(float("nan"))).skipped
    assert torch.equal(words.weight, before)
    assert step(ids, torch.tensor(1.0)).stepped
    assert not torch.equal(words.weight, before)


def test_ranks_without_gradients_of_their_own_look_at_none() -> None:
    assert not holds_inf_or_nan([])
    assert not holds_inf_or_nan([torch.zeros(0)])
