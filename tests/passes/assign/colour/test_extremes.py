"""Positions and what is made of them stay FP32 until something bounds them; the rotary example is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from tests.support.exported import graph_of
from tests.support.helpers import Layers

FAR = 65536  # where BF16 has one number for 512 positions
X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
MANY = X.expand(4, 8, 64)  # more elements than what autocast's FP32 is kept for


def net(body: Callable[..., Any]) -> nn.Module:
    """Return two layers, one of coordinates, an FP32 buffer, and whatever the test does with them."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(64, 64), "second": nn.Linear(64, 64), "coordinates": nn.Linear(1, 64)}
    return Layers(body, **layers, inv_freq=1e4 ** (-torch.arange(0, 64, 2) / 64))


def convert(body: Callable[..., Any], policy: str, x: Tensor = X) -> Any:
    return graph_of(net(body), x, policy)


def colours(module: Any) -> dict[str, str]:
    return {d.op: d.colour for d in fxamp.plan_of(module).decisions}


def both(angles: Tensor) -> Tensor:
    return torch.cat([angles.sin(), angles.cos()], -1)


ROTARY: dict[str, Callable[..., Tensor]] = {
    "matmul of upcast operands": lambda m, x: both(
        m.inv_freq[None, :, None].float() @ (FAR + torch.arange(8))[None, None].float()
    ),
    "matmul of upcast operands without autocast": lambda m, x: both(disabled(m)),
}
OUTER: dict[str, Callable[..., Tensor]] = {
    "matmul": lambda m, x: both((FAR + torch.arange(8)).float()[:, None] @ m.inv_freq[None]),
    "einsum": lambda m, x: both(torch.einsum("i,j->ij", FAR + torch.arange(8.0), m.inv_freq)),
    "outer": lambda m, x: both(torch.outer((FAR + torch.arange(8)).float(), m.inv_freq)),
    "product with integers": lambda m, x: both((FAR + torch.arange(8))[:, None] * m.inv_freq),
    "counted": lambda m, x: both((torch.cumsum(x[:, 0] > -9, 0) + FAR).float()[:, None] * m.inv_freq),
    "cumsum of floats": lambda m, x: both((torch.cumsum((x[:, 0] > -9).float(), 0) + FAR)[:, None] * m.inv_freq),
}


def disabled(m: Any) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return m.inv_freq[None, :, None].float() @ (FAR + torch.arange(8))[None, None].float()


@pytest.mark.default_case(policy="O1")
@pytest.mark.parametrize(
    "policy",
    [
        "O1",
        "O2,dtype=fp16",
        *(pytest.param(p, marks=pytest.mark.matrix) for p in ("O1,dtype=fp16", "O2", "O3", "O3,dtype=fp16")),
    ],
)
@pytest.mark.parametrize("name", ROTARY)
def test_a_matmul_of_operands_that_the_author_upcast_is_fp32_bit_for_bit(name: str, policy: str) -> None:
    """The angles of rotary positions, which collapse when rounded."""

    def angles(m: Any, x: Tensor) -> Tensor:
        return ROTARY[name](m, x)

    module = fxamp.convert(net(angles), (X,), policy=policy)  # an export drops casts to the dtype that a value has
    assert torch.equal(module(X), net(angles)(X))
    assert colours(module)["matmul"] == "float32"


@pytest.mark.parametrize("policy", ["O2", pytest.param("O2,dtype=fp16", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", OUTER)
def test_from_o2_on_angles_are_fp32_however_they_are_made(name: str, policy: str) -> None:
    module = convert(OUTER[name], policy)
    assert torch.equal(module(X), net(OUTER[name])(X))


def test_at_o1_they_are_what_autocast_makes_of_them() -> None:
    module = convert(OUTER["matmul"], "O1")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(X), net(OUTER["matmul"])(X))


@pytest.mark.default_case(policy="O2,dtype=fp16")
@pytest.mark.parametrize("policy", ["O2", "O2,dtype=fp16"])
def test_what_bounds_a_position_may_be_low(policy: str) -> None:
    def rotated(m: Any, x: Tensor) -> Tensor:
        angles = (FAR + torch.arange(8))[:, None] * m.inv_freq
        return m.second(m.first(x) * torch.cat([angles, angles], -1).cos())

    module = convert(rotated, policy, MANY)
    ops = [(d.op, d.colour) for d in fxamp.plan_of(module).decisions]
    low = ops[0][1] if ops[0][0] == "linear" else dict(ops)["linear"]
    assert low != "float32"
    assert [c for o, c in ops if o == "mul"] == ["float32", low]
    torch.testing.assert_close(module(MANY), net(rotated)(MANY), rtol=0.02, atol=0.02)


def test_a_learned_layer_rounds_its_coordinates_as_under_autocast() -> None:
    def embedded(m: Any, x: Tensor) -> Tensor:
        return m.first(m.coordinates(torch.arange(8).float()[:, None]).relu())

    decisions = [d for d in fxamp.plan_of(convert(embedded, "O2")).decisions if d.op in ("linear", "relu")]
    assert {d.colour for d in decisions} == {"bfloat16"}


@pytest.mark.parametrize(
    ("scale", "colour"),
    [
        (lambda t: t.float() / 8, "bfloat16"),
        (lambda t: t / 8, "bfloat16"),
        (lambda t: t.float() * 0.125, "bfloat16"),
        (lambda t: t.float() / 7, "float32"),
    ],
)
def test_a_division_that_brings_a_range_into_range_bounds_it(scale: Callable[[Tensor], Tensor], colour: str) -> None:
    def ramp(m: Any, x: Tensor) -> Tensor:
        return m.second(m.first(x) * scale(torch.arange(8))[:, None])

    module = convert(ramp, "O2", MANY)
    assert [d.colour for d in fxamp.plan_of(module).decisions if d.op == "mul"][-1] == colour


def test_integers_beside_an_activation_in_low_are_no_positions() -> None:
    def masked(m: Any, x: Tensor) -> Tensor:
        return m.second(m.first(x) * torch.ones(8, 1, dtype=torch.long))

    assert colours(convert(masked, "O2"))["mul"] == "bfloat16"


def test_an_index_and_a_count_of_no_dimension_are_no_positions() -> None:
    def picked(m: Any, x: Tensor) -> Tensor:
        rows = m.first(x)[torch.arange(8)]
        return m.second(rows / (x[:, 0] > -9).sum())

    assert colours(convert(picked, "O2"))["div"] == "bfloat16"
