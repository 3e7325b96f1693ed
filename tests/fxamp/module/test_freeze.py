"""Weights cast once for inference, and the module as it was afterwards."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import fxamp
from fxamp.measure.counts import _Counter
from reports.zoo import LeNet5
from tests.support.helpers import convert_fixed

X = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def module() -> fxamp.ConvertedModule:
    torch.manual_seed(0)
    return convert_fixed(LeNet5(), (X,))


def casts(module: nn.Module) -> int:
    with torch.no_grad(), _Counter() as counter:
        module(X)
    return counter.casts


def test_frozen_weights_are_cast_once_and_give_the_same_values(module: fxamp.ConvertedModule) -> None:
    before, keys, expected = casts(module), list(module.state_dict()), module(X)
    with fxamp.frozen(module) as frozen:
        assert frozen is module
        assert casts(frozen) == before - 10
        assert torch.equal(frozen(X), expected)
        assert list(frozen.state_dict()) == keys
    assert casts(module) == before
    assert torch.equal(module(X), expected)


def test_an_edit_is_seen_outside_and_not_inside(module: fxamp.ConvertedModule) -> None:
    weight = module.get_parameter("fc3.weight")
    before = module(X)
    with fxamp.frozen(module):
        weight.data.mul_(2)
        assert torch.equal(module(X), before)
    assert not torch.equal(module(X), before)
    weight.data.div_(2)
    assert torch.equal(module(X), before)


def test_an_error_inside_leaves_the_module_as_it_was(module: fxamp.ConvertedModule) -> None:
    before = casts(module)
    with pytest.raises(fxamp.CaptureError, match="frozen already"), fxamp.frozen(module), fxamp.frozen(module):
        pass
    assert casts(module) == before


def test_only_a_converted_module_can_be_frozen() -> None:
    with pytest.raises(fxamp.NotAModuleError, match=r"fxamp\.convert"), fxamp.frozen(LeNet5()):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied_with_its_frozen_weights(copied: Any) -> None:
    converted = convert_fixed(nn.Linear(4, 4), (torch.randn(2, 4),))
    with fxamp.frozen(converted), pytest.raises(fxamp.CaptureError, match="copy or save it outside"):
        copied(converted)
    copied(converted)
