"""What a program does around a training step: other optimizers, hooks, averages, gradients of its own, files."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

import fxamp
from fxamp.errors import ScaleCollapseError
from fxamp.train.scaler import inverse_scale
from fxamp.train.step import TrainStep
from passes.contract.errors import PolicyError
from tests.support.helpers import Layers
from tests.support.training import BF16, FP16, Net, X, converted, equal, loss_times, sgd, state

INF = math.inf


# ------------------------------------------------------------------------------------- fused optimizers


def test_an_overflow_in_several_optimizers_is_skipped_by_a_fused_one_too() -> None:
    model = converted(FP16)
    parts = list(model.first.parameters()), [*model.norm.parameters(), *model.second.parameters()]
    optimizers = [AdamW(parts[0], fused=True), AdamW(parts[1])]
    step = TrainStep(model, loss_times, optimizers, max_grad_norm=1.0)
    step(X[0])
    before = state(model)
    result = step(X[1], INF)
    assert result.reason == "overflow"
    assert equal(state(model), before)
    assert step(X[1]).reason == "stepped"


def _trained_after_a_skip(fused: bool) -> list[Tensor]:
    model = converted(BF16)
    step = TrainStep(model, loss_times, SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused), max_grad_norm=1.0)
    junk = [torch.full_like(p, 1e20) for p in model.parameters() for _ in range(50)]
    del junk  # so that memory which is allocated next holds something
    assert step(X[0], INF).reason == "overflow"
    for x in X:
        step(x)
    return state(model)


def test_a_fused_optimizer_whose_first_step_is_skipped_has_no_momentum_from_it() -> None:
    for ours, theirs in zip(_trained_after_a_skip(True), _trained_after_a_skip(False), strict=True):
        torch.testing.assert_close(ours, theirs)


# ------------------------------------------------------------------------------------- schedulers


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda i: 0.9**i),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda i: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step()`")
def test_every_scheduler_of_torch_follows_the_steps() -> None:
    model = converted(BF16)
    for name, scheduler in SCHEDULERS.items():
        optimizer, other = sgd(model), SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        step = TrainStep(model, loss_times, optimizer, scheduler=scheduler(optimizer))
        expected = scheduler(other)
        for x in [*X, *X]:
            assert step(x).reason == "stepped", name
            other.step()
            expected.step()
            assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"], name


def test_the_schedulers_tested_are_all_that_torch_has() -> None:
    kinds = (v for n, v in vars(lr_scheduler).items() if isinstance(v, type) and n == v.__name__)
    theirs = {kind.__name__ for kind in kinds if issubclass(kind, lr_scheduler.LRScheduler)}
    assert theirs - {"LRScheduler", "_LRScheduler", "ReduceLROnPlateau"} == set(SCHEDULERS)


# ------------------------------------------------------------------------------------- averages, hooks


class WithConstant(nn.Module):
    """A model with a tensor that is neither parameter nor buffer, and with a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net, self.prior = Net(), torch.full((2,), 0.1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.prior


def test_an_average_of_the_model_itself_follows_its_view() -> None:
    torch.manual_seed(0)
    model = WithConstant()
    averages = [AveragedModel(model), AveragedModel(fxamp.convert(model, policy=BF16))]
    step = TrainStep(fxamp.convert(model, (X[0],), policy=BF16), loss_times, sgd(model), ema=averages)
    for x in X:
        assert step(x).stepped
    assert equal(state(averages[0]), state(averages[1]))
    theirs: Any = averages[0].module
    assert not torch.equal(theirs.net.first.weight, model.net.first.weight)


@pytest.mark.parametrize("compile", [False, {"backend": lambda gm, inputs: gm.forward}], ids=["", "compiled"])
def test_hooks_on_all_optimizers_are_called_for_every_step(compile: Any) -> None:
    calls: list[str] = []
    model = converted(BF16)
    step = TrainStep(model, loss_times, sgd(model), compile=compile)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
    ]
    try:
        for x in X:
            step(x)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["before", "after"] * len(X)


# ------------------------------------------------------------------------------------- gradients that are there


@pytest.mark.default_case(policy="O1,dtype=fp16")
@pytest.mark.filterwarnings("ignore:FP16 gradients without a loss scale")
@pytest.mark.parametrize("policy", [FP16, BF16])
def test_gradients_that_are_there_when_a_window_opens_are_cleared_and_that_is_said(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, expected = converted(policy), converted(policy)
    step, other = (TrainStep(m, loss_times, sgd(m), accumulate_steps=2) for m in (model, expected))
    loss_times(model(X[3])).backward()
    with caplog.at_level(logging.WARNING):
        for x in X:
            step(x)
            other(x)
    assert equal(state(model), state(expected))
    assert caplog.text.count("gradients that were there when its window opened, the first 'first.weight'") == 1


def test_gradients_of_a_loss_module_and_of_what_no_optimizer_trains_are_cleared() -> None:
    model = converted(BF16)
    loss = Layers(lambda m, output: loss_times(output) * m.weight, weight=nn.Parameter(torch.ones(())))
    step = TrainStep(model, loss, SGD(model.first.parameters(), lr=0.1))
    for x in X:
        step(x)
        assert all(p.grad is None for p in (*model.parameters(), *loss.parameters()))


# ------------------------------------------------------------------------------------- NaN without a loss scale


def test_skips_without_a_loss_scale_have_a_limit_and_the_first_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = converted(BF16)
    step = TrainStep(model, loss_times, sgd(model), max_grad_norm=1.0, max_skips=3)
    before = state(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert step(X[0], math.nan).reason == "overflow"
    assert caplog.text.count("a step was skipped, because gradients are not finite") == 1
    with pytest.raises(
        ScaleCollapseError, match=r"3 steps in a row .*first\.weight \(NaN\).* mul makes NaN in float32"
    ):
        step(X[0], math.nan)
    assert equal(state(model), before)


# ------------------------------------------------------------------------------------- the scaler


def test_the_numbers_of_updates_go_on_after_a_resume() -> None:
    model = converted(FP16)
    step = TrainStep(model, loss_times, sgd(model))
    for x in X:
        step(x)
    scaler = fxamp.LossScaler(min_scale=1.0, max_scale=2.0**24, max_skips=20)
    scaler.load_state_dict(step.scaler.state_dict())
    scaler.scale(torch.ones(()))
    scaler.update(2.0)
    assert scaler.history[-1].update == len(X) + 1


def test_a_limit_of_skips_that_is_far_away_keeps_no_flag_for_each_update() -> None:
    model = converted(FP16)
    optimizer = AdamW(model.parameters(), fused=True)
    step = TrainStep(model, loss_times, optimizer, scaler=fxamp.LossScaler(max_skips=10**6))
    for _ in range(50):
        step(X[0])
    held = [value for value in vars(step.scaler._in_a_row).values() if isinstance(value, list)]
    assert sum(map(len, held)) < 10


def test_an_unused_scaler_says_that_no_loss_was_scaled() -> None:
    with pytest.raises(PolicyError, match=r"no loss was scaled yet: call scaler\.scale\(loss\) first"):
        inverse_scale(fxamp.LossScaler())


# ------------------------------------------------------------------------------------- results and files


def test_the_loss_of_a_result_has_no_dimensions() -> None:
    model = converted(BF16)
    step = TrainStep(model, lambda out: out.square().mean().view(1, 1), sgd(model))
    assert step(X[0]).loss.shape == ()


def test_a_checkpoint_is_not_written_over_another(tmp_path: Path) -> None:
    model = converted(BF16)
    step = TrainStep(model, loss_times, sgd(model))
    step(X[0])
    fxamp.save_checkpoint(step, tmp_path / "1")
    with pytest.raises(PolicyError, match=r"'.*1' holds a checkpoint already: give each"):
        fxamp.save_checkpoint(step, tmp_path / "1")
    fxamp.save_checkpoint(step, tmp_path / "2")


def test_a_save_that_fails_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step.pt"
    model = converted(BF16)
    step = TrainStep(model, loss_times, sgd(model))
    step.save(path)
    before = path.read_bytes()
    step(X[0])

    def killed(state: Any, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        step.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["step.pt"]
