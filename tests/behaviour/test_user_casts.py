"""Dtypes that the user's code names are kept: casts, literal and relative, and dtype arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from passes.graph.notes import is_inserted
from tests.support.front_ends import (
    BF16,
    F32,
    FP16,
    FRESH,
    Case,
    at_levels,
    check,
    convert,
    converted,
    decided,
    each_front_end,
    legs,
    o1,
    one,
    plain,
    under_autocast,
)
from tests.support.helpers import Layers, Two, assert_same, example, run

pytestmark = FRESH


def casts_of_every_spelling(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    return y.half(), y.bfloat16().float(), y.double(), y.to(torch.float16).to(F32), y.type(torch.float64), y.to(x)


def casts_to_named_types(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    return y.type("torch.DoubleTensor"), self.m(y.type(dtype="torch.FloatTensor")), y.type("torch.LongTensor")


def a_cast_that_is_returned_and_read(self: Any, x: Tensor) -> Any:
    low = self.l(x).to(BF16)
    return low, self.m(low.float())


def a_cast_by_name_that_is_returned(self: Any, x: Tensor) -> Any:
    low = self.l(x).bfloat16()
    return low, self.m(low.float())


def moves_that_are_no_casts(self: Any, x: Tensor) -> Any:
    return self.m(self.l(x).to("cpu").to(memory_format=torch.contiguous_format).contiguous())


def relative_casts(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    h = y.float().pow(2).mean(-1, keepdim=True).type_as(y)
    return self.m(y * h.to(y.dtype)) + h.to(y)


def dtype_arguments(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    wide = torch.softmax(y, -1, dtype=F32) + y.sum(-1, keepdim=True, dtype=F32) + y.cumsum(0, dtype=F32)
    return wide, y.mean(0, dtype=torch.float64), torch.zeros_like(y, dtype=torch.float64), y.prod(-1, dtype=F32)


def half_meets_bfloat16(self: Any, x: Tensor) -> Any:
    return self.l(x).half() + self.m(x), self.m(self.l(x).half().float())


CASES = {
    "of every spelling": Case(partial(Two, casts_of_every_spelling), one),
    "to named types": Case(partial(Two, casts_to_named_types), one),
    # Just in time the dtype of what is returned tells no cast to a dtype from one that restores a dtype.
    "returned and read": Case(partial(Two, a_cast_that_is_returned_and_read), one, legs=("graph",)),
    "by name and returned": Case(partial(Two, a_cast_by_name_that_is_returned), one),
    "no casts but moves": Case(partial(Two, moves_that_are_no_casts), one),
    "relative": Case(partial(Two, relative_casts), one),
    "dtype arguments": Case(partial(Two, dtype_arguments), one),
    "fp16 meets bf16": Case(partial(Two, half_meets_bfloat16), one),
}


@pytest.mark.parametrize(("case", "front_end"), legs(CASES))
def test_casts_of_the_author_are_kept(case: str, front_end: str) -> None:
    check(CASES[case], front_end)


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_a_cast_that_does_nothing_shares_memory_as_before(front_end: str) -> None:
    def write(self: Any, x: Tensor) -> Any:
        y = self.l(x)
        wide = y.float()
        wide.add_(1)
        return self.m(y * 2)

    model = Two(write)
    _, got = o1(model, one(), front_end)
    torch.testing.assert_close(got, plain(model, one()), rtol=0.02, atol=0.02)


RELATIVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "to(x.dtype)": lambda y, x: y.to(x.dtype), "to(dtype=)": lambda y, x: y.to(dtype=x.dtype, device=x.device),
    "to(x)": lambda y, x: y.to(x), "type(x.dtype)": lambda y, x: y.type(x.dtype),
    "type_as(x)": lambda y, x: y.type_as(x),
}  # fmt: skip


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_a_relative_cast_that_does_nothing_shares_memory_as_before(front_end: str) -> None:
    def write(self: Any, x: Tensor) -> dict[str, Any]:
        out = {}
        for spelling, cast in RELATIVE.items():
            y = self.l(x)
            cast(y, x).mul_(2)
            out[spelling] = self.m(y)
        return out

    torch.manual_seed(0)
    model = Two(write)
    eager, gradients, *_ = run(model, model, one(), {})
    for made in at_levels(model, one(), front_end, "O1", "O3"):
        got, ours, *_ = run(made(), model, one(), {})
        torch.testing.assert_close(got, eager, rtol=0.02, atol=0.02)
        torch.testing.assert_close(ours, gradients, rtol=0.02, atol=0.02 * len(RELATIVE))  # of all of them together


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_the_two_low_dtypes_meet_in_fp32(front_end: str) -> None:
    module, _ = o1(Two(half_meets_bfloat16), one(), front_end)
    assert decided(module, "add") == ["float32"]
    for graph in fxamp.graphs(module):  # nothing is rounded to one and then to the other
        for node in graph.graph.nodes:
            if is_inserted(node) and node.all_input_nodes:
                source = node.all_input_nodes[0].meta.get("val")
                assert source is None or {source.dtype, node.meta["val"].dtype} != {FP16, BF16}


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_a_move_to_a_device_or_format_is_no_cast(front_end: str) -> None:
    module, got = o1(Two(moves_that_are_no_casts), one(), front_end)
    assert decided(module, "linear") == ["bfloat16", "bfloat16"]
    assert set(decided(module, "to")) <= {"bfloat16"}
    assert got.dtype == F32


def test_one_layer_may_run_in_two_dtypes() -> None:
    def twice(self: Any, x: Tensor) -> Any:
        return self.l(x), (x.float() @ self.l.weight.float())

    model = Two(twice)
    module, got = o1(model, one(), "view")
    assert torch.equal(got[1], plain(model, one())[1])
    assert (decided(module, "linear"), decided(module, "matmul")) == (["bfloat16"], ["float32"])


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_matrix_products_of_what_the_author_upcast_stay_fp32(front_end: str) -> None:
    def rotary(self: Any, x: Tensor) -> Tensor:
        positions = 65536 + torch.arange(8)
        f = self.l.bias.float()[:, None] @ positions.float()[None]
        return torch.cat([f.sin(), f.cos()], -1) + self.m(x).sum() * 0

    model = Two(rotary)
    module = convert(model, one(), front_end)
    assert torch.equal(module(*one()), model(*one()))
    assert [d.code for d in fxamp.plan_of(module).decisions if d.op == "matmul"] == ["user_cast"]
    assert decided(module, "linear") == ["bfloat16"]


@pytest.mark.default_case(front_end="graph")
@pytest.mark.parametrize("front_end", ["view", "graph"])
def test_a_cast_that_does_nothing_under_autocast_is_no_upcast(front_end: str) -> None:
    def routed(self: Any, x: Tensor) -> Tensor:
        y = self.m(x) * self.l.bias  # FP32 under autocast, as the last product of a norm is
        return torch.nn.functional.linear(y.type(F32), self.l.weight.type(F32))

    model = Two(routed)
    module = convert(model, one(), front_end)
    with torch.autocast("cpu", BF16):
        assert torch.equal(module(*one()), model(*one()).float())
    assert decided(module, "linear") == ["bfloat16"] * 2


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_a_relative_cast_to_fp32_does_not_restore_what_the_author_made_low(front_end: str) -> None:
    def distances(self: Any, x: Tensor) -> Any:
        wide = x.to(BF16).to(F32)
        return torch.cdist(x, wide).type(wide.dtype), self.l(x)

    model, module = converted(distances, front_end)
    assert torch.equal(module(*one())[0], under_autocast(model, one())[0])


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_the_other_low_dtype_is_no_reason_to_fail_or_to_round_again(front_end: str) -> None:
    def island(self: Any, x: Tensor) -> Any:
        other = self.l(x).bfloat16()
        return other + self.m(x), torch.cat([other.float(), self.m(x)]), other @ other.t()

    model, module = converted(island, front_end, "O1,dtype=fp16")
    got, expected = module(*one()), model(*one())
    assert_same([t.dtype for t in got], [t.dtype for t in expected])
    for ours, eager in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=0.02, atol=0.03)
    matmul = next(d for d in fxamp.plan_of(module).decisions if d.op == "matmul")
    assert (matmul.colour, matmul.code) in {("float32", "user_cast"), ("bfloat16", "user_cast")}


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_an_explicit_dtype_wins_at_every_level(front_end: str) -> None:
    def explicit(self: Any, x: Tensor) -> Any:
        y = self.l(x)
        return torch.softmax(y, -1, dtype=F32).sum(-1, dtype=torch.float64), y.cumsum(1, dtype=F32)

    torch.manual_seed(0)
    model = Two(explicit)
    for level, made in zip(("O1", "O2", "O3"), at_levels(model, one(), front_end, "O1", "O2", "O3"), strict=True):
        module = made()
        got = module(*one())
        assert [t.dtype for t in got] == [torch.float64, F32]
        assert set(decided(module, "softmax")) == {"float32"}
        assert (got[0] - 1).abs().max() < (1e-6 if level != "O3" else 0.01)  # O3 may round what a sum is given


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_a_round_trip_that_the_author_wrote_rounds(front_end: str) -> None:
    def rounded(self: Any, x: Tensor) -> Any:
        return x.to(BF16).float(), x.half().float(), self.l(x)

    for made in at_levels(Two(rounded), one(), front_end, "O1", "O2", "O3"):
        got = made()(*one())
        for ours, low in zip(got[:2], (BF16, FP16), strict=True):
            assert torch.equal(ours, example().to(low).float())
            assert not torch.equal(ours, example())


@pytest.mark.default_case(level="O3")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_cast_that_does_nothing_in_a_no_grad_region_keeps_its_gradient(level: str) -> None:
    def outer(self: Any, x: Tensor) -> Tensor:
        made = torch.outer(self.gain, x)
        with torch.no_grad():  # of an FP32 value the cast returns the value itself, and its gradient with it
            return made.float()

    model, x = Layers(outer, gain=nn.Parameter(torch.ones(6))), torch.randn(6)
    fxamp.convert(model, (x,), policy=f"{level},dtype=bf16")(x).sum().backward()
    gradient = model.get_parameter("gain").grad
    assert gradient is not None
    assert torch.allclose(gradient, x.sum().expand(6), rtol=0.02)
