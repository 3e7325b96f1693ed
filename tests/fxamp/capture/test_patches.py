"""Captures take turns, patch torch for their own thread alone, and leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import fxamp
from fxamp.capture.model.patches import as_torch_is, capturing, is_capturing, replaced, uncollected
from tests.support.helpers import Two, assert_same, convert_fixed, example, plan_fixed


class Block(nn.Module):
    """Reads a dtype and a grad mode; no GELU, whose kernel is another one while any thread exports."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        y = y * 2 if torch.is_grad_enabled() else y
        return y + torch.ones(6, dtype=y.dtype) * 1.001


def state_of_torch() -> dict[str, Any]:
    owners = (torch, torch.Tensor, nn.Module, torch.autograd.Function, torch.utils.checkpoint, torch.no_grad)
    return {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}


@pytest.mark.filterwarnings("ignore")  # of torch's own: exporting is not made for threads
def test_threads_convert_and_call_at_once_and_torch_is_as_it_was() -> None:
    models = [Block(seed).eval() for seed in range(4)]
    expected = []
    for model in models:
        with torch.autocast("cpu", torch.bfloat16):
            expected.append(model(example()).float())
    others = [Block(seed).eval() for seed in range(4)]
    plain = [model(example()) for model in others]
    before = state_of_torch()
    stop = threading.Event()
    wrong: list[int] = []

    def call() -> None:
        while not stop.is_set():
            stop.wait(0.001)
            for i, model in enumerate(others):
                if not torch.equal(model(example()), plain[i]):
                    wrong.append(i)

    def convert(i: int) -> Any:
        front_end = "fx" if i % 3 == 2 else "export"
        inputs = () if front_end == "fx" else ((example(),),)
        return convert_fixed(models[i], *inputs, policy="O1,dtype=bf16", capture=front_end)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            converted = list(pool.map(convert, range(4)))
    finally:
        stop.set()
        caller.join()
    assert not wrong
    for i, module in enumerate(converted):
        if i % 3 != 2:  # without inputs nobody knows what a dtype will be
            assert torch.equal(module(example()), expected[i])
    now = state_of_torch()
    assert now.keys() == before.keys()
    assert [name for name in before if now[name] is not before[name]] == []


def test_a_function_is_replaced_for_the_thread_that_captures_alone() -> None:
    original = torch.is_grad_enabled
    seen: list[bool] = []
    with replaced(torch, "is_grad_enabled", lambda _: lambda: False):
        other = threading.Thread(target=lambda: seen.append(torch.is_grad_enabled()))
        other.start()
        other.join()
        assert torch.is_grad_enabled() is False
    assert seen == [True]
    assert torch.is_grad_enabled is original


def test_an_interrupted_capture_frees_the_lock_and_torch() -> None:
    before = state_of_torch()

    def forward(self: Any, x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_fixed(Two(forward), (example(),))
    now = state_of_torch()
    assert [name for name in before if now[name] is not before[name]] == []
    assert not is_capturing()
    with ThreadPoolExecutor(1) as pool:
        converted = pool.submit(fxamp.convert, Two(), (example(),), policy="O0").result(timeout=60)
    assert converted(example()).shape == (4, 6)


def test_a_thread_that_died_while_it_captured_leaves_the_lock_free() -> None:
    def die() -> None:
        with contextlib.suppress(SystemExit), capturing():
            raise SystemExit

    thread = threading.Thread(target=die)
    thread.start()
    thread.join()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fxamp.plan, Two(), (example(),)).result(timeout=60)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_that_was_forked_during_a_capture_can_capture() -> None:
    held = threading.Event()
    done = threading.Event()

    def hold() -> None:
        with capturing():
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        with capturing():
            os._exit(7)
    end = time.monotonic() + 30
    status = (0, 0)
    while status == (0, 0) and time.monotonic() < end:
        status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status[1]) == 7


@pytest.mark.parametrize("error", [MemoryError("out of it"), OSError("no such file")])
def test_what_is_not_about_the_model_is_raised_as_it_is(error: Exception) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        raise error

    with pytest.raises(type(error), match=str(error)):
        convert_fixed(Two(forward), (example(),))


def test_a_plan_does_not_depend_on_what_was_converted_before() -> None:
    model, x = Two(lambda self, x: self.m(self.l(x)).relu()), example()
    first = plan_fixed(model, (x,)).to_json()
    plan_fixed(Two(lambda self, x: torch.rrelu(self.l(x), training=True)), (x,), policy="O1,dtype=fp16")
    assert plan_fixed(model, (x,)).to_json() == first
    assert_same(convert_fixed(model, (x,))(x), convert_fixed(model, (x,))(x))


def test_the_collector_rests_while_a_model_is_captured_and_is_afterwards_as_it_was() -> None:
    seen: list[bool] = []

    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(gc.isenabled())
            return super().forward(x)

    fxamp.plan(Asks(2, 2), (torch.randn(3, 2),))
    assert seen
    assert not any(seen)
    assert gc.isenabled()
    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError), uncollected():
            raise ZeroDivisionError
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_dynamo_meets_torchs_own_functions_while_a_model_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    asks, compile, seen = torch.is_grad_enabled, torch.compile, []

    def compiling(*args: Any, **kwargs: Any) -> Any:  # which torch.cond calls
        seen.append(torch.is_grad_enabled)
        return compile(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", compiling)
    fxamp.plan(Two(lambda self, x: torch.cond(x.sum() > 0, torch.neg, torch.sin, (self.l(x),))), (example(),))
    assert seen
    assert all(function is asks for function in seen)
    with replaced(torch, "is_grad_enabled", lambda before: before):
        assert torch.is_grad_enabled is not asks
        with as_torch_is():
            assert torch.is_grad_enabled is asks
        assert torch.is_grad_enabled is not asks
    assert torch.is_grad_enabled is asks
