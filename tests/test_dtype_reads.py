"""A cast to another tensor's dtype stays relative in the captured graph, and a literal one literal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxamp
from fxamp.capture import capture
from tests.helpers import Two, assert_is_eager, example, o0


def in_the_call(self: Any, x: Tensor) -> Tensor:
    return self.m(torch.relu(self.l(x)).to(x.dtype))


def in_a_variable(self: Any, x: Tensor) -> Tensor:
    wanted = x.dtype
    y = self.l(x)
    return y.to(wanted)


def by_keyword(self: Any, x: Tensor) -> Tensor:
    return self.l(x).to(dtype=x.dtype)


def by_other(self: Any, x: Tensor) -> Tensor:
    return self.l(x).type_as(x)


def of_a_weight(self: Any, x: Tensor) -> Tensor:
    return self.l(x.to(self.m.weight.dtype))


def zeros(self: Any, x: Tensor) -> Tensor:
    return self.l(x) + torch.zeros(x.shape[0], 6, dtype=x.dtype)


def full(self: Any, x: Tensor) -> Tensor:
    return self.l(x) + torch.full((x.shape[0], 6), 2.0, dtype=x.dtype)


def of_integers(self: Any, x: Tensor) -> Tensor:
    return self.l(x) * torch.arange(6).to(x.dtype)


def of_a_range(self: Any, x: Tensor) -> Tensor:
    return self.l(x) * torch.arange(6, dtype=x.dtype)


def of_a_softmax(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    return F.softmax(y, dim=1, dtype=y.dtype)


def of_a_sum(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    return y + (y > 0).sum(-1, keepdim=True, dtype=y.dtype)


RELATIVE = {
    in_the_call: "type_as",
    in_a_variable: "type_as",
    by_keyword: "type_as",
    by_other: "type_as",
    of_a_weight: "type_as",
    of_integers: "type_as",
    of_a_range: "type_as",
    of_a_softmax: "type_as",
    of_a_sum: "type_as",
    zeros: "new_zeros",
    full: "new_full",
}


@pytest.mark.parametrize("forward", RELATIVE)
def test_a_read_of_a_dtype_keeps_its_tensor(forward: Callable[..., Any]) -> None:
    model = Two(forward)
    graph = capture(model, (example(),)).graph
    assert [n for n in graph.nodes if n.op == "call_function" and n.target._schema.name == f"aten::{RELATIVE[forward]}"]
    assert_is_eager(o0(model), model)


def float_method(self: Any, x: Tensor) -> Tensor:
    return self.l(x.float())


def to_literal(self: Any, x: Tensor) -> Tensor:
    return self.l(x.to(torch.float32))


def to_literal_by_keyword(self: Any, x: Tensor) -> Tensor:
    return self.l(x.to(dtype=torch.float32))


WANTED = torch.float32


def to_a_global(self: Any, x: Tensor) -> Tensor:
    return self.l(x.to(WANTED))


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (float_method, "literal"),
        (to_literal, "literal"),
        (to_literal_by_keyword, "literal"),
        (to_a_global, "undecided"),
    ],
)
def test_other_casts_say_what_is_known_of_them(forward: Callable[..., Any], said: str) -> None:
    graph = capture(Two(forward), (example(),)).graph
    (cast,) = [n for n in graph.nodes if n.op == "call_function" and n.target._schema.name == "aten::to"]
    assert cast.meta["cast"] == said


def test_a_cast_that_does_nothing_is_no_detour_for_later_uses() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.l(x)
        return y.float() + y

    graph = capture(Two(forward), (example(),)).graph
    (cast,) = [n for n in graph.nodes if n.op == "call_function" and n.target._schema.name == "aten::to"]
    (add,) = cast.users
    assert add.args == (cast, cast.args[0])


@pytest.mark.parametrize("region", [torch.no_grad, lambda: torch.autocast("cpu", enabled=False)])
def test_no_alias_is_left_behind_in_a_region_either(region: Callable[[], Any]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with region():
            y = self.l(x).float()
        return self.m(y.to(x.dtype))

    model = Two(forward)
    graph = capture(model, (example(),)).graph
    assert not [n for n in graph.nodes if n.target is torch.ops.aten.alias.default]
    assert_is_eager(o0(model), model)


def test_a_dtype_read_for_something_else_makes_nothing_relative() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            x = x + 1
        return self.l(x.to(torch.float32))

    graph = capture(Two(forward), (example(),)).graph
    assert not [n for n in graph.nodes if n.op == "call_function" and n.target is torch.ops.aten.type_as.default]


def test_a_dtype_that_was_compared_is_not_that_of_the_next_cast() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.l(x)
        if y.dtype != torch.float32:
            y = y * 2
        return y.to(torch.float32)

    graph = capture(Two(forward), (example(),)).graph
    assert not [n for n in graph.nodes if n.target is torch.ops.aten.type_as.default]


def test_a_softmax_follows_the_dtype_that_was_read_for_it() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.l(x)
        return self.m(F.softmax(y, dim=1, dtype=y.dtype))

    model, x = Two(forward), example()
    got = fxamp.convert(model, (x,), policy="O1,dtype=bf16")(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(got, model(x).float())
