"""Numbers in a model keep their meaning: those out of the low range, masks, scales, positions, tiny eps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxamp
from tests.support.front_ends import (
    BF16,
    FP16,
    WARNINGS,
    Case,
    assert_eager,
    at_levels,
    casts,
    check,
    convert,
    decided,
    each_front_end,
    fresh,
    legs,
    o1,
    one,
    plain,
    under_autocast,
)
from tests.support.helpers import Two, example

pytestmark = [*WARNINGS, pytest.mark.usefixtures("fresh")]
__all__ = ["fresh"]


def numbers_out_of_range(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    return self.m((y + 1e5) - 1e5), torch.where(y > 0, y, -1e9).clamp(max=1e6)


class Scales(Two):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__(forward)
        self.register_buffer("scalar", torch.tensor(1.1))
        self.register_buffer("one", torch.tensor([1.1]))
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("queue", torch.zeros(4, 6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def scalar_and_vector(self: Any, x: Tensor) -> Any:
    return self.m(self.l(x) * self.scalar), self.m(self.l(x) * self.one)


CASES = {
    "out of range": Case(partial(Two, numbers_out_of_range), one),
    "0-dim and 1-D scales": Case(partial(Scales, scalar_and_vector), one),
}


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
    module, _ = o1(Scales(scalar_and_vector), one(), front_end)
    assert decided(module, "mul") == ["bfloat16", "float32"]


@each_front_end
def test_large_positions_stay_apart_until_they_are_bounded(front_end: str) -> None:
    def rotary(self: Any, x: Tensor) -> Any:
        positions = torch.arange(2000, 2004).float()[:, None]
        angle = positions * self.one
        return self.l(x) * torch.cat([angle.sin(), angle.cos()] * 3, -1)

    model = Scales(rotary)
    for made in at_levels(model, one(), front_end, "O1", "O2"):
        module = made()
        assert (plain(module, one()) - plain(model, one())).abs().max() < 0.05
        assert decided(module, "mul")[0] == "float32"


@each_front_end
def test_a_tiny_eps_is_not_lost_at_o2(front_end: str) -> None:
    def norm(self: Any, x: Tensor) -> Any:
        y = self.l(x) * 0
        return self.m(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-8)), y / (y.abs() + 1e-9)

    model = Two(norm)
    _, got = o1(model, one(), front_end, "O2,dtype=fp16")
    for ours, eager in zip(got, plain(model, one()), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0.01, atol=0.01)


def masks(self: Any, x: Tensor) -> dict[str, Tensor]:
    y, mask = self.l(x), torch.ones(4, 6).tril(2).bool()
    mask = mask & (x[:, :1] > -0.2)  # the last row is masked altogether
    out: dict[str, Tensor] = {}
    for name, value in (("-1e9", -1e9), ("finfo", torch.finfo(x.dtype).min), ("-inf", float("-inf"))):
        fill = torch.full((4, 6), value)
        scores = {
            "masked_fill": y.masked_fill(~mask, value),
            "where": torch.where(mask, y, value),
            "where full": torch.where(mask, y, fill),
            "add": y + torch.zeros(4, 6).masked_fill(~mask, value),
            "pad": F.pad(y, (0, 2), value=value),
            "clamp": y.clamp(min=value),
        }
        out |= {f"{name} {spelling}": torch.softmax(s, -1) for spelling, s in scores.items()}
        written = y * 1
        written.masked_fill_(~mask, value)
        out[f"{name} masked_fill_"] = torch.softmax(written, -1)
    return out


@pytest.mark.parametrize("front_end", ["view", "graph"])  # fx refuses torch.finfo(x.dtype): see test_preflight.py
def test_a_mask_is_a_mask_however_it_is_spelled(front_end: str) -> None:
    model = Two(masks)
    x = example()
    x[:3, 0], x[3, 0] = 0.0, -1.0
    with torch.no_grad():
        exact = model(x)
    for made in at_levels(model, (x,), front_end, "O1,dtype=bf16", "O1,dtype=fp16"):
        module = made()
        with torch.no_grad():
            got = module(x)
        for name, expected in exact.items():
            close = torch.isclose(got[name], expected, rtol=0.03, atol=0.01, equal_nan=True)
            assert close.all(), name  # NaN where FP32 has it: rows of -inf alone


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
    model = Scales(lambda self, x: (torch.where(x > 0, self.l(x), self.scalar), self.l(x) * self.average))
    model.register_buffer("scalar", torch.tensor(torch.finfo(torch.float32).min))
    ranges = {d.op: d.ranges for d in fxamp.plan_of(convert(model, one(), front_end)).decisions}
    assert [text.partition(": ")[2] for text in ranges["where"]] == ["-3.40282e+38"]
    assert "scalar" in ranges["where"][0]
    assert ranges["mul"] == ranges["linear"] == ()
