"""What goes wrong in loops written by hand on autocast and GradScaler, in a TrainStep of a converted model."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxamp
from fxamp.train.step import TrainStep
from passes.contract.errors import PolicyError, ScaleCollapseError

X = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))
FP16, BF16 = "O1,dtype=fp16", "O2,dtype=bf16"
WEIGHTS = ("per_use", "per_step")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.norm(self.first(x))))


@functools.cache
def _converted(kind: Callable[[], nn.Module], policy: str) -> fxamp.ConvertedModule:
    torch.manual_seed(0)
    return fxamp.convert(kind(), (X[0],), policy=policy)


def converted(policy: str = FP16, kind: Callable[[], nn.Module] = Net) -> fxamp.ConvertedModule:
    return copy.deepcopy(_converted(kind, policy))


def loss_times(output: Tensor, factor: float = 1.0) -> Tensor:
    return output.float().square().mean() * factor


def state(model: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)


# ------------------------------------------------------------------------------------- the loss scale


def test_a_loss_that_stays_nan_ends_by_name_and_never_with_a_scale_below_one() -> None:
    model = converted()
    step = TrainStep(model, loss_times, sgd(model))
    before, raised = state(model), []
    for call in range(40):
        try:
            step(X[0], math.nan)
        except ScaleCollapseError as error:
            raised.append((call, str(error)))
        assert step.scaler.get_scale() >= 1.0
    assert [call for call, _ in raised] == list(range(19, 40))
    assert all("first.weight (NaN)" in message and "look for bad data" in message for _, message in raised)
    assert equal(before, state(model))
    assert step(X[0]).stepped


def test_a_tiny_loss_lets_the_scale_grow_to_its_ceiling_and_no_further() -> None:
    model = converted()
    scaler = fxamp.LossScaler(growth_interval=1, min_scale=1.0, max_scale=2.0**24, max_skips=20)
    step = TrainStep(model, loss_times, sgd(model), scaler=scaler)
    scales = [step(X[0], 1e-30).scale for _ in range(300)]
    assert max(scales) == scales[-1] == 2.0**24
    assert all(p.isfinite().all() for p in model.parameters())


# ------------------------------------------------------------------------------------- low parameters


class Adapted(nn.Module):
    """A frozen base of 16 bits with an adapter of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 2).to(torch.float16).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.up(self.down(x))


def test_adapters_train_under_loss_scaling_beside_a_frozen_low_base() -> None:
    results = []
    for weights in WEIGHTS:
        model = converted(FP16, Adapted)
        base = state(model.get_submodule("base"))
        trained = [p for p in model.parameters() if p.requires_grad]
        before = [p.detach().clone() for p in trained]
        step = TrainStep(model, loss_times, AdamW(trained, lr=0.1), accumulate_steps=2, weights=weights)  # type: ignore[arg-type]
        assert [step(x).reason for x in X] == ["accumulating", "stepped"] * 2
        assert all(p.dtype == torch.float32 and not torch.equal(p, b) for p, b in zip(trained, before, strict=True))
        assert equal(base, state(model.get_submodule("base")))
        results.append(state(model))
    assert equal(*results)


# ------------------------------------------------------------------------------------- round trips of the author's


class RoundTrip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.layer.weight).to(torch.bfloat16).float().sigmoid() + self.layer(x)


def test_rounding_that_the_author_wrote_stays_where_weights_are_kept() -> None:
    gradients = []
    for weights in WEIGHTS:
        model = converted("O1,dtype=bf16", RoundTrip)
        plain = RoundTrip()
        plain.load_state_dict(model.state_dict())
        step = TrainStep(model, loss_times, sgd(model), accumulate_steps=4, weights=weights)  # type: ignore[arg-type]
        for x in X[:2]:
            with torch.autocast("cpu", torch.bfloat16):
                expected = loss_times(plain(x))
            assert torch.equal(step(x).loss, expected)
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert equal(*gradients)


# ------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("weights", WEIGHTS)
def test_of_four_micro_batches_the_bad_third_skips_the_window_or_itself(weights: Any) -> None:
    factors = (1.0, 1.0, math.inf, 1.0)
    whole, others, by_hand = converted(), converted(), converted()
    step = TrainStep(whole, loss_times, sgd(whole), accumulate_steps=4, weights=weights)
    before = state(whole)
    result = [step(x, f) for x, f in zip(X, factors, strict=True)][-1]
    assert (result.reason, result.kept) == ("overflow", 4)
    assert equal(before, state(whole))
    assert all(p.grad is None for p in whole.parameters())
    step = TrainStep(
        others, loss_times, sgd(others), accumulate_steps=4, weights=weights, on_overflow="skip_microbatch"
    )
    result = [step(x, f) for x, f in zip(X, factors, strict=True)][-1]
    assert (result.reason, result.kept, step.scaler.get_scale()) == ("stepped", 3, 2.0**15)
    for x in (X[0], X[1], X[3]):
        (loss_times(by_hand(x)) / 4 * 2.0**16).backward()  # a third would round otherwise in FP16
    with torch.no_grad():
        for p in by_hand.parameters():
            assert p.grad is not None
            p.sub_(p.grad * (4 / 3) / 2.0**16, alpha=0.1)
    for ours, theirs in zip(others.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------------------------- penalties, closures


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("policy", [FP16, BF16])
def test_a_critic_with_norms_and_a_gradient_penalty_trains_the_same_with_weights_kept(policy: str) -> None:
    results = []
    for weights in WEIGHTS:
        model = converted(policy, Critic)
        scaler = fxamp.LossScaler("cpu", init_scale=64.0)

        def loss(scores: Tensor, real: Tensor, model: nn.Module = model, scaler: Any = scaler) -> Tensor:
            mixed = (real * 0.5).requires_grad_()
            (slope,) = scaler.grad(model(mixed).sum(), mixed, create_graph=True)
            return scores.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

        step = TrainStep(model, loss, sgd(model), scaler=scaler, accumulate_steps=2, weights=weights)  # type: ignore[arg-type]
        batches = torch.randn(4, 32, 6, generator=torch.Generator().manual_seed(0))  # fewer make batch norm steep
        first = step(batches[0], batches[0])
        assert all(p.grad is not None for p in model.parameters())
        assert [step(x, x).reason for x in batches[1:]] == ["stepped", "accumulating", "stepped"]
        results.append([first.loss, *state(model)])
    assert equal(*results)


def test_a_closure_runs_a_window_again_with_weights_kept() -> None:
    results = []
    for weights in WEIGHTS:
        model = converted(BF16)
        optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=4)
        step = TrainStep(model, loss_times, optimizer, accumulate_steps=2, weights=weights)  # type: ignore[arg-type]
        losses = [step(x).loss for x in X]
        assert not any(cast._low is not None for cast in step.weights.casts)
        results.append([*losses, *state(model)])
    assert equal(*results)


# ------------------------------------------------------------------------------------- averages, and who shares weights


def _swapped_in(model: nn.Module, ema: AveragedModel) -> None:
    with torch.no_grad():
        for p, average in zip(model.parameters(), ema.module.parameters(), strict=True):
            p.copy_(average)


def _swapped_by_assignment(model: nn.Module, ema: AveragedModel) -> None:
    for p, average in zip(model.parameters(), ema.module.parameters(), strict=True):
        p.data = average.data


@pytest.mark.parametrize("swap", [_swapped_in, _swapped_by_assignment])
@pytest.mark.parametrize("at", [2, 3])
def test_an_average_put_in_the_place_of_the_weights_for_a_while_is_seen(
    at: int, swap: Callable[[nn.Module, AveragedModel], None]
) -> None:
    results = []
    for weights in WEIGHTS:
        model = converted(BF16)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        step = TrainStep(model, loss_times, sgd(model), accumulate_steps=2, ema=ema, weights=weights)  # type: ignore[arg-type]
        losses = []
        for index, x in enumerate([*X, *X]):
            if index == at:
                mine = [p.detach().clone() for p in model.parameters()]
                swap(model, ema)
                losses.append(step(x).loss)
                for p, before in zip(model.parameters(), mine, strict=True):
                    p.data = before
            else:
                losses.append(step(x).loss)
        results.append([*losses, *state(model), *state(ema)])
    assert equal(*results)


def test_a_teacher_by_functional_call_in_the_loss_is_not_disturbed_and_does_not_disturb() -> None:
    results = []
    for weights in WEIGHTS:
        model = converted(BF16)
        teacher = {name: nn.Parameter(p.detach() * 0.9) for name, p in model.named_parameters()}

        def loss(out: Tensor, x: Tensor, model: nn.Module = model, teacher: Any = teacher) -> Tensor:
            with torch.no_grad():
                wanted = torch.func.functional_call(model, teacher, (x,))
            return F.mse_loss(out, wanted) + F.mse_loss(model(x * 0.5), wanted)

        step = TrainStep(model, loss, sgd(model), accumulate_steps=2, weights=weights)  # type: ignore[arg-type]
        results.append([*(step(x, x).loss for x in X), *state(model)])
        assert all(t.grad is None for t in teacher.values())
    assert equal(*results)


# ------------------------------------------------------------------------------------- refused, and nothing changed


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    model = converted()
    scheduler = torch.optim.lr_scheduler.StepLR(sgd(model), 1)
    with pytest.raises(PolicyError, match="scheduler StepLR belongs to none of the optimizers given"):
        TrainStep(model, loss_times, sgd(model), scheduler=scheduler)


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
    assert not any(cast._low is not None for cast in step.weights.casts)
    other = TrainStep(expected, loss_times, sgd(expected), accumulate_steps=4, weights="per_use")
    assert [step(x).reason for x in X] == [other(x).reason for x in X]
    assert equal(state(model), state(expected))
