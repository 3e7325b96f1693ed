"""Weights cast once for inference, and the view as it was afterwards."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxamp
from fxamp.measure.counts import _Counter
from fxamp.view.view import runner_of
from tests.support.helpers import in_turns, saved
from tests.support.zoo import LeNet5

X = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
WITHOUT: list[Callable[[], Any]] = [torch.no_grad, torch.inference_mode]


def lenet(backend: str = "eager") -> Any:
    torch.manual_seed(0)
    return fxamp.compile(LeNet5(), (X,), policy="O1,dtype=bf16", backend=backend)


def casts(view: Any, mode: Callable[[], Any] = torch.no_grad) -> int:
    view(X)  # for whoever has not captured it yet
    with mode():
        view(X)
        with _Counter() as counter:
            view(X)
    return counter.casts


@pytest.mark.parametrize(("backend", "mode"), in_turns(["eager", "aot_eager"], WITHOUT))
def test_frozen_weights_are_cast_once_and_give_the_same_values(backend: str, mode: Callable[[], Any]) -> None:
    view = lenet(backend)
    before, keys, expected = casts(view, mode), list(view.state_dict()), view(X)
    with mode(), fxamp.frozen(view) as frozen:
        assert frozen is view
        inside = casts(frozen, mode)
        opened = runner_of(view).opened()
        assert opened is not None
        assert opened.casts == len(opened) == 10
        assert mode is torch.inference_mode or inside == before - 10  # in eager inference mode a mode sees no cast
        assert torch.equal(frozen(X), expected)
        assert list(frozen.state_dict()) == keys
    assert casts(view, mode) == before
    assert torch.equal(view(X), expected)


def test_an_edit_is_seen_outside_and_not_inside() -> None:
    view = lenet()
    weight = view.get_parameter("fc3.weight")
    before = view(X)
    with fxamp.frozen(view):
        weight.data.mul_(2)
        with torch.no_grad():
            view.get_parameter("fc1.weight").mul_(2)
            assert torch.equal(view(X), before)
    assert not torch.equal(view(X), before)


def test_the_plan_runs_inside() -> None:
    view = fxamp.compile(LeNet5(), (X,), policy="O1,dtype=bf16,modules.fc1=fp32", backend="eager")
    plain = lenet()
    plain.load_state_dict(view.state_dict())
    with torch.no_grad(), fxamp.frozen(view), fxamp.frozen(plain):
        assert not torch.equal(view(X), plain(X))


def test_no_gradient_reaches_the_weights() -> None:
    view = lenet()
    x = X.clone().requires_grad_()
    with fxamp.frozen(view):
        with pytest.warns(UserWarning, match="none reaches a weight"):
            output = view(x)
        F.mse_loss(output, torch.zeros(2, 10)).backward()
    assert x.grad is not None
    assert all(p.grad is None for name, p in view.named_parameters() if name.endswith("weight"))


def test_an_error_inside_leaves_the_view_as_it_was() -> None:
    view = lenet()
    before = casts(view)
    with (
        pytest.raises(fxamp.CaptureError, match="is frozen, here"),
        fxamp.frozen(view),
        fxamp.frozen(view),
    ):
        pass
    assert casts(view) == before


def test_only_a_view_can_be_frozen() -> None:
    with pytest.raises(fxamp.NotAModuleError, match=r"fxamp\.convert"), fxamp.frozen(LeNet5()):
        pass


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, saved])
def test_a_copy_is_not_frozen(copied: Callable[[Any], Any]) -> None:
    view = lenet()
    expected = view(X)
    with torch.no_grad(), fxamp.frozen(view):
        other = copied(view)
        other.get_parameter("fc3.weight").data.mul_(2)
        assert not torch.equal(other(X), expected)


def test_copies_die_with_the_region() -> None:
    view = lenet()
    with torch.no_grad(), contextlib.ExitStack() as stack:
        stack.enter_context(fxamp.frozen(view))
        opened = runner_of(view).opened()
        assert opened is not None
        assert len(opened) == 10
        del opened
    assert runner_of(view).opened() is None
