"""A TrainStep reads nothing from the device that nobody asked for, and decides there what it can."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp
from fxamp.errors import ScaleCollapseError
from fxamp.train import update
from fxamp.train.result import to_host
from fxamp.train.step import TrainStep
from tests.support.helpers import in_turns
from tests.support.small import loss_of as loss_times
from tests.support.training import Reads

X = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.5, 0.25, 2.0, 1.0]])


class Passes(TorchDispatchMode):
    """Keeps the names of ops that look at all gradients."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(func) for word in ("norm", "aminmax", "isfinite", "non_finite")):
            self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def make_step(optimizer: Callable[[Any], Optimizer], **settings: Any) -> TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    made = optimizer(model.parameters())
    if settings.get("scheduler"):
        settings["scheduler"] = StepLR(made, 1)
    if settings.get("ema"):
        settings["ema"] = AveragedModel(model)
    return TrainStep(model, loss_times, made, **settings)


def fused_adamw(params: Any) -> Optimizer:
    return AdamW(params, lr=0.01, fused=True)


def fused_sgd(params: Any) -> Optimizer:
    return SGD(params, lr=0.01, momentum=0.9, fused=True)


def plain_sgd(params: Any) -> Optimizer:
    return SGD(params, lr=0.01)


def auto_scaler() -> fxamp.LossScaler:
    return fxamp.LossScaler(init_scale=8.0, min_scale=1.0, max_scale=2.0**24, max_skips=20)


# ------------------------------------------------------------------------------------- reads


@pytest.mark.parametrize(
    ("optimizer", "clip"),
    in_turns([fused_adamw, fused_sgd], [None, 1.0]),
)
def test_five_steps_of_a_fused_optimizer_under_loss_scaling_read_nothing(optimizer: Any, clip: float | None) -> None:
    step = make_step(optimizer, scaler=auto_scaler(), max_grad_norm=clip, accumulate_steps=2)
    with Reads() as reads:
        results = [step(X, math.inf if index == 4 else 1.0) for index in range(10)]
    # Skipped on the device, the first step of torch's fused SGD would leave a momentum that nobody wrote.
    assert reads.count == (1 if optimizer is fused_sgd else 0)
    assert step.waits == ()
    assert [r.reason for r in results[1::2]] == ["stepped", "stepped", "overflow", "stepped", "stepped"]
    assert [r.scale for r in results[1::2]] == [8.0, 8.0, 8.0, 4.0, 4.0]
    assert [e.scale for e in step.scaler.history] == [8.0, 8.0, 8.0, 4.0, 4.0]


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxamp.train.update._is_on_host", lambda tensor: False)


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("clip", [None, 1.0])
def test_without_loss_scaling_a_fused_optimizer_reads_nothing(clip: float | None) -> None:
    step = make_step(fused_adamw, max_grad_norm=clip)
    with Reads() as reads:
        results = [step(X) for _ in range(5)]
    assert reads.count == 0
    assert step.waits == ()
    assert all(r.stepped for r in results)


def test_on_a_cpu_clipping_passes_over_gradients_as_often_as_by_hand() -> None:
    step = make_step(fused_adamw, max_grad_norm=1.0)
    step(X)
    with Passes() as passes:
        assert step(X).stepped
    ours, passes.ops = passes.ops, []
    loss_times(step.model(X)).backward()
    with passes:
        nn.utils.clip_grad_norm_(step.model.parameters(), 1.0)
    assert passes.ops
    assert sorted(ours) == sorted(passes.ops)


DECIDES = "Python decides whether SGD steps, which fused=True leaves to the device"


def test_bf16_reads_nothing_with_an_ordinary_optimizer_scheduler_and_average() -> None:
    step = make_step(plain_sgd, scheduler=True, check_finite=False)
    with Reads() as reads:
        for _ in range(5):
            step(X)
    assert reads.count == 0
    assert make_step(plain_sgd, scheduler=True, ema=True, check_finite=False).waits == ()


@pytest.mark.parametrize(
    ("optimizer", "settings", "reason"),
    [
        (plain_sgd, {"scaler": 8.0}, DECIDES),
        (plain_sgd, {"max_grad_norm": 1.0}, DECIDES),
        (plain_sgd, {}, DECIDES),
        (fused_sgd, {"scaler": 8.0, "scheduler": True}, "StepLR follows the steps that were taken"),
        (fused_sgd, {"scaler": 8.0, "ema": True}, "the average of the weights follows the steps that were taken"),
    ],
)
def test_where_python_decides_a_window_waits_once_and_says_why(optimizer: Any, settings: Any, reason: str) -> None:
    step = make_step(optimizer, accumulate_steps=3, **settings)
    assert step.waits == (reason,)
    for _ in range(3):  # the first window of an average copies
        step(X)
    with Reads() as reads:
        for _ in range(3):
            step(X)
    # `update_parameters` of an AveragedModel asks its own counter, which is on the host, twice.
    assert reads.count == (3 if "ema" in settings else 1)


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("settings", [{"scaler": 8.0}, {"scaler": 8.0, "max_grad_norm": 1.0}, {"max_grad_norm": 1.0}])
def test_what_a_scheduler_follows_is_on_its_way_to_the_host_before_the_optimizer_steps(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    class Sent:
        def __init__(self, flag: Tensor) -> None:
            self.flag = flag.clone()
            seen.append("sent")

        def __bool__(self) -> bool:
            seen.append("read")
            return bool(self.flag)

    monkeypatch.setattr("fxamp.train.update.to_host", Sent)
    step = make_step(fused_adamw, scheduler=True, **settings)
    step.optimizers[0].register_step_post_hook(lambda *_: seen.append("stepped"))
    for factor, reason in ((1.0, "stepped"), (math.inf, "overflow")):
        seen.clear()
        assert step(X, factor).reason == reason
        assert seen == ["sent", "stepped", "read"]
    assert step.schedulers[0].last_epoch == 1


def test_a_result_that_a_scheduler_followed_is_not_read_again() -> None:
    step = make_step(fused_adamw, scheduler=True, scaler=8.0)
    with Reads() as reads:
        results = [step(X), step(X, math.inf)]
        assert [r.reason for r in results] == ["stepped", "overflow"]
    assert reads.count == 2


def test_a_result_is_read_when_it_is_asked_for_and_once() -> None:
    step = make_step(fused_adamw, scaler=auto_scaler())
    result = step(X)
    step(X, math.inf)
    with Reads() as reads:
        assert (result.reason, result.scale, result.stepped, result.skipped, result.kept) == (
            "stepped",
            8.0,
            True,
            False,
            1,
        )
        count = reads.count
        assert (result.reason, result.scale, result.stepped) == ("stepped", 8.0, True)
    assert 0 < count == reads.count


def test_max_skips_is_exact_though_it_is_seldom_read() -> None:
    scaler = fxamp.LossScaler(max_skips=3)
    step = make_step(fused_adamw, scaler=scaler)
    for factor in (1.0, math.inf, math.inf, 1.0, math.inf, math.inf):
        step(X, factor)
    with pytest.raises(ScaleCollapseError, match=r"3 steps in a row.*weight \(inf\)"):
        step(X, math.inf)
    assert [e.skipped for e in scaler.history] == [False, True, True, False, True, True, True]


# ------------------------------------------------------------------------------------- decided on the device


@pytest.mark.parametrize(
    "make",
    [lambda p: AdamW(p, lr=0.01, amsgrad=True), lambda p: SGD(p, lr=0.01, momentum=0.9), lambda p: SGD(p, lr=0.01)],
)
def test_a_step_is_taken_back_to_the_bit(make: Callable[[Any], Optimizer]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = make(model.parameters())
    loss_times(model(X)).backward()
    optimizer.step()
    twin = copy.deepcopy(model)
    other = make(twin.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for factor, found in ((math.nan, 1.0), (1.0, 0.0), (math.inf, 1.0), (0.5, 0.0)):
        for m, o in ((model, optimizer), (twin, other)):
            o.zero_grad()
            loss_times(m(X), factor).backward()
        changes = [*model.parameters(), *update.state_of(optimizer)]
        update.step_or_restore(optimizer.step, changes, torch.tensor(found))
        if not found:
            other.step()
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
    left, right = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert all(torch.equal(v, right[i][k]) for i, s in left.items() for k, v in s.items() if isinstance(v, Tensor))


def test_a_fused_optimizer_without_loss_scaling_is_held_back_by_its_own_kernel() -> None:
    model = nn.Linear(4, 1)
    optimizer = Adam(model.parameters(), lr=0.1, fused=True)
    before = [p.detach().clone() for p in model.parameters()]
    loss_times(model(X), math.nan).backward()
    assert update.step_where_finite(optimizer, torch.tensor(1.0)) == torch.tensor(1.0)
    assert all(map(torch.equal, before, model.parameters()))
    assert not hasattr(optimizer, "found_inf")
    optimizer.zero_grad()
    loss_times(model(X)).backward()
    update.step_where_finite(optimizer, torch.tensor(0.0))
    assert not any(map(torch.equal, before, model.parameters()))


def test_on_a_cpu_where_reading_waits_for_nothing_no_step_is_taken_back() -> None:
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    loss_times(model(X)).backward()
    assert not update.is_undoable(optimizer)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@cuda
def test_a_flag_sent_before_other_work_arrives_before_it_is_done() -> None:
    flag, work = torch.ones((), device="cuda"), torch.randn(4096, 4096, device="cuda")
    sent = to_host(flag)
    for _ in range(200):
        work = work @ work
    done = torch.cuda.current_stream().record_event()
    assert bool(sent)
    assert not done.query()


@cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        fused_adamw,
        fused_sgd,
        plain_sgd,
        lambda p: SGD(p, lr=0.01, momentum=0.9),
        lambda p: Adam(p, lr=0.01, capturable=True),
        lambda p: AdamW(p, lr=0.01, foreach=True, capturable=True),
    ],
)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_on_cuda_a_window_of_fp16_never_synchronizes(make: Callable[[Any], Optimizer], clip: float | None) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1).cuda(), X.cuda()
    twin = copy.deepcopy(model)
    converted = fxamp.convert(model, (x,), policy="O1,dtype=fp16")
    expected = fxamp.convert(twin, (x,), policy="O1,dtype=fp16")
    scale = 2.0**8  # so low that the first window steps: before an optimizer has its state, it waits
    step = TrainStep(
        converted, loss_times, make(converted.parameters()), scaler=fxamp.LossScaler(init_scale=scale),
        max_grad_norm=clip, accumulate_steps=2,
    )  # fmt: skip
    optimizer, scaler = make(expected.parameters()), torch.amp.GradScaler("cuda", init_scale=scale)
    factors = [1.0, 1.0, 1.0, math.inf, 1.0, 0.5]
    for window, factor in enumerate(factors):
        if window == 1:
            torch.cuda.set_sync_debug_mode("error")
        try:
            step(x)
            step(x, factor)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for f in (1.0, factor):
            scaler.scale(loss_times(expected(x), f) / 2).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(expected.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert step.scaler.get_scale() == scaler.get_scale()
        assert all(map(torch.equal, converted.parameters(), expected.parameters()))
