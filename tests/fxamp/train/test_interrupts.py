"""An interrupt in any line of a window leaves nothing open, and the window can be repeated with the same bits.

Inside the steps of optimizers it may leave half a step: the next call then refuses, and names what loads a state.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import fxamp
import fxamp.train.step as step_file
from fxamp.train.step import TrainStep
from fxamp.view.view import runner_of
from passes.contract.errors import PolicyError

FOLDER = os.path.join(os.path.dirname(step_file.__file__), "")
X, Y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 3])


class At:
    """Raises KeyboardInterrupt at a line of the package, by number in the order in which they run."""

    def __init__(self, number: int) -> None:
        self.left, self.where = number, ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            self.left -= 1
            if not self.left:
                self.where = f"{os.path.relpath(frame.f_code.co_filename, FOLDER)}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def interrupted(step: TrainStep, number: int, *args: Any) -> str:
    """Call a step, and interrupt it at a line; return where that was, "" where the call has fewer lines."""
    at = At(number)
    before = sys.gettrace()
    sys.settrace(at)
    try:
        step(*args)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return at.where


def made(dtype: str, clip: float | None) -> TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    step = TrainStep(
        fxamp.convert(model, policy=f"O1,dtype={dtype}"), nn.functional.cross_entropy,
        SGD(model.parameters(), lr=0.1, momentum=0.9), accumulate_steps=2, max_grad_norm=clip, weights="per_step",
        scaler=fxamp.LossScaler(init_scale=64.0) if dtype == "fp16" else None,
    )  # fmt: skip
    for x in X:
        step(x, Y)
    return step


def weights(step: TrainStep) -> list[Tensor]:
    return [p.detach().clone() for p in step.model.parameters()]


def window(step: TrainStep) -> list[Tensor]:
    for x in X:
        step(x, Y)
    return weights(step)


@pytest.mark.default_case(dtype="bf16")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("dtype", "clip"), [("bf16", 1.0), ("fp16", 1.0), ("bf16", None), ("fp16", None)])
def test_an_interrupt_at_any_line_leaves_nothing_open(dtype: str, clip: float | None, last: bool) -> None:
    step = made(dtype, clip)
    base = copy.deepcopy(step.state_dict())
    expected = window(step)
    torn, number, where = 0, 0, "start"
    while where:
        number += 1
        step.load_state_dict(copy.deepcopy(base))
        if last:
            step(X[0], Y)
        where = interrupted(step, number, X[int(last)], Y)
        if not where:
            break
        if last and step.opened is not None:  # before anything of the call: as between two calls
            assert number < 8
            step(X[1], Y)
            assert all(map(torch.equal, weights(step), expected)), where
            continue
        assert step.opened is None, where
        assert not step.weights.is_open, where
        assert runner_of(step.model).opened() is None, where
        assert not getattr(step.scaler, "_per_optimizer_states", None), where
        assert all(p.grad is None for p in step.model.parameters()), where
        if step.torn:
            torn += 1
            with pytest.raises(PolicyError, match=r"half a step: load a state, by step\.load"):
                step(X[0], Y)
            with pytest.raises(PolicyError, match="half a step"):
                step.state_dict()
        elif step.windows == base["windows"]:
            assert all(map(torch.equal, window(step), expected)), where
        else:  # the window was over
            assert all(map(torch.equal, weights(step), expected)), where
    assert number > 20
    assert (torn > 0) is last


def test_an_error_while_an_optimizer_steps_is_half_a_step() -> None:
    step = made("bf16", None)

    def raising(*_: Any) -> None:
        raise MemoryError

    hook = step.optimizers[0].register_step_post_hook(raising)
    with pytest.raises(MemoryError):
        window(step)
    hook.remove()
    calls: list[Callable[[], Any]] = [lambda: step(X[0], Y), step.flush, lambda: step.backward(torch.zeros(()))]
    for call in calls:
        with pytest.raises(PolicyError, match="half a step"):
            call()
    step.load_state_dict(copy.deepcopy(made("bf16", None).state_dict()))
    window(step)


def test_backward_and_update_run_outside_of_an_autocast_of_the_caller_and_the_loss_inside() -> None:
    seen: list[tuple[str, bool]] = []

    class Watched(SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(("update", torch.is_autocast_enabled("cpu")))
            return super().step(closure)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(("loss", torch.is_autocast_enabled("cpu")))
        output.register_hook(lambda _: seen.append(("backward", torch.is_autocast_enabled("cpu"))))
        return nn.functional.cross_entropy(output, target)

    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    step = TrainStep(fxamp.convert(model, policy="O1,dtype=bf16"), loss, Watched(model.parameters(), lr=0.1))
    with torch.autocast("cpu", torch.bfloat16):
        step(X[0], Y)
        assert torch.is_autocast_enabled("cpu")
    assert seen == [("loss", True), ("backward", False), ("update", False)]


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.more, self.last = nn.Linear(8, 8), nn.ModuleList(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        for layer in self.more:
            x = x + layer(x)
        return self.last(x)


def test_gradients_of_a_layer_that_came_later_do_not_pile_up() -> None:
    torch.manual_seed(0)
    model = Growing()
    optimizer = SGD(model.parameters(), lr=0.1)
    step = TrainStep(fxamp.convert(model, policy="O1,dtype=bf16"), nn.functional.cross_entropy, optimizer)
    step(X[0], Y)
    model.more.append(nn.Linear(8, 8))
    for _ in range(4):
        step(X[0], Y)
        assert all(p.grad is None for p in model.parameters())
    optimizer.add_param_group({"params": list(model.more.parameters())})
    weight = model.get_parameter("more.0.weight")
    before = weight.detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(X[0]).float(), Y), weight)
    step(X[0], Y)
    torch.testing.assert_close(weight.detach(), before.add(gradient, alpha=-0.1))
