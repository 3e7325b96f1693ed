"""A diagnostic of a step leaves everything as it was, bit for bit, wherever in the step an error is raised."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.train import update

X, Y = torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])
CE = nn.functional.cross_entropy


class PlantedError(Exception):
    """An error that nothing but these tests raises."""


class Net(nn.Module):
    """Statistics, dropout, a counter in an attribute, a list of tensors, and hooks added at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.calls, self.log = 0, [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.dropout(self.norm(self.first(x)).relu(), 0.5, True))


class Loss(nn.Module):
    """A loss with a parameter and a buffer of its own."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.raises = nn.Parameter(torch.ones(())), False
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.seen += 1
        if self.raises:
            raise PlantedError
        return CE(output * self.gain, target)


def step_of(dtype: str, **more: Any) -> Any:
    torch.manual_seed(0)
    model, loss = Net(), Loss()
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=0.1)
    view = fxamp.convert(model, policy=f"O1,dtype={dtype}" if dtype else "O1")
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    ema = torch.optim.swa_utils.AveragedModel(model)
    return fxamp.TrainStep(view, loss, optimizer, scheduler=rate, ema=ema, max_grad_norm=1.0, **more)


def fingerprint(step: Any) -> dict[str, Any]:
    """Everything that a run can write, as plain values."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.requires_grad, value.detach().clone().double().flatten().tolist()
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else str(value)

    modules = {f"{i}": m for i, m in enumerate((step.model, step.loss_fn, *step.averages))}
    tensors = {f"{i}.{n}": plain(t) for i, m in modules.items() for n, t in m.state_dict(keep_vars=True).items()}
    grads = {f"{i}.{n}": plain(p.grad) for i, m in modules.items() for n, p in m.named_parameters()}
    hooks = {i: [len(x._forward_hooks) + len(x._backward_hooks) for x in m.modules()] for i, m in modules.items()}
    own = {k: str(v) for k, v in vars(step).items() if isinstance(v, (int, str, bool, tuple, set, type(None)))}
    return {
        "tensors": tensors, "gradients": grads, "hooks": hooks, "own": own,
        "counts": [step.windows, step.steps, step.skipped, step.position, step.undecided],
        "optimizer": [plain(o.state_dict()) for o in step.optimizers],
        "schedulers": [plain(copy.deepcopy(s.state_dict())) for s in step.schedulers],
        "scaler": plain(step.scaler.state_dict()), "scaler is": id(step.scaler), "log": plain(step.model.log),
        "random": [torch.get_rng_state().tolist(), str(random.getstate())], "training": step.model.training,
    }  # fmt: skip


@contextmanager
def raising(owner: Any, name: str, *, after: bool = False) -> Iterator[None]:
    """Let a method raise, before or after it has done its work."""
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if after:
            real(*args, **kwargs)
        raise PlantedError

    with mock.patch.object(owner, name, call):
        yield


def in_the_loss(step: Any, _: bool) -> Any:
    return mock.patch.object(step.loss_fn, "raises", True)


def in_backward(step: Any, _: bool) -> Any:
    @contextmanager
    def hooked() -> Iterator[None]:
        def hook(_: Tensor) -> None:
            raise PlantedError

        handle = step.model.first.bias.register_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    return hooked()


def at(owner: Callable[[Any], Any], name: str) -> Any:
    return lambda step, after: raising(owner(step), name, after=after)


PLACES = {
    "loss": in_the_loss, "backward": in_backward,
    "optimizer": at(lambda s: s.optimizers[0], "step"), "scheduler": at(lambda s: s.schedulers[0], "step"),
    "average": at(lambda s: s.averages[0], "update_parameters"), "unscale": at(lambda s: type(s.scaler), "unscale_"),
    "update": at(lambda s: update, "update_scale"), "count": at(type, "_count"),
    "clear": at(lambda s: s.loop, "_clear"), "result": at(type, "_result"), "finish": at(type, "_finish"),
}  # fmt: skip


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_fails_under_a_census_is_as_before(place: str, trained: bool, after: bool) -> None:
    step = step_of("fp16")
    for _ in range(2 * trained):
        step(X, Y)
    if trained:
        step.model.first.weight.grad = torch.ones_like(step.model.first.weight)
    before = fingerprint(step)
    with PLACES[place](step, after), pytest.raises(PlantedError):
        fxamp.census(step, X, Y)
    assert fingerprint(step) == before
    assert step(X, Y).reason == "stepped"


@pytest.mark.parametrize("trained", [False, True])
def test_a_census_leaves_a_step_whose_dtype_is_open_as_it_was(trained: bool) -> None:
    low = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)  # as on CUDA by default
    try:
        step = step_of("")
        for _ in range(trained):
            step(X, Y)
        before = fingerprint(step)
        found = fxamp.census(step, X, Y)
        assert found, found
        assert (found.scaling.scaler, found.scaling.unscaled) == ("enabled", 1)
        assert fingerprint(step) == before
        assert step(X, Y).reason == "stepped"
    finally:
        torch.set_autocast_dtype("cpu", low)


def test_a_step_after_a_census_is_bit_equal_to_one_without() -> None:
    one, other = step_of("bf16"), step_of("bf16")
    for _ in range(3):
        fxamp.census(one, X, Y)
        torch.manual_seed(7)
        first = one(X, Y).loss
        torch.manual_seed(7)
        assert torch.equal(first, other(X, Y).loss)
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


class RaisesAt:
    """A loss that raises at one of its calls."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.left -= 1
        if not self.left:
            raise PlantedError
        return CE(output, target)


DIAGNOSTICS: list[Any] = [
    fxamp.census, fxamp.estimate_error, fxamp.measure_error, fxamp.tune, fxamp.calibrate, fxamp.find_overflow,
    fxamp.compare,
]  # fmt: skip


@pytest.mark.parametrize("call", [1, 2, 4, 9])
@pytest.mark.parametrize("diagnose", DIAGNOSTICS)
def test_a_model_is_as_before_at_whatever_run_of_a_diagnostic_its_loss_raises(diagnose: Any, call: int) -> None:
    model: Any = Net()
    model(X).sum().backward()
    model.first.bias.requires_grad_(False)
    views = {fxamp.census: "O1,dtype=bf16", fxamp.find_overflow: "O1,dtype=fp16"}
    view = fxamp.convert(model, policy=views[diagnose]) if diagnose in views else model

    def state() -> Any:
        tensors = [(t.detach().clone(), t.requires_grad) for t in (*model.parameters(), *model.buffers())]
        gradients = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
        return tensors, gradients, [torch.get_rng_state()], (model.training, model.calls, len(model._forward_hooks))

    tensors, gradients, random, rest = state()
    loss = RaisesAt(call)
    with suppress(PlantedError, fxamp.PolicyError):  # some say that a reference, or autocast, does not run
        diagnose(view, batches=[(X, Y), (2 * X, Y)], loss=loss)
    assert loss.left <= 0 or call > 2
    now = state()
    assert all(torch.equal(a, b) and flag == now_flag for (a, flag), (b, now_flag) in zip(tensors, now[0], strict=True))
    for (grad, value), (now_grad, now_value) in zip(gradients, now[1], strict=True):
        assert grad is now_grad
        assert value is None or torch.equal(value, now_value)
    assert torch.equal(random[0], now[2][0])
    assert rest == now[3]


def test_batches_of_loss_that_is_nan_are_named_and_change_nothing() -> None:
    model = Net()
    before = [p.detach().clone() for p in model.parameters()]
    for diagnose in (fxamp.estimate_error, fxamp.measure_error, fxamp.tune, fxamp.compare):
        with pytest.raises(fxamp.PolicyError, match="batch 1: FP32 itself is not finite"):
            diagnose(model, batches=[(X, Y), (X * float("nan"), Y)], loss=CE)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_step_in_an_open_window_and_a_model_on_meta_are_refused_before_anything_runs() -> None:
    step = step_of("bf16", accumulate_steps=2)
    step(X, Y)
    elsewhere = Net().to("meta")
    before = fingerprint(step)
    for diagnose in (fxamp.census, fxamp.find_overflow):
        with pytest.raises(fxamp.PolicyError, match="window"):
            diagnose(step, X, Y)
    for diagnose in DIAGNOSTICS:
        with pytest.raises(fxamp.CaptureError, match="meta"):
            diagnose(elsewhere, X, Y, loss=CE)
    assert fingerprint(step) == before
