"""Tensors beside the parameters: conversion leaves them as they are, and a write to one is kept or refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.convert import called_to_read
from passes.contract.errors import NotFaithfulError
from tests.support.helpers import FRONT_ENDS, Two, assert_same, example, o0

PROGRAM = torch.ones(6)


class Stateful(Two):
    """Holds a tensor in an attribute and in containers, and a buffer in a list too."""

    count: Tensor

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.__class__ = type(forward.__name__, (Stateful,), {"forward": forward})
        self.register_buffer("count", torch.ones(6))
        self.plain = torch.ones(6)
        self.listed = [torch.ones(6)]
        self.nested = {"a": (torch.ones(6),)}
        self.buffers_too = [self.count]
        self.last: Tensor | None = None
        self.losses: list[Tensor] = []

    def tensors(self) -> list[Tensor]:
        return [self.count, self.plain, self.listed[0], self.nested["a"][0]]


def plain(self: Any, x: Tensor) -> Tensor:
    self.plain.mul_(0.5)  # the line
    return self.l(x) + self.plain


def one_item(self: Any, x: Tensor) -> Tensor:
    self.plain[0] = 3.0  # the line
    return self.l(x) + self.plain


def unread(self: Any, x: Tensor) -> Tensor:
    self.plain.data.mul_(0.5)  # the line
    return self.l(x)


def listed(self: Any, x: Tensor) -> Tensor:
    self.listed[0].add_(1)  # the line
    return self.l(x) * self.listed[0]


def nested(self: Any, x: Tensor) -> Tensor:
    self.nested["a"][0][:3].add_(1)  # the line
    return self.l(x) * self.nested["a"][0]


def listed_buffer(self: Any, x: Tensor) -> Tensor:
    self.buffers_too[0].add_(1)  # the line
    return self.l(x) * self.count


def of_the_program(self: Any, x: Tensor) -> Tensor:
    PROGRAM.add_(1)  # the line
    return self.l(x) * PROGRAM


def by_operator(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    self.plain += y.detach().mean(0)
    return y * self.plain


def by_item(self: Any, x: Tensor) -> Tensor:
    y = self.l(x)
    self.plain[:] = y[0].detach()
    return y * self.plain


def assigned(self: Any, x: Tensor) -> Tensor:
    y = self.l(x) * self.plain
    self.plain = self.plain * 0.5
    return y


def cached(self: Any, x: Tensor) -> Tensor:
    self.last = self.l(x).detach()
    return self.m(self.l(x))


def scratch(self: Any, x: Tensor) -> Tensor:
    y = self.plain.clone()
    y.mul_(3)
    y[0] = 2
    return self.l(x) * y


WRITES = {
    plain: "'plain'", one_item: "'plain'", unread: "'plain'", listed: r"'listed\[0\]'", nested: r"'nested\['a'\]\[0\]'",
    listed_buffer: "'count'",
}  # fmt: skip


def contents(model: Stateful) -> list[Tensor]:
    return [t.clone() for t in model.tensors()]


def follows(converted: nn.Module, model: Stateful) -> None:
    """Check two calls, and what they leave, against a model's in the same state."""
    start, ours = contents(model), []
    for module in (converted, model):
        for tensor, value in zip(model.tensors(), start, strict=True):
            tensor.copy_(value)
        ours.append([module(example()), module(example()), contents(model)])
    assert_same(*ours)


@pytest.mark.parametrize(("forward", "name"), WRITES.items())
@pytest.mark.parametrize("given", [True, False])
def test_a_write_that_symbolic_tracing_cannot_see_is_refused(
    forward: Callable[..., Any], name: str, given: bool
) -> None:
    model = Stateful(forward)
    before = contents(model)
    with pytest.raises(NotFaithfulError, match=rf"writes to {name} at .*test_state\.py:\d+ \(.*# the line\)"):
        fxamp.convert(model, (example(),) if given else None, capture="fx")
    assert_same(contents(model), before)


def test_a_write_to_a_tensor_outside_the_model_is_refused_too() -> None:
    with pytest.raises(NotFaithfulError, match=r"writes to a tensor made outside forward\(\) at .*# the line"):
        o0(Stateful(of_the_program), front_end="fx")
    assert_same(PROGRAM, torch.ones(6))


KEPT = [forward for forward in WRITES if forward is not unread]  # the exporter knows no write by way of .data


@pytest.mark.parametrize("forward", [*KEPT, by_operator, by_item])
def test_a_write_is_kept_by_export_and_conversion_leaves_the_state_alone(forward: Callable[..., Any]) -> None:
    model = Stateful(forward)
    before = contents(model)
    converted = o0(model)
    assert_same(contents(model), before)
    follows(converted, model)


@pytest.mark.parametrize("forward", [by_operator, by_item, scratch])
def test_a_write_of_a_traced_value_is_kept_by_symbolic_tracing(forward: Callable[..., Any]) -> None:
    model = Stateful(forward)
    before = contents(model)
    converted = o0(model, front_end="fx")
    assert_same(contents(model), before)
    assert not converted.plan.notes
    follows(converted, model)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_an_attribute_that_is_read_and_assigned_is_refused(front_end: str) -> None:
    with pytest.raises(NotFaithfulError, match="assigns 'plain'"):
        o0(Stateful(assigned), front_end=front_end)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_an_attribute_that_is_assigned_alone_is_noted(front_end: str) -> None:
    converted = o0(Stateful(cached), front_end=front_end)
    assert converted.plan.notes == ("forward() sets 'last', which the converted module does not",)


def of_a_parameter(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x)
    self.l.bias.data.copy_(y.detach().mean(0))
    return y


def unless_compiled(self: Any, x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        self.l.bias.data.mul_(0.5)
    return self.m(x)


@pytest.mark.parametrize(
    ("forward", "said"), [(of_a_parameter, "cannot capture"), (unless_compiled, r"writes to the parameter 'l\.bias'")]
)
def test_parameters_that_forward_writes_are_as_they_were(forward: Callable[..., Any], said: str) -> None:
    model = Stateful(forward)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NotFaithfulError, match=said):
        o0(model)
    assert_same([p.detach() for p in model.parameters()], before)


def test_to_read_the_decisions_of_a_first_call_leaves_the_parameters_alone() -> None:
    model = Stateful(of_a_parameter)
    before = [p.detach().clone() for p in model.parameters()]
    called_to_read(model, (example(),), None, fxamp.Policy.of("O1,dtype=bf16"))
    assert_same([p.detach() for p in model.parameters()], before)


def kept_loss(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x)
    self.last = y.square().mean()
    return y


def listed_loss(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x)
    self.losses.append(y.square().mean())
    return y


def summed_loss(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x)
    self.last = y.sum() if self.last is None else self.last + y.sum()
    return y


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize(("forward", "name"), [(kept_loss, "last"), (listed_loss, "losses"), (summed_loss, "last")])
def test_a_loss_that_is_kept_in_an_attribute_is_not_lost(
    forward: Callable[..., Any], name: str, front_end: str
) -> None:
    model = Stateful(forward)
    with pytest.raises(NotFaithfulError, match=f"keeps a tensor with a gradient in '{name}'"):
        o0(model, front_end=front_end)
    assert not model.losses
    assert model.last is None


def made_once(self: Any, x: Tensor) -> Tensor:
    if not self.losses:
        self.losses.append(self.m.weight.square().sum())
    return torch.mul(self.l(x), self.losses[0])


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_what_forward_keeps_to_read_it_itself_is_computed_at_every_call(front_end: str) -> None:
    model = Stateful(made_once)
    converted = o0(model, front_end=front_end)
    assert any("sets 'losses'" in note for note in fxamp.plan_of(converted).notes)
    assert not model.losses
    for _ in range(2):
        with torch.no_grad():
            model.m.weight.mul_(2)  # the cache of the model itself would be out of date
        converted.zero_grad()
        converted(example()).sum().backward()
        expected = copy.deepcopy(model)
        expected.zero_grad()
        expected(example()).sum().backward()
        assert_same(converted.m.weight.grad, expected.m.weight.grad)


def test_a_loss_that_is_kept_trains_as_under_autocast() -> None:
    model = Stateful(kept_loss)
    expected = copy.deepcopy(model)
    converted = fxamp.convert(model, (example(),), policy="O1,dtype=bf16")
    converted(example())
    with torch.autocast("cpu", torch.bfloat16):
        expected(example())
    assert model.last is not None
    assert expected.last is not None
    model.last.backward()
    expected.last.backward()
    assert torch.equal(model.last, expected.last)
    assert_same(model.l.weight.grad, expected.l.weight.grad)


def seldom(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x)
    return -y if random.random() < 1e-9 else y


def seldom_by_numpy(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x)
    return -y if numpy.random.rand() < 1e-9 else y


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize(("forward", "said"), [(seldom, "random"), (seldom_by_numpy, "numpy.random")])
def test_numbers_that_python_draws_are_not_frozen_though_the_check_would_agree(
    forward: Callable[..., Any], said: str, front_end: str
) -> None:
    random.seed(0)
    numpy.random.seed(0)
    expected = random.Random(0).random(), numpy.random.RandomState(0).rand()
    with pytest.raises(NotFaithfulError, match=rf"draws numbers from {said}; capture='{front_end}'"):
        o0(Stateful(forward), front_end=front_end)
    assert (random.random(), numpy.random.rand()) == expected  # the user's numbers are not used up


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_the_state_is_restored_when_conversion_fails(front_end: str) -> None:
    def failing(self: Any, x: Tensor) -> Tensor:
        self.plain.mul_(0.5) if front_end == "export" else None
        y = self.l(x)
        return y if y.sum().item() > 0 else self.m(y)

    model = Stateful(failing)
    before = contents(model)
    with pytest.raises(fxamp.CaptureError):
        o0(model, front_end=front_end)
    assert_same(contents(model), before)


def test_with_auto_what_symbolic_tracing_refuses_is_captured_at_the_first_call() -> None:
    model = Stateful(plain)
    follows(fxamp.convert(model, policy="O0"), model)
