"""Values that are not FP32 stay what they are: integers, booleans, double precision, complex numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from tests.support.front_ends import (
    FRESH,
    FRONT_ENDS,
    Case,
    assert_at_all_levels,
    at_levels,
    casts,
    check,
    convert,
    converted,
    decided,
    each_front_end,
    each_low,
    legs,
    o1,
    one,
    plain,
)
from tests.support.helpers import Two, assert_same, example

pytestmark = FRESH


def two() -> tuple[Tensor, Tensor]:
    return example(), example(4).flip(0)


def integers_and_booleans(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    best = y.argmax(-1)
    rows = y.gather(1, best[:, None]) + F.one_hot(best, 6).sum() + F.embedding(best, self.m.weight)
    return best, y > 0, rows, y[torch.tensor([2, 0])], best.cumsum(0)


def wide_branch(self: Any, x: Tensor) -> Any:
    return self.l(x), (x.double() @ x.double().t()).exp() + 1, self.m(x).double() * 2


def complex_rotation(self: Any, x: Tensor) -> Any:
    q = torch.view_as_complex(self.l(x).reshape(-1, 3, 2))
    turn = torch.polar(torch.ones(3), torch.arange(3.0))
    return self.m(torch.view_as_real(q * turn).flatten(1)), q.detach()


def complex_output(self: Any, x: Tensor) -> Any:
    z = torch.complex(self.l(x), self.m(x))
    w = torch.fft.fft(self.l(x)) + torch.view_as_complex(self.m(x).reshape(-1, 3, 2)).sum()
    return z @ z.mH, w @ w.t(), z * 2j, self.m((w @ w.mH).real[:, :1] + w.abs()), torch.stack([z, w]).mean(0), z.imag


def complex_input(self: Any, x: Tensor) -> Any:
    return x @ x.mH, x.T @ x, self.m(self.l(x.real) * x.imag)


def decisions_on_fp32_values(self: Any, x: Tensor) -> Any:
    z = x / 3
    values, indices = z.topk(2)
    return self.l(z), z.argmax(-1), indices, values, z > 0.1, z.round(), torch.bucketize(z, torch.linspace(-1, 1, 9))


CASES = {
    "integers and booleans": Case(partial(Two, integers_and_booleans), one),
    "float64": Case(partial(Two, wide_branch), one),
    "complex": Case(partial(Two, complex_rotation), one),
    "complex output": Case(partial(Two, complex_output), one),
    "complex input": Case(partial(Two, complex_input), lambda: (torch.complex(*two()),)),
    "decisions on FP32 values": Case(partial(Two, decisions_on_fp32_values), one),
}


@pytest.mark.parametrize(("case", "front_end"), legs(CASES))
def test_values_of_other_dtypes_are_left_alone(case: str, front_end: str) -> None:
    check(CASES[case], front_end)


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_decisions_are_taken_on_fp32_values_at_every_level(front_end: str) -> None:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))

    def choose(self: Any, x: Tensor) -> Any:
        z = x / 3
        return self.l(z), z.argmax(-1), z.topk(2).indices, z > 0.3333, torch.bucketize(z, torch.linspace(-1, 1, 99))

    model = Two(choose)
    for made in at_levels(model, (x,), front_end, "O1", "O2"):
        module = made()
        got = plain(module, (x,))
        assert_same(got[1:], plain(model, (x,))[1:])
        assert decided(module, "linear") == ["bfloat16"]


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_complex_numbers_and_double_precision_are_left_alone(front_end: str) -> None:
    def mixed(self: Any, x: Tensor) -> Any:
        return complex_rotation(self, x)[1], wide_branch(self, x)[1]

    model = Two(mixed)
    exact = plain(model, one())
    for made in at_levels(model, one(), front_end, "O1", "O2", "O3"):
        q, wide = plain(made(), one())
        assert (q.dtype, wide.dtype) == (torch.complex64, torch.float64)
        assert torch.equal(wide, exact[1])
        torch.testing.assert_close(q, exact[0], rtol=0.02, atol=0.02)


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_a_sparse_matrix_multiplies_in_one_dtype(front_end: str) -> None:
    model = Two(lambda self, x: self.m(torch.sparse.mm(self.near, self.l(x))), near=torch.eye(4).to_sparse())
    _, got = o1(model, one(), front_end)
    torch.testing.assert_close(got, plain(model, one()), rtol=0.03, atol=0.03)


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_indices_are_not_cast(front_end: str) -> None:
    def lookup(self: Any, x: Tensor) -> Any:
        ids = torch.tensor([[300, 301], [2, 1]])
        rows = F.embedding(ids, self.table.weight)
        return rows.gather(1, ids[:, :, None] % 2), F.one_hot(ids % 5, 5), self.l(x)[ids % 4], ids + 0

    model = Two(lookup, table=nn.Embedding(302, 6))
    for made in at_levels(model, one(), front_end, "O1", "O2", "O3"):
        module = made()
        got = module(*one())
        assert torch.equal(got[3], torch.tensor([[300, 301], [2, 1]]))
        assert (got[1].dtype, got[3].dtype) == (torch.int64, torch.int64)
        for node in casts(module):
            held = node.all_input_nodes[0].meta.get("val")
            assert held is None or held.is_floating_point()


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_a_product_in_double_precision_is_left_alone_and_the_plan_says_so(front_end: str) -> None:
    model, module = converted(lambda self, x: (self.l(x), x.double() @ self.m.weight.double()), front_end)
    assert torch.equal(module(*one())[1], model(*one())[1])
    decision = next(d for d in fxamp.plan_of(module).decisions if d.op == "matmul")
    assert (decision.colour, decision.code) == ("float64", "float64")


@pytest.mark.default_case(front_end="graph", name="bf16", low=torch.bfloat16)
@pytest.mark.filterwarnings("ignore:ComplexHalf support")  # autocast makes such
@each_low(*FRONT_ENDS)
def test_complex_numbers_are_made_from_low_values(front_end: str, name: str, low: torch.dtype) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return (1j * self.l(x)).imag, (1j * self.m(x) + 2).abs()

    torch.manual_seed(0)
    model, args = Two(forward), one()
    assert_at_all_levels(model, args, front_end, name, low)


def by_integers(self: Any, x: Tensor) -> Any:
    return self.m(self.l(x) @ (self.integers.to(x.dtype) * self.scale).t())


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_quantized_weights_stay_integers(front_end: str) -> None:
    torch.manual_seed(0)
    integers = torch.arange(-18, 18, dtype=torch.int8).view(6, 6)
    model = Two(by_integers, integers=integers, scale=torch.full((6, 1), 0.05))
    module = convert(model, one(), front_end)
    torch.testing.assert_close(module(*one()), model(*one()), rtol=0.03, atol=0.03)
    assert torch.equal(model.get_buffer("integers").flatten(), torch.arange(-18, 18, dtype=torch.int8))
    assert decided(module, "matmul") == ["bfloat16"]


@pytest.mark.default_case(front_end="view")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@each_front_end
def test_complex_numbers_of_an_fp16_input_come_out_as_the_model_gives_them(front_end: str) -> None:
    def turned(self: Any, x: Tensor) -> Any:
        return self.l(x.float()), torch.view_as_complex(x.reshape(-1, 3, 2))  # which autocast casts up

    model, args = Two(turned), (example().half(),)
    for made in at_levels(model, args, front_end, "O1,dtype=fp16", "O2,dtype=fp16"):
        assert [t.dtype for t in made()(*args)] == [t.dtype for t in model(*args)]
