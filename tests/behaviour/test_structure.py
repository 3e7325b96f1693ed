"""How a model is put together makes no difference: layers used twice, graph modules, sizes that data decides."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.support.front_ends import (
    F32,
    FRESH,
    Case,
    assert_at_all_levels,
    check,
    colours,
    convert,
    converted,
    decided,
    each_front_end,
    each_low,
    legs,
    o1,
    one,
    under_autocast,
)
from tests.support.helpers import Two

pytestmark = FRESH


def called_twice(self: Any, x: Tensor) -> Any:
    return self.l(F.layer_norm(self.l(x), (6,)).exp()), self.l(x.double().float())


def constants(self: Any, x: Tensor) -> Any:
    return self.l(torch.ones(6) + x) + torch.zeros(6, dtype=F32) + torch.arange(6) + torch.full((6,), 0.1)


def any_count(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    keep = x > 0
    return y[keep], x.nonzero(), self.m(y[keep.any(1)]), torch.unique(x > 0)


def channels_last(self: Any, x: Tensor) -> Any:
    y = self.c(x.view(2, 2, 2, 3).to(memory_format=torch.channels_last))
    return y, y.contiguous().view(2, -1), y.permute(0, 2, 3, 1).reshape(-1, 6), y.float().half()


CASES = {
    "constants": Case(partial(Two, constants), one, legs=("view",)),
    "called twice": Case(partial(Two, called_twice), one, legs=("view",)),
    "any count": Case(partial(Two, any_count), one, legs=("view",)),
    "channels last": Case(partial(Two, channels_last, c=nn.Conv2d(2, 6, 1)), one),
}


@pytest.mark.parametrize(("case", "front_end"), legs(CASES))
def test_every_structure_of_a_model_is_converted(case: str, front_end: str) -> None:
    check(CASES[case], front_end)


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_a_graph_module_inside_is_converted(front_end: str) -> None:
    inner = fx.symbolic_trace(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    model, module = converted(lambda self, x: self.m(self.inner(x)), front_end, inner=inner)
    assert decided(module, "linear") == ["bfloat16", "bfloat16"]
    assert torch.equal(module(*one()), under_autocast(model, one()).float())


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_keys_do_not_move_when_another_layer_comes_in(front_end: str) -> None:
    def more(self: Any, x: Tensor) -> Any:
        return self.m(torch.tanh(self.extra(self.l(x))))

    first, _ = o1(Two(), one(), front_end)
    second, _ = o1(Two(more, extra=nn.Linear(6, 6)), one(), front_end)
    assert set(colours(second)) - set(colours(first)) == {"extra/linear#0", "/tanh#0"}
    assert set(colours(first)) == {"l/linear#0", "m/linear#0"}


def test_hooks_of_a_container_take_effect_and_see_what_autocast_gives() -> None:
    seen: list[torch.dtype] = []

    def treble(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seen.append(output.dtype)
        return output * 3

    inner = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model = nn.Sequential(inner, nn.Linear(6, 6))
    inner.register_forward_hook(treble)
    module = convert(model)
    assert torch.equal(module(*one()), under_autocast(model, one()).float())
    assert seen[0] == torch.bfloat16
    assert module.state_dict().keys() == model.state_dict().keys()


@pytest.mark.default_case(front_end="view", name="bf16", low=torch.bfloat16)
@each_low("view", "graph")
def test_a_size_that_the_data_decide_is_no_obstacle(front_end: str, name: str, low: torch.dtype) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return torch.masked_select(self.l(x), x > 0) * 2

    assert_at_all_levels(Two(forward), one(), front_end, name, low)
