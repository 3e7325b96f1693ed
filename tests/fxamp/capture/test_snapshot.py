"""Python state that forward() changes: conversion restores it, and no graph is made where later calls may read it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.capture.model.snapshot import untouched
from passes.contract.errors import NotFaithfulError
from tests.support.helpers import FRONT_ENDS, Two, assert_is_eager, assert_same, example, o0

LOSSES: list[Tensor] = []
CALLS = 0


class Box:
    """An object that is no module."""

    def __init__(self) -> None:
        self.seen: Any = None


class Remembers(Two):
    """Has every kind of state that a forward may reach."""

    shared: list[Tensor] = []  # noqa: RUF012
    total = 0

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.__class__ = type(forward.__name__, (Remembers,), {"forward": forward})
        self.child = nn.Module()
        self.child.h = torch.zeros(6)
        self.child.aux = None  # type: ignore[assignment]
        self.child.n = 0  # type: ignore[assignment]
        self.h: Any = None
        self.pair = (torch.zeros(6), 0)
        self.items: Any = [torch.zeros(6)]
        self.table: dict[str, Any] = {"x": {"y": [0]}}
        self.calls = 0
        self.box = Box()
        self.torchs = torch.Generator().manual_seed(1)
        self.numpys = numpy.random.RandomState(0)
        self.pythons = random.Random(0)


def contents(model: Remembers) -> str:
    kind: Any = type(model)
    own = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    child = {name: value for name, value in vars(model.child).items() if not name.startswith("_")}
    generators = (model.torchs.get_state().sum(), str(model.numpys.get_state()), model.pythons.getstate())
    return str((own, child, vars(model.box), generators, kind.shared, kind.total, "total" in vars(kind), LOSSES, CALLS))


def on_a_child(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x) + self.child.h
    self.child.h = self.child.h * 0.9 + y.detach().mean(0)
    return y


def loss_on_a_child(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x)
    self.child.aux = y.pow(2).mean()
    return y


def count_on_a_layer(self: Any, x: Tensor) -> Any:
    self.child.n += 1
    return self.l(x) * self.child.n


def from_the_third_call(self: Any, x: Tensor) -> Any:
    self.calls += 1
    return self.l(x) * (2.0 if self.calls > 2 else 1.0)


def none_at_first(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x) if self.h is None else self.l(x) + self.h
    self.h = y.detach().mean(0)
    return y


def in_a_tuple(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x) + self.pair[0]
    self.pair = (self.pair[0] + 1, self.pair[1])
    return y


def in_a_list(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x) + self.items[0]
    self.items[0] = self.items[0] + 1
    return y


def in_a_list_that_grows(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x)
    self.items.append(y.detach())
    return y


def in_a_dict(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x) + self.table.get("h", 0.0)
    self.table["h"] = y.detach().mean(0)
    return y


def in_containers(self: Any, x: Tensor) -> Any:
    self.table["x"]["y"][0] += 1
    return self.l(x) * self.table["x"]["y"][0]


def in_an_object(self: Any, x: Tensor) -> Any:
    if self.box.seen is None:
        self.box.seen = self.l.weight.detach().pow(2).sum()
    return self.l(x) * self.box.seen


def loss_in_an_object(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x)
    self.box.seen = y.pow(2).mean()
    return y


def in_the_class(self: Any, x: Tensor) -> Any:
    type(self).total += 1
    return self.l(x) * type(self).total


def loss_in_the_class(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x)
    self.shared.append(y.pow(2).mean())
    return y


def loss_in_a_global(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x)
    LOSSES.append(y.pow(2).mean())
    return y


def count_in_a_global(self: Any, x: Tensor) -> Any:
    global CALLS
    CALLS += 1
    return self.l(x) * CALLS


def by_torchs(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.l(x) + torch.rand(x.shape, generator=self.torchs)
    return y


def by_numpys(self: Any, x: Tensor) -> Any:
    return self.l(x) * float(self.numpys.rand())


def by_pythons(self: Any, x: Tensor) -> Any:
    return self.l(x) * self.pythons.random()


LOST = {
    on_a_child: "'child.h'", loss_on_a_child: "gradient in 'child.aux'", count_on_a_layer: "'child.n'",
    from_the_third_call: "'calls'", none_at_first: "'h'", in_a_tuple: "'pair", in_a_list: "'items",
    in_a_list_that_grows: "'items' in every call", in_a_dict: "'table",
    in_containers: r"table\['x'\]\['y'\]", in_an_object: "'box.seen'",
    loss_in_an_object: "gradient in 'box.seen'", in_the_class: "'in_the_class.total'",
    loss_in_the_class: "gradient in 'Remembers.shared'", loss_in_a_global: "gradient in '.*test_snapshot.LOSSES'",
    count_in_a_global: "'.*test_snapshot.CALLS'", by_numpys: "numbers from 'numpys'",
    by_pythons: "numbers from 'pythons'",
}  # fmt: skip


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize(("forward", "said"), LOST.items())
def test_state_that_later_calls_may_read_is_restored_and_not_lost(
    forward: Callable[..., Any], said: str, front_end: str
) -> None:
    model = Remembers(forward)
    before = contents(model)
    with pytest.raises(fxamp.CaptureError, match=said):
        o0(model, (example(),), front_end=front_end)
    assert contents(model) == before


def test_the_state_is_that_of_the_first_call_when_the_model_is_handed_over() -> None:
    model, expected = Remembers(in_an_object), Remembers(in_an_object)
    expected.load_state_dict(model.state_dict())
    converted = fxamp.convert(model, (example(),), policy="O0")
    for _ in range(2):
        assert torch.equal(converted(example()), expected(example()))
    assert torch.equal(model.box.seen, expected.box.seen)


def test_a_generator_of_torchs_is_drawn_from_as_by_the_model() -> None:
    model = Remembers(by_torchs)
    converted = o0(model, (example(),), dynamic_shapes=None)
    ours = [converted(example()) for _ in range(2)]
    model.torchs.manual_seed(1)
    assert_same(ours, [model(example()) for _ in range(2)])


def cached_positions(self: Any, x: Tensor) -> Any:
    if self.h is None or self.h.shape[0] != x.shape[0]:
        self.h = torch.arange(x.shape[0]).unsqueeze(1).float()
    return self.l(x) + self.h


def set_before_it_is_read(self: Any, x: Tensor) -> Any:
    self.pair = (x.detach(), x.shape[1])
    return self.l(x) + self.pair[0][:, : self.pair[1]]


def counted_for_nothing(self: Any, x: Tensor) -> Any:
    self.calls += 1
    self.child.n += 1
    self.box.seen = x.shape[1]
    return self.l(x)


@pytest.mark.parametrize("forward", [cached_positions, set_before_it_is_read, counted_for_nothing])
def test_state_that_changes_no_later_call_is_noted(forward: Callable[..., Any]) -> None:
    model = Remembers(forward)
    before = contents(model)
    converted = o0(model, (example(),))
    assert contents(model) == before
    assert all("which the converted module does not" in note for note in converted.plan.notes)
    assert converted.plan.notes
    model(example())  # what the original leaves does not matter to the converted module
    assert_is_eager(converted, model, example())


def test_what_did_not_change_is_not_written() -> None:
    model = Remembers(none_at_first)
    with untouched(model) as changed:
        model.box.seen = model.box.seen
        model.items[:] = model.items
    assert not changed


def test_an_error_inside_leaves_the_state_as_it_was() -> None:
    def failing(self: Any, x: Tensor) -> Tensor:
        self.box.seen = 1
        self.table["x"]["y"].append(1)
        LOSSES.append(x)
        raise ValueError

    model = Remembers(failing)
    before = contents(model)
    with pytest.raises(fxamp.CaptureError):
        fxamp.convert(model, (example(),))
    with pytest.raises(ValueError), untouched(model) as changed:  # noqa: PT011
        model(example())
    assert contents(model) == before
    assert len(changed) == 3


def test_a_model_that_only_its_later_calls_reject_is_handed_over() -> None:
    def indexed(self: Any, x: Tensor) -> Any:
        self.calls += 1
        return self.l(x) * (0.5, 0.5, 0.5)[self.calls]

    with pytest.raises(NotFaithfulError, match="changes 'calls' in every call"):
        o0(Remembers(indexed))


def test_an_object_that_several_modules_hold_may_be_set_by_forward_at_its_first_call() -> None:
    class Settings:
        kind: Any = None

    class Inner(nn.Module):
        def __init__(self, settings: Any) -> None:
            super().__init__()
            self.l, self.settings = nn.Linear(6, 6), settings

        def forward(self, x: Tensor) -> Tensor:
            if self.settings.kind is None:
                self.settings.kind = "rows"
            return self.l(x).sum(0 if self.settings.kind == "rows" else 1)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Settings()
            self.inner = Inner(self.settings)

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    model, x = Outer(), torch.randn(4, 6)
    converted = fxamp.convert(model, (x,), policy="O0")
    expected = model(x)  # which sets it, on the original
    assert model.settings.kind == "rows"
    assert torch.equal(converted(x), expected)
