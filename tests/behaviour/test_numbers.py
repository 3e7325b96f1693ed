"""Numbers in a model keep their meaning: those out of the low range, masks, scales, positions, tiny eps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fxamp
from tests.support.front_ends import (
    BF16,
    FP16,
    FRESH,
    Case,
    assert_eager,
    at_levels,
    casts,
    check,
    convert,
    decided,
    each_front_end,
    legs,
    o1,
    one,
    plain,
    under_autocast,
)
from tests.support.helpers import Two, example

pytestmark = FRESH


def numbers_out_of_range(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    return self.m((y + 1e5) - 1e5), torch.where(y > 0, y, -1e9).clamp(max=1e6)


def scalar_and_vector(self: Any, x: Tensor) -> Any:
    return self.m(self.l(x) * self.scalar), self.m(self.l(x) * self.one)


def scales() -> Two:
    return Two(scalar_and_vector, scalar=torch.tensor(1.1), one=torch.tensor([1.1]))


CASES = {"out of range": Case(partial(Two, numbers_out_of_range), one), "0-dim and 1-D scales": Case(scales, one)}


@pytest.mark.parametrize(("case", "front_end"), legs(CASES))
def test_numbers_are_those_of_the_model(case: str, front_end: str) -> None:
    check(CASES[case], front_end)


@each_front_end
def test_a_number_out_of_range_stays_and_its_op_runs_in_fp32(front_end: str) -> None:
    model = Two(numbers_out_of_range)
    module, got = o1(model, one(), front_end, "O1,dtype=fp16")
    assert all(t.isfinite().all() for t in got)
    exact = plain(model, one())
    assert torch.equal(got[1] == -1e9, exact[1] == -1e9)
    torch.testing.assert_close(got[0], exact[0], rtol=0.05, atol=0.05)
    codes = {d.op: d.code for d in fxamp.plan_of(module).decisions if d.colour == "float32"}
    assert codes["add"] == codes["where"] == "literal"


@each_front_end
def test_a_scale_of_no_dimension_promotes_nothing_and_one_of_one_does(front_end: str) -> None:
    module, _ = o1(scales(), one(), front_end)
    assert decided(module, "mul") == ["bfloat16", "float32"]


@each_front_end
def test_small_fp32_operands_follow_the_activation_at_o2(front_end: str) -> None:
    def chain(self: Any, x: Tensor) -> Tensor:
        return ((x @ self.l.weight + self.l.bias) * self.m.bias) @ self.m.weight

    model = Two(chain)
    x = (example(8192),)  # large enough that casting it costs more than two launches
    module = convert(model, x, front_end, "O2,output_dtype=low")
    got = module(*x)
    assert {(d.op, d.colour) for d in fxamp.plan_of(module).decisions} == {
        (op, "bfloat16") for op in ("matmul", "add", "mul")
    }
    assert all(n.args[1] == BF16 for n in casts(module))
    torch.testing.assert_close(got.float(), model(*x), rtol=0.05, atol=0.03)


@each_front_end
def test_a_weight_out_of_range_is_not_clipped(front_end: str) -> None:
    torch.manual_seed(0)
    model = Two(lambda self, x: self.l(x))
    with torch.no_grad():
        model.l.weight[0, 0] = 7e4
    x = example()
    module = convert(model, (x,), front_end, "O1,dtype=fp16")
    with torch.no_grad():
        assert torch.equal(module(x), under_autocast(model, (x,), FP16).float())
    assert model.l.weight[0, 0].item() == 7e4
    torch._dynamo.reset()
    kept = convert(model, (x,), front_end, "O1,dtype=fp16,modules.l=fp32")
    assert torch.equal(kept(x), model(x))


@each_front_end
@pytest.mark.parametrize(
    "policy", ["O2", "O3", *(pytest.param(p, marks=pytest.mark.matrix) for p in ("O1", "O3,dtype=fp16"))]
)
def test_integers_times_frequencies_are_positions(front_end: str, policy: str) -> None:
    def rotary(self: Any, x: Tensor) -> Any:
        angles = (torch.arange(4)[:, None] + 3000) * torch.tensor([1.0, 0.5, 0.25])
        return self.l(x)[:, :3] * angles.sin()

    torch.manual_seed(0)
    model, args = Two(rotary), one()
    exact, rounded = at_levels(model, args, front_end, "O0", policy)
    assert_eager(exact(), model, args)
    with torch.no_grad():
        torch.testing.assert_close(rounded()(*args), model(*args), rtol=0.02, atol=0.02)


@each_front_end
def test_what_a_buffer_held_is_in_the_plan_where_it_decided(front_end: str) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return torch.where(x > 0, self.l(x), self.scalar), self.l(x) * self.average

    model = Two(forward, scalar=torch.tensor(torch.finfo(torch.float32).min), average=torch.zeros(6))
    ranges = {d.op: d.ranges for d in fxamp.plan_of(convert(model, one(), front_end)).decisions}
    assert [text.partition(": ")[2] for text in ranges["where"]] == ["-3.40282e+38"]
    assert "scalar" in ranges["where"][0]
    assert ranges["mul"] == ranges["linear"] == ()
