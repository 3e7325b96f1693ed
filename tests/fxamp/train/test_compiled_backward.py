"""The backward of a compiled graph runs in the dtypes of eager autocast, where that of torch.compile does not.

Under an ambient autocast AOTAutograd traces backward under autocast too. In eager, backward runs without: what forward
computed in FP32 has its gradient computed in FP32. The two cases are those of pytorch#153044 and pytorch#179804.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import fxamp
from fxamp.train.step import TrainStep
from tests.support.helpers import in_turns


@pytest.fixture(autouse=True)
def _compile_anew() -> None:
    torch.compiler.reset()


@pytest.fixture
def as_forward() -> Iterator[None]:
    """Set what torch does by default up to 2.13, whatever a newer one does."""
    with torch._functorch.config.patch(backward_pass_autocast="same_as_forward"):
        yield


class LargeGradients(nn.Module):
    """A head in FP32, whose gradient of 65536 is out of FP16's range."""

    low = torch.float16
    ones: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ones", torch.ones(4, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.ones
        with torch.autocast("cpu", enabled=False):
            return self.head(y.float())

    def loss(self, y: Tensor) -> Tensor:
        return (y * 16384).sum()

    @staticmethod
    def example() -> Tensor:
        return torch.ones(1, 4)


class ExactWithin(nn.Module):
    """A matrix product that the user keeps in FP32, of values that BF16 would round."""

    low = torch.bfloat16

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.linear.weight.float().T

    def loss(self, y: Tensor) -> Tensor:
        return (y * torch.linspace(0.1, 1, 64)).sum()

    @staticmethod
    def example() -> Tensor:
        return torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def by_torch(model: Any, backend: str | None) -> None:
    run = model if backend is None else torch.compile(model, backend=backend)
    with torch.autocast("cpu", dtype=model.low):
        out = run(model.example())
    loss: Tensor = model.loss(out)
    loss.backward()


def by_the_backend(model: Any) -> None:
    run: Any = torch.compile(model, backend="fxamp", options={"backend": "aot_eager"})
    with torch.autocast("cpu", dtype=model.low):
        out = run(model.example())
    loss: Tensor = model.loss(out)
    loss.backward()


def by_compile(model: Any) -> None:
    run = fxamp.compile(model, policy=fxamp.Policy(dtype=model.low), backend="aot_eager")
    loss: Tensor = model.loss(run(model.example()))
    loss.backward()


def _by_step(model: Any, called: nn.Module, compile: Any) -> None:
    kept: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda gradient, name=name: kept.update({name: gradient}))
    TrainStep(called, model.loss, SGD(model.parameters(), lr=0.0), scaler=1.0, compile=compile)(model.example())
    for name, p in model.named_parameters():
        p.grad = kept.get(name)


def by_step(model: Any) -> None:
    converted = fxamp.convert(model, (model.example(),), policy=fxamp.Policy(dtype=model.low))
    _by_step(model, converted, "aot_eager")


def by_converting_step(model: Any) -> None:
    options = {"backend": "aot_eager", "policy": fxamp.Policy(dtype=model.low)}
    _by_step(model, model, {"backend": "fxamp", "options": options})


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


WAYS: list[Callable[[Any], None]] = [by_the_backend, by_compile, by_step, by_converting_step]


@pytest.mark.filterwarnings("ignore:FP16 gradients without a loss scale")
@pytest.mark.parametrize(("way", "kind"), in_turns(WAYS, [LargeGradients, ExactWithin]))
def test_gradients_are_those_of_eager_autocast(kind: Any, way: Callable[[Any], None]) -> None:
    eager, ours = kind(), kind()
    ours.load_state_dict(eager.state_dict())
    by_torch(eager, None)
    way(ours)
    expected, found = gradients(eager), gradients(ours)
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("kind", [LargeGradients, ExactWithin])
def test_those_of_compiled_autocast_are_others(kind: Any, as_forward: None) -> None:
    eager, theirs = kind(), kind()
    theirs.load_state_dict(eager.state_dict())
    by_torch(eager, None)
    by_torch(theirs, "aot_eager")
    expected, found = gradients(eager), gradients(theirs)
    assert not all(torch.equal(found[name], expected[name]) for name in expected)
