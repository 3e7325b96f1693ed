"""Random numbers are those that the model draws, in its dtype."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.front_ends import (
    FRESH,
    Case,
    assert_eager,
    at_levels,
    check,
    decided,
    each_front_end,
    legs,
    o1,
    one,
    plain,
    under_autocast,
)
from tests.support.helpers import Two, assert_same

pytestmark = FRESH


def dropped(self: Any, x: Tensor) -> Any:
    return self.m(F.dropout(self.l(x), 0.5)), torch.bernoulli(torch.full((4,), 0.5))


CASES = {"dropout": Case(partial(Two, dropped), one, legs=("view",))}


@pytest.mark.parametrize(("case", "front_end"), legs(CASES))
def test_what_is_drawn_is_what_the_model_draws(case: str, front_end: str) -> None:
    check(CASES[case], front_end)


def noise_like(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    return torch.rand_like(y), torch.randn_like(y), y.new_zeros(2), torch.rand(3)


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_noise_is_drawn_in_the_dtype_of_the_model(front_end: str) -> None:
    model = Two(noise_like)
    module, got = o1(model, one(), front_end)
    assert_same(got, plain(model, one()))
    assert decided(module, "linear") == ["bfloat16"]
    assert not torch.equal(under_autocast(model, one())[0].float(), got[0])


@pytest.mark.default_case(policy="O3", front_end="graph")
@each_front_end
@pytest.mark.parametrize(
    "policy", ["O1", "O3", *(pytest.param(p, marks=pytest.mark.matrix) for p in ("O2", "O1,dtype=fp16"))]
)
def test_random_fills_draw_what_the_model_drew(front_end: str, policy: str) -> None:
    def noise(self: Any, x: Tensor) -> Any:
        y = self.l(x)
        whole = y.new_empty(4, 6)
        # Dynamo leaves `random_` to Python, which draws under autocast what autocast draws.
        whole = whole.fill_(3) if front_end == "view" else whole.random_()
        made = torch.empty_like(y).normal_(), whole, y.new_empty(4, 6).uniform_()
        return (*made, y.new_empty(4, 6).log_normal_(), y.new_empty(4, 6).cauchy_(), y.new_empty(4, 6).bernoulli_(0.5))

    model, args = Two(noise), one()
    exact, rounded = at_levels(model, args, front_end, "O0", policy)
    assert_eager(exact(), model, args)
    module = rounded()
    torch.manual_seed(0)
    got, state = module(*args), torch.get_rng_state()
    torch.manual_seed(0)
    wanted = model(*args)
    assert torch.equal(state, torch.get_rng_state())
    assert_same(got[:2], wanted[:2])
    torch.testing.assert_close(got, wanted, rtol=0.01, atol=0.01)
