"""TrainStep is bit-equal to a loop written by hand on GradScaler, with two optimizers too."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

from fxamp.train.scaler import LossScaler
from fxamp.train.step import TrainStep

STEPS = 50
Target = tuple[Tensor, float, float]


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits  # with all of scipy: only here

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


class TwoHeads(nn.Module):
    """Two small classifiers of digits, side by side, so that one's gradients can overflow without the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        self.right = nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


def loss_fn(output: tuple[Tensor, Tensor], target: Target) -> Tensor:
    labels, left, right = target
    return F.cross_entropy(output[0], labels) * left + F.cross_entropy(output[1], labels) * right


def make_batches(count: int, *, both: bool, seed: int = 0) -> list[tuple[Tensor, Target]]:
    """Give batches of digits, whose losses overflow at random: of `both` heads at once, or of each on its own."""
    images, labels = digits()
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for index in range(count):
        chosen = slice(index * 8, index * 8 + 8)
        # 1e36 is finite until it is multiplied by the loss scale.
        left, right = (
            {0: math.inf, 1: 1e36, 2: math.nan}.get(int(i), 1.0) for i in torch.randint(12, (2,), generator=generator)
        )
        batches.append((images[chosen], (labels[chosen], left, left if both else right)))
    return batches


@dataclass
class Run:
    """What a training run left behind."""

    model: nn.Module
    scales: list[float] = field(default_factory=list)
    stepped: list[tuple[bool, ...]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)


def make_training(two: bool) -> tuple[TwoHeads, list[Optimizer], list[LRScheduler]]:
    torch.manual_seed(0)
    model = TwoHeads()
    if two:
        optimizers: list[Optimizer] = [Adam(model.left.parameters(), 0.01), SGD(model.right.parameters(), 0.1, 0.9)]
    else:
        optimizers = [Adam(model.parameters(), lr=0.01)]
    return model, optimizers, [StepLR(optimizer, 7, 0.5) for optimizer in optimizers]


def train_by_hand(
    scaler: GradScaler, batches: list[tuple[Tensor, Target]], *, two: bool, accumulate: int, clip: float | None
) -> Run:
    model, optimizers, schedulers = make_training(two)
    run = Run(model)
    for index, (x, target) in enumerate(batches):
        scaler.scale(loss_fn(model(x), target) / accumulate).backward()
        if (index + 1) % accumulate:
            continue
        if clip is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            run.norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        before = [[p.detach().clone() for p in o.param_groups[0]["params"]] for o in optimizers]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        after = [o.param_groups[0]["params"] for o in optimizers]
        run.stepped.append(tuple(not all(map(torch.equal, b, a)) for b, a in zip(before, after, strict=True)))
        for scheduler, stepped in zip(schedulers, run.stepped[-1], strict=True):
            if stepped:
                scheduler.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        run.scales.append(scaler.get_scale())
        run.rates.append([float(s.get_last_lr()[0]) for s in schedulers])
    return run


def train_with_trainstep(
    scaler: LossScaler, batches: list[tuple[Tensor, Target]], *, two: bool, accumulate: int, clip: float | None,
    compile: bool | str = False,
) -> Run:  # fmt: skip
    model, optimizers, schedulers = make_training(two)
    step = TrainStep(
        model,
        loss_fn,
        optimizers if two else optimizers[0],
        scaler=scaler,
        accumulate_steps=accumulate,
        max_grad_norm=clip,
        scheduler=schedulers if two else schedulers[0],
        compile=compile,
    )
    run = Run(model)
    for x, target in batches:
        result = step(x, target)
        if result.reason == "accumulating":
            assert result.stepped is False
            continue
        stepped = result.stepped_each
        assert result.skipped == (not all(stepped))
        assert result.reason == ("stepped" if all(stepped) else "overflow")
        assert all(p.grad is None for p in model.parameters())
        run.stepped.append(stepped)
        run.scales.append(scaler.get_scale())
        run.rates.append([float(s.get_last_lr()[0]) for s in schedulers])
        if result.grad_norm is not None:
            run.norms.append(result.grad_norm.item())
    return run


def assert_same_run(ours: Run, theirs: Run) -> None:
    assert ours.stepped == theirs.stepped
    assert ours.scales == theirs.scales
    assert ours.rates == theirs.rates
    assert str(ours.norms) == str(theirs.norms)  # as text, since NaN is not equal to itself
    for (name, a), b in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


HOW = list(itertools.product([1, 3], [(False, None), (False, 0.5), (True, None)], [False, "aot_eager"]))
EVERYDAY = [(3, (False, 0.5), "aot_eager")]


@pytest.mark.parametrize(
    ("accumulate", "two", "clip", "compile"),
    [
        pytest.param(n, *which, how, marks=() if not how or (n, which, how) in EVERYDAY else pytest.mark.matrix)
        for n, which, how in HOW
    ],
)
def test_fifty_steps_with_random_overflows_are_bit_equal_to_gradscaler(
    accumulate: int, two: bool, clip: float | None, compile: bool | str
) -> None:
    batches = make_batches(STEPS * accumulate, both=not two)
    how: dict[str, Any] = {"two": two, "accumulate": accumulate, "clip": clip}
    ours = train_with_trainstep(LossScaler(growth_interval=2), batches, **how, compile=compile)
    theirs = train_by_hand(GradScaler("cpu", growth_interval=2), batches, **how)
    assert len(ours.scales) == STEPS
    assert_same_run(ours, theirs)
    # The run was worth comparing: it has steps, skips, and a scale that both rises and falls.
    assert {flag for flags in ours.stepped for flag in flags} == {True, False}
    assert not two or {(True, False), (False, True)} <= set(ours.stepped)
    steps = [b / a for a, b in zip(ours.scales, ours.scales[1:], strict=False)]
    assert {2.0, 0.5} <= set(steps)


@pytest.mark.usefixtures("eager_and_traced")
def test_static_and_disabled_scalers_are_bit_equal_to_gradscaler() -> None:
    finite = [(x, (labels, 1.0, 1.0)) for x, (labels, _, _) in make_batches(STEPS, both=True)]
    how: dict[str, Any] = {"two": False, "accumulate": 1, "clip": 0.5}
    off = train_with_trainstep(LossScaler(enabled=False), finite, **how)
    assert_same_run(off, train_by_hand(GradScaler("cpu", enabled=False), finite, **how))
    static = train_with_trainstep(LossScaler(init_scale=1024.0, growth_interval=4, dynamic=False), finite, **how)
    assert_same_run(static, train_by_hand(GradScaler("cpu", init_scale=1024.0, growth_interval=2000), finite, **how))


@pytest.mark.usefixtures("eager_and_traced")
def test_gradscaler_state_goes_into_a_trainstep_and_back_in_mid_run() -> None:
    batches = make_batches(45, both=True)
    reference_scaler = GradScaler("cpu", growth_interval=4)
    reference = train_by_hand(reference_scaler, batches, two=False, accumulate=1, clip=None)

    model, (optimizer,), (scheduler,) = make_training(two=False)
    by_hand = GradScaler("cpu", growth_interval=4)
    step = TrainStep(model, loss_fn, optimizer, scaler=LossScaler(), scheduler=scheduler)
    scales = []
    for index, (x, target) in enumerate(batches):
        if index == 15:
            step.scaler.load_state_dict(by_hand.state_dict())
        if index == 30:
            by_hand.load_state_dict(step.scaler.state_dict())
        if 15 <= index < 30:
            step(x, target)
            scales.append(step.scaler.get_scale())
            continue
        before = weights(model)
        by_hand.scale(loss_fn(model(x), target)).backward()
        by_hand.step(optimizer)
        by_hand.update()
        if not all(map(torch.equal, before, weights(model))):
            scheduler.step()
        optimizer.zero_grad()
        scales.append(by_hand.get_scale())
    assert scales == reference.scales
    assert all(map(torch.equal, model.parameters(), reference.model.parameters()))


def test_with_clipping_an_overflow_in_one_optimizer_skips_all() -> None:
    model, optimizers, schedulers = make_training(two=True)
    step = TrainStep(model, loss_fn, optimizers, scaler=LossScaler(), max_grad_norm=1.0, scheduler=schedulers)
    (x, (labels, _, _)), *_ = make_batches(1, both=True)
    step(x, (labels, 1.0, 1.0))  # gives the optimizers momentum, which would move parameters on zero gradients
    before = weights(model)
    result = step(x, (labels, math.inf, 1.0))
    assert (result.stepped_each, result.skipped, result.reason) == ((False, False), True, "overflow")
    assert all(map(torch.equal, before, weights(model)))
    assert [s.last_epoch for s in schedulers] == [1, 1]
    assert step.scaler.get_scale() == 2.0**15


def test_an_optimizer_idle_on_odd_steps_is_no_error() -> None:
    model, optimizers, schedulers = make_training(two=True)
    step = TrainStep(
        model,
        lambda output, target: (
            F.cross_entropy(output[0], target[0]) + (F.cross_entropy(output[1], target[0]) if target[1] else 0)
        ),
        optimizers,
        scaler=LossScaler(),
        scheduler=schedulers,
    )
    images, labels = digits()
    results = [step(images[:8], (labels[:8], index % 2 == 0)) for index in range(4)]
    assert [r.stepped_each for r in results] == [(True, True), (True, False)] * 2
    assert [r.reason for r in results] == ["stepped"] * 4
    assert [s.last_epoch for s in schedulers] == [4, 2]
