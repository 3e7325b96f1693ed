"""Writes that Python spells as operators are writes in the graph, and what cannot be one is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from passes.contract.errors import NotFaithfulError
from tests.support.helpers import (
    FRONT_ENDS,
    Two,
    assert_same,
    assert_untouched,
    example,
    fingerprint,
    o0,
)

both = pytest.mark.parametrize("front_end", FRONT_ENDS)


def in_place_on_a_view(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    v = y[:, :3]
    v += 1
    v -= x[:, 3:]
    v *= 2
    v /= 3
    return self.m(y)


def in_place_on_an_attribute(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    v = y.T
    v[0] = 1
    v *= 2
    w = v.mT
    w += 1
    return self.m(y)


def in_place_on_bits(self: Any, x: Tensor) -> Tensor:
    y = (x * 100).to(torch.int64)
    v = y.view(-1)
    v **= 2
    v //= 3
    v %= 4096
    v &= 63
    v |= 4
    v ^= 3
    v <<= 2
    v >>= 1
    return self.l(x) + y


def in_place_on_the_input(self: Any, x: Tensor) -> Tensor:
    x += 1
    return self.l(x)


def in_place_on_numbers(self: Any, x: Tensor) -> Tensor:
    n = x.shape[1]
    n += 3
    n -= 1
    n *= 5
    n //= 2
    n %= 7
    n **= 2
    n <<= 3
    n >>= 1
    n |= 8
    n &= 13
    n ^= 1
    m = k = x.shape[0]
    k += 1
    return self.l(x) * (n + 1) * m


def a_product_in_place(self: Any, x: Tensor) -> Tensor:
    y = x
    y @= self.m.weight  # a tensor has no such thing in place
    return self.l(y) + x


def in_place_on_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    self.count *= 2
    return self.l(x) * self.count


IN_PLACE = [
    in_place_on_a_view, in_place_on_an_attribute, in_place_on_bits, in_place_on_the_input, in_place_on_numbers,
    a_product_in_place, in_place_on_a_buffer,
]  # fmt: skip


class Counting(Two):
    count: Tensor


def counting(forward: Callable[..., Any]) -> Counting:
    model = Counting()
    model.register_buffer("count", torch.ones(()))
    model.__class__ = type(forward.__name__, (Counting,), {"forward": forward})
    return model


@both
@pytest.mark.parametrize("forward", IN_PLACE)
def test_an_operator_that_writes_is_a_write(front_end: str, forward: Callable[..., Any]) -> None:
    model = counting(forward)
    converted, ours, eager = o0(model, front_end=front_end), example(), example()
    assert not converted.plan.notes
    for _ in range(2):
        expected = called(model, eager), model.count.clone()
        model.count.fill_(1)
        assert_same((called(converted, ours), model.count), expected)
        assert_same(ours, eager)
        model.count.fill_(1)


def called(module: nn.Module, x: Tensor) -> Any:
    output = module(x)
    return output, torch.autograd.grad(output.square().sum(), list(module.parameters()), allow_unused=True)


@pytest.mark.parametrize("forward", IN_PLACE)
def test_an_operator_that_writes_is_one_without_inputs_and_in_bfloat16_too(forward: Callable[..., Any]) -> None:
    model = counting(forward)
    expected = model(example())
    for policy in ("O0", "O1"):
        model.count.fill_(1)
        converted = fxamp.convert(model, policy=policy, capture="fx")
        assert (converted(example()) - expected).norm() <= (0.02 if policy == "O1" else 0) * expected.norm()


def assigned(self: Any, x: Tensor) -> Tensor:
    self.count = self.count + 1  # the line
    return self.l(x) * self.count


def assigned_a_product(self: Any, x: Tensor) -> Tensor:
    self.count = self.count[None, None]
    self.count @= self.count
    return self.l(x)


def made(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    self.register_buffer("last", y.detach())
    return y


@both
@pytest.mark.parametrize(("forward", "name"), [(assigned, "count"), (assigned_a_product, "count"), (made, "last")])
def test_a_buffer_that_is_assigned_is_refused(front_end: str, forward: Callable[..., Any], name: str) -> None:
    model = counting(forward)
    before = fingerprint(model)
    with pytest.raises(NotFaithfulError, match=rf"assigns '{name}'.*in place"):
        o0(model, front_end=front_end, check=False)
    assert_untouched(model, before)


def test_the_line_that_assigns_a_buffer_is_named() -> None:
    with pytest.raises(NotFaithfulError, match=r"test_writes_by_operators\.py:\d+: self\.count = .*# the line"):
        o0(counting(assigned), front_end="fx")
