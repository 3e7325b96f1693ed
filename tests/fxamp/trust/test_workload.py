"""What a diagnostic is given is read in one way, and what cannot be read is refused with the way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.errors import NotAModuleError
from fxamp.observe.workload import given_step
from passes.contract.errors import CaptureError, PolicyError
from tests.support.helpers import Layers

X, Y = torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])
CE = nn.functional.cross_entropy


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4))


def test_inputs_batches_and_steps_give_the_same_batches() -> None:
    model = net()
    step = fxamp.TrainStep(model, CE, torch.optim.SGD(model.parameters(), lr=0.1))
    for found in (
        given_step(model, X, Y, loss=CE),
        given_step(model, batches=iter([(X, Y)]), loss=CE),
        given_step(model, batches=[[X, Y]], loss=CE),
        given_step(step, X, Y),
    ):
        (batch,) = found.batches
        assert batch[0] is X
        assert batch[1] is Y
        assert torch.equal(found.run(model, batch)[1], CE(model(X), Y))
    assert given_step(step, X).step is step


class Scalars(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.sum(), x.mean()


class Whole(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(loss=x)


def test_what_is_no_step_is_refused_with_the_way_out() -> None:
    model = net()
    step = fxamp.TrainStep(model, CE, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(NotAModuleError, match="not function"):
        given_step(lambda x: x, X)
    with pytest.raises(CaptureError, match="to_empty"):
        given_step(net().to("meta"), X)
    with pytest.raises(PolicyError, match="leave out loss"):
        given_step(step, X, Y, loss=CE)
    with pytest.raises(PolicyError, match="in their place"):
        given_step(model)
    with pytest.raises(PolicyError, match="in their place"):
        given_step(model, X, batches=[X])
    with pytest.raises(PolicyError, match="pairs"):
        given_step(model, None, Y, batches=[X], loss=CE)
    with pytest.raises(PolicyError, match="empty"):
        given_step(model, batches=[])
    for module, loss, text in (
        (model, None, "has no loss: give loss="), (Scalars(), None, "2 scalars: give loss="),
        (Whole(), None, r"shape \(6, 8\)"), (model, lambda out: out, r"not one of shape \(6, 4\)"),
    ):  # fmt: skip
        given = given_step(module, X, loss=loss)
        with pytest.raises(PolicyError, match=text):
            given.run(module, given.batches[0])


class LossWithWeights(nn.Module):
    """A loss with a parameter, and a buffer that it counts in."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor) -> Tensor:
        self.calls += 1
        return (output * self.gain).square().mean()


@pytest.mark.parametrize(
    "diagnose",
    [
        fxamp.verify, fxamp.estimate_error, fxamp.tune, fxamp.calibrate, fxamp.find_overflow, fxamp.advise,
        fxamp.census,
    ],
)  # fmt: skip
def test_a_loss_that_is_a_module_is_as_before_and_so_is_what_autograd_saved(diagnose: Any) -> None:
    model, loss = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), LossWithWeights()
    x = torch.randn(6, 8)
    before = loss(model(x))
    loss.calls.zero_()
    view = fxamp.convert(model, policy="O1,dtype=fp16") if diagnose is fxamp.find_overflow else model
    diagnose(view, x, loss=loss)
    assert loss.gain.grad is None
    assert loss.calls == 0
    before.backward()  # nothing that it needs was written
    assert all(p.grad is not None for p in model.parameters())


def test_flags_that_a_step_changes_are_as_before() -> None:
    def freezes(self: Any, x: Tensor) -> Tensor:
        self.a.weight.requires_grad_(False)
        return self.b(self.a(x))

    model: Any = Layers(freezes, a=nn.Linear(8, 8), b=nn.Linear(8, 1))
    fxamp.verify(model, torch.randn(4, 8), loss=torch.mean, policies="O1")
    assert model.a.weight.requires_grad
