"""A model whose low weights are kept for a window trains as one that casts them at every use, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxamp
from fxamp.train.step import TrainStep
from tests.support.training import BF16, FP16, WEIGHTS, X, converted, equal, loss_times, sgd, state


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


class RoundTrip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.layer.weight).to(torch.bfloat16).float().sigmoid() + self.layer(x)


@pytest.mark.usefixtures("eager_and_traced")
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


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.default_case(policy="O1,dtype=fp16")
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
        assert not step.weights.is_open
        results.append([*losses, *state(model)])
    assert equal(*results)


def _swapped_in(model: nn.Module, ema: AveragedModel) -> None:
    with torch.no_grad():
        for p, average in zip(model.parameters(), ema.module.parameters(), strict=True):
            p.copy_(average)


def _swapped_by_assignment(model: nn.Module, ema: AveragedModel) -> None:
    for p, average in zip(model.parameters(), ema.module.parameters(), strict=True):
        p.data = average.data


@pytest.mark.usefixtures("eager_and_traced")
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


class Distilled(nn.Module):
    """A student that calls its teacher first, by other weights."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student = student
        self.teacher = {name: p.detach() * 0.5 for name, p in student.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = torch.func.functional_call(self.student, self.teacher, (x,))
        return F.mse_loss(self.student(x), wanted)


@pytest.mark.usefixtures("eager_and_traced")
def test_a_teacher_by_functional_call_before_the_student_has_its_own_weights() -> None:
    results = []
    for weights in WEIGHTS:
        model = Distilled(converted(BF16))
        step = TrainStep(model, torch.mean, sgd(model), accumulate_steps=2, weights=weights)  # type: ignore[arg-type]
        results.append([*(step(x).loss for x in X), *state(model)])
    assert equal(*results)


@pytest.mark.usefixtures("eager_and_traced")
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


class Clamped(nn.Module):
    """Writes to a weight before it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.l.weight.clamp_(-0.05, 0.05)
        return self.l(x)


class Momentum(nn.Module):
    """Has a teacher that follows the layer, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.teacher = nn.Linear(6, 2), nn.Linear(6, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, taught in zip(self.l.parameters(), self.teacher.parameters(), strict=True):
                taught.data.mul_(0.5).add_(mine.data, alpha=0.5)
            told = self.teacher(x)
        return self.l(x) - told


class Renormed(nn.Module):
    """Has an embedding that writes to the weight of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.l, self.head = nn.Embedding(9, 6, max_norm=0.5), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(torch.arange(len(x))) + self.l(x))


@pytest.mark.parametrize("compile", [False, "aot_eager"])
@pytest.mark.parametrize("make", [Clamped, Momentum, Renormed])
def test_a_weight_that_forward_writes_is_cast_as_it_is_then(make: Callable[[], nn.Module], compile: Any) -> None:
    def loss(t: Tensor) -> Tensor:
        return t.float().square().mean()

    found = []
    for weights in ("hand", "auto", "per_use"):
        torch.manual_seed(0)
        model = make()
        optimizer = sgd(model)
        losses = []
        if weights != "hand":
            view = fxamp.convert(model, policy="O1,dtype=bf16")
            step = TrainStep(view, loss, optimizer, accumulate_steps=2, weights=weights, compile=compile)  # type: ignore[arg-type]
            losses = [step(x).loss.item() for x in X]
        else:
            for i, x in enumerate(X):
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(x)
                (loss(output) / 2).backward()
                losses.append(loss(output).item())
                if i % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        found.append(losses)
    assert found[0] == found[1] == found[2]
