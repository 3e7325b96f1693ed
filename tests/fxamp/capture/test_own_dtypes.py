"""What comes out of a compiled model that holds low tensors has the dtype that the model gives without autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from tests.support.front_ends import FRESH
from tests.support.helpers import example, in_turns

pytestmark = FRESH
BF16, F32 = torch.bfloat16, torch.float32


class Frozen(nn.Module):
    """FP32 layers beside a low base, and a forward of one's own."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.m = nn.Linear(6, 6), nn.Linear(6, 6)
        self.base = nn.Linear(6, 6).bfloat16().requires_grad_(False)
        self.gain = nn.Parameter(torch.linspace(0.7, 1.3, 6).bfloat16(), requires_grad=False)
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def twice_as_much(t: Tensor) -> Tensor:
    return (t.float() * 2).to(t.dtype)


def before_a_layer(self: Frozen, x: Tensor) -> Any:
    return self.m(twice_as_much(self.l(x))), self.base(x.to(self.base.weight.dtype))


def before_an_output(self: Frozen, x: Tensor) -> Any:
    return twice_as_much(self.l(x)), twice_as_much(self.base(x.to(self.base.weight.dtype)))


def adapted_layers(self: Frozen, x: Tensor) -> Any:
    for layer in (self.l, self.m):
        x = self.base(x.to(self.base.weight.dtype)).to(x.dtype) + layer(x)
    return x


def after_a_base(self: Frozen, x: Tensor) -> Any:
    h = self.l(x)
    return self.base(h.to(self.base.weight.dtype)).to(h.dtype)


def cast_far_from_its_base(self: Frozen, x: Tensor) -> Any:
    h = self.l(x).to(self.base.weight.dtype)
    return self.base(h.abs().view(-1, 6).clamp(max=0.5))


def norm_of_a_base(self: Frozen, x: Tensor) -> Any:
    h = self.base(x.to(self.base.weight.dtype))
    wide = h.float()
    wide = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return self.gain * wide.to(h.dtype)


def joined_with_a_base(self: Frozen, x: Tensor) -> Any:
    h, k = self.l(x), self.base(x.to(self.base.weight.dtype))
    return torch.cat([k.float().chunk(2, -1)[0], h], -1).to(h.dtype), k.to(h.dtype), k


def loss_of_a_base(self: Frozen, x: Tensor) -> Any:
    h = self.base(x.to(self.base.weight.dtype))
    return h.prod(-1), torch.nn.functional.mse_loss(h, h.sin())


def factory_of_a_read(self: Frozen, x: Tensor) -> Any:
    h = self.l(x)
    return torch.ones(6, dtype=h.dtype) * 1.1, self.base(x.to(BF16))


FROZEN = (
    before_a_layer, before_an_output, adapted_layers, after_a_base, cast_far_from_its_base, norm_of_a_base,
    joined_with_a_base, loss_of_a_base, factory_of_a_read,
)  # fmt: skip


@pytest.mark.parametrize(("forward", "policy"), in_turns(FROZEN, ["O1", "O2"]))
def test_an_output_has_the_dtype_that_the_model_gives(forward: Callable[..., Any], policy: str) -> None:
    model, x = Frozen(forward), example()
    expected = model(x)
    with torch.autocast("cpu"):
        autocast = model(x)
    got = fxamp.compile(model, policy=policy, backend="eager")(x)
    for a, b, c in zip(*([t] if isinstance(t, Tensor) else t for t in (got, expected, autocast)), strict=True):
        assert a.dtype == b.dtype
        assert policy != "O1" or torch.equal(a, c.to(a.dtype))


def test_many_casts_to_the_dtype_of_a_base_take_no_time_each() -> None:
    class Deep(Frozen):
        def forward(self, x: Tensor) -> Any:
            for _ in range(60):
                x = self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.l(x)
            return x

    module = fxamp.compile(Deep(before_a_layer), backend="eager")
    assert module(example()).dtype == F32


class Given(nn.Module):
    """Computes with what it is called with, and with FP32 weights."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(6, 6)
        self.run = forward

    def forward(self, x: Tensor, low: Tensor) -> Any:
        return self.run(self, x, low)


def passed_on(self: Given, x: Tensor, low: Tensor) -> Any:
    return self.l(x), low.unfold(-1, 2, 1), low


def aliased(self: Given, x: Tensor, low: Tensor) -> Any:
    alias = low.data
    alias[low > 0] = 0.0
    return self.l(x), alias.detach(), alias  # the last is made by no graph


def computed_with(self: Given, x: Tensor, low: Tensor) -> Any:
    return (low.abs() + 1).log(), self.l(x) * low, torch.nn.functional.mse_loss(low, low.sin())


def computed_with_after_a_break(self: Given, x: Tensor, low: Tensor) -> Any:
    h = self.l(x)
    torch._dynamo.graph_break()
    return low.abs() + 1, h.sin()


@pytest.mark.parametrize(
    ("forward", "policy"), in_turns([passed_on, aliased, computed_with, computed_with_after_a_break], ["O1", "O2"])
)
def test_what_is_computed_with_a_low_input_has_the_dtype_that_the_model_gives(
    forward: Callable[..., Any], policy: str
) -> None:
    model, x, low = Given(forward), example(), example().to(BF16)
    expected = model(x, low.clone())
    with torch.autocast("cpu"):
        autocast = model(x, low.clone())
    got = fxamp.compile(model, policy=policy, backend="eager")(x, low)
    for a, b, c in zip(got, expected, autocast, strict=True):
        assert a.dtype == b.dtype
        assert policy != "O1" or torch.equal(a, c.to(a.dtype))


def test_a_model_that_rejects_a_low_input_without_autocast_gives_fp32() -> None:
    model, low = Given(lambda self, x, low: self.l(low).relu()), example().to(BF16)
    with torch.autocast("cpu"):
        autocast = model(low, low)
    got = fxamp.compile(model, backend="eager")(low, low)
    assert got.dtype == F32
    assert torch.equal(got, autocast.float())


class Low(nn.Module):
    """Has low weights alone; what no graph of Dynamo's makes is computed between two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(6, 6).bfloat16().requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        h = self.l(x).sin()
        chosen = h[h > 0]
        wide = x.float() + 1
        return h, chosen, chosen.cos(), wide @ wide.mT, x[x > 0]


def test_nothing_of_a_model_without_fp32_comes_out_wider_than_the_model_gives_it() -> None:
    model, x = Low(), example().to(BF16)
    expected = model(x)
    got = fxamp.compile(model, backend="eager")(x)
    assert [t.dtype for t in got] == [t.dtype for t in expected] == [BF16, BF16, BF16, F32, BF16]
    with torch.autocast("cpu"):
        autocast = model(x)
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(got, autocast, strict=True))
