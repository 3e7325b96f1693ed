"""Ops and models of several outputs: each has the dtype and the container that the model gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.front_ends import (
    F32,
    FRESH,
    Case,
    assert_as_autocast,
    assert_eager,
    at_levels,
    check,
    convert,
    each_front_end,
    legs,
    one,
    tensors,
)
from tests.support.helpers import Two

pytestmark = FRESH


def several_outputs(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    a, b, c = y.split(2, 1)
    values, indices = y.max(1)
    u = y.unbind(0)[1]
    return self.m(torch.cat([a, c, b], 1)), values, indices, u, y.topk(2), {"median": y.median(0), "none": None}


def inputs_and_views_returned(self: Any, x: Tensor) -> Any:
    return x, x.t(), self.l(x), None, 3


AMINMAX_HAS_A_DERIVATIVE = torch.__version__ >= "2.13"
FIELDS: dict[str, Callable[[Tensor], Any]] = {
    "max": lambda y: y.max(1).values, "min": lambda y: torch.min(y, 1).values, "sort": lambda y: y.sort(1).values,
    "median": lambda y: y.median(1).values, "mode": lambda y: y.mode(1).values, "cummax": lambda y: y.cummax(1).values,
    "cummin": lambda y: torch.cummin(y, dim=1).values, "topk": lambda y: y.topk(2).values,
    "kthvalue": lambda y: y.kthvalue(2, 1).values, "aminmax": lambda y: y.aminmax(dim=1).max,
    "indices": lambda y: torch.max(y, 1).indices, "svd": lambda y: torch.linalg.svd(y).S,
}  # fmt: skip


if not AMINMAX_HAS_A_DERIVATIVE:
    del FIELDS["aminmax"]


class Only(nn.Module):
    """One of the outputs of a model, by its key."""

    def __init__(self, model: nn.Module, key: str) -> None:
        super().__init__()
        self.model, self.key = model, key

    def forward(self, *args: Any) -> Any:
        return self.model(*args)[self.key]


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_a_field_of_what_an_op_returns_has_the_dtype_of_the_model(front_end: str) -> None:
    model = Two(lambda self, x: {op: field(self.l(x)) for op, field in FIELDS.items()})
    exact, rounded = (made() for made in at_levels(model, one(), front_end, "O0", "O1"))
    assert_eager(exact, model, one())
    for op in FIELDS:
        assert_as_autocast(Only(rounded, op), Only(model, op), one())


def many_outputs(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    normed, mean, rstd = torch.native_layer_norm(y, [6], None, None, 1e-5)
    variance, average = torch.var_mean(y, 1)
    ordered, order = torch.sort(y, 1)
    a, b = y.chunk(2, 1)
    first, second = y.unbind(0)[0], y.unbind(0)[1]
    smallest, largest = torch.aminmax(y if AMINMAX_HAS_A_DERIVATIVE else y.detach())
    kth, where = y.kthvalue(2, 1)
    statistics = mean, rstd, variance, average, smallest, largest
    return self.m(normed), statistics, ordered, order, a @ b.mT, first, second, kth, where


CASES = {
    "several outputs": Case(partial(Two, several_outputs), one),
    "inputs and views returned": Case(partial(Two, inputs_and_views_returned), one, legs=("view",)),
    "of one op": Case(partial(Two, many_outputs), one),
}


@pytest.mark.parametrize(("case", "front_end"), legs(CASES))
def test_a_model_of_several_outputs_gives_them_all(case: str, front_end: str) -> None:
    check(CASES[case], front_end)


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_outputs_come_in_their_container_and_dtype(front_end: str) -> None:
    def outputs(self: Any, x: Tensor) -> Any:
        y = self.l(x)
        return {"y": y, "ids": y.argmax(-1), "pair": (y > 0, [self.m(y)]), "none": None, "three": 3}

    model = Two(outputs)
    got, expected = convert(model, one(), front_end)(*one()), model(*one())
    assert list(got) == list(expected)
    assert [t.dtype for t in tensors(got)] == [t.dtype for t in tensors(expected)]
    assert (got["none"], got["three"], type(got["pair"]), type(got["pair"][1])) == (None, 3, tuple, list)
    assert got["y"].detach().numpy().dtype == "float32"


@dataclass
class Output:
    logits: Tensor
    count: int
    nothing: None = None


def test_a_dataclass_comes_out_of_a_model_that_is_captured_at_its_first_call() -> None:
    model = Two(lambda self, x: Output(self.l(x), 3))
    got = convert(model, None, "view")(*one())
    assert (type(got), got.logits.dtype, got.count, got.nothing) == (Output, F32, 3, None)


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_outputs_have_autocasts_dtypes_where_the_policy_asks_for_them(front_end: str) -> None:
    def both(self: Any, x: Tensor) -> Any:
        y = self.l(x)
        return y, y.exp(), torch.logsumexp(y, 1), (y.t(), x), y.double(), x

    model = Two(both)
    with torch.autocast("cpu", torch.bfloat16):
        expected = tensors(model(*one()))
    for made in at_levels(model, one(), front_end, "O1,output_dtype=autocast", "O2,output_dtype=autocast"):
        assert [t.dtype for t in tensors(made()(*one()))] == [t.dtype for t in expected]
    (exact,) = at_levels(model, one(), front_end, "O0,output_dtype=autocast")
    assert [t.dtype for t in tensors(exact()(*one()))] == [t.dtype for t in tensors(model(*one()))]
