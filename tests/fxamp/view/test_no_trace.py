"""A conversion leaves the model as it was: values, dtypes, identities and Python state."""

import copy
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from tests.support.helpers import Two
from tests.support.trial.facts import differing, facts
from tests.support.trial.writers import (
    PLACES,
    WRITES,
    X,
    buffer_written,
    cached,
    data_written,
    initialized_once,
    model_that,
    momentum,
    nested,
)

ENTRANCES: dict[str, Callable[[Any], Any]] = {
    "convert": lambda m: fxamp.convert(m, (X,), policy="O1,dtype=bf16"),
    "unchecked": lambda m: fxamp.convert(m, (X,), policy="O1,dtype=bf16", check=False),
    "plan": lambda m: fxamp.plan(m, (X,), policy="O1,dtype=bf16"),
    "O0": lambda m: fxamp.convert(m, (X,), policy="O0"),
}


def cases() -> Iterator[Any]:
    """Each write at each place, by one entrance after the other."""
    for i, (write, place) in enumerate(itertools.product(WRITES, PLACES)):
        entrance = list(ENTRANCES)[i % len(ENTRANCES) - i // len(PLACES) % len(ENTRANCES)]
        yield pytest.param(write, place, entrance, id=f"{write.__name__}-{place}-{entrance}")


@pytest.mark.parametrize(("write", "place", "entrance"), list(cases()))
def test_what_forward_writes_is_not_written_by_a_conversion(
    write: Callable[[Any, Tensor], Tensor], place: str, entrance: str
) -> None:
    model = model_that(write, place)
    before, inputs = facts(model), X.clone()
    ENTRANCES[entrance](model)
    assert not differing(before, facts(model))
    assert torch.equal(X, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        model(X)
    assert differing(before, facts(model))


@pytest.mark.parametrize(
    "write", [initialized_once, momentum, buffer_written, nested, cached], ids=lambda w: w.__name__
)
@pytest.mark.parametrize("place", PLACES)
def test_the_first_calls_write_what_autocast_writes(write: Callable[[Any, Tensor], Tensor], place: str) -> None:
    model = model_that(write, place)
    plain = copy.deepcopy(model)
    view = fxamp.convert(model, (X,), policy="O1,dtype=bf16")
    for _ in range(3):
        got = view(X)
        with torch.autocast("cpu", torch.bfloat16):
            expected = plain(X)
        assert torch.equal(got, expected.to(got.dtype))
    ours, theirs = model.state_dict(), plain.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert (model.parts.seen, model.parts.number, len(model.cache)) == (
        plain.parts.seen, plain.parts.number, len(plain.cache)
    )  # fmt: skip


@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.__name__)
@pytest.mark.parametrize("diagnosis", [fxamp.census, fxamp.estimate_error], ids=lambda d: d.__name__)
def test_what_a_diagnosis_runs_is_put_back(diagnosis: Any, write: Callable[[Any, Tensor], Tensor]) -> None:
    model, more = model_that(write, "behind a break"), {}
    subject = model
    if diagnosis is fxamp.census:
        subject = fxamp.convert(model, (X,), policy="O1,dtype=bf16", check=False)
    else:
        more["policies"] = "O1"
    before = facts(model, versions=False)
    diagnosis(subject, (X,), loss=lambda output: output.float().mean(), **more)
    assert not differing(before, facts(model, versions=False))


def test_the_first_call_hits_the_graph_that_was_captured_ahead() -> None:
    model = model_that(nested, "before a break")
    view = fxamp.convert(model, (X,), policy="O1,dtype=bf16")
    number = len(fxamp.graphs(view))
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    view(X)
    assert counters["unique_graphs"] == before
    assert len(fxamp.graphs(view)) == number == 2


def test_a_parameter_that_forward_makes_low_is_said_with_the_line(caplog: pytest.LogCaptureFixture) -> None:
    def lower(m: Any, h: Tensor) -> Tensor:
        if m.done.item() == 0:
            m.set(h.detach().mean(0))
        return h

    model = model_that(lower, "last")
    kind = type(model)

    def set_scale(self: Any, value: Tensor) -> None:
        self.scale.data = value
        self.done.fill_(1)

    kind.set = set_scale
    line = set_scale.__code__.co_firstlineno + 1
    with caplog.at_level(logging.WARNING):
        view = fxamp.convert(model, (X,), policy="O1,dtype=bf16")
    said = [r.getMessage() for r in caplog.records if "'scale'" in r.getMessage()]
    assert len(said) == 1
    assert f"test_no_trace.py:{line}" in said[0]
    assert model.scale.dtype == torch.float32
    for _ in range(3):
        view(X).sum().backward()
    assert model.scale.dtype == torch.bfloat16
    assert len([r for r in caplog.records if "'scale'" in r.getMessage()]) == 1


def test_a_model_without_a_copy_is_captured_on_itself_and_put_back(caplog: pytest.LogCaptureFixture) -> None:
    model = model_that(data_written, "before a break")
    model.lock = __import__("threading").Lock()
    before = facts(model.scale), facts(model.mean)
    with caplog.at_level(logging.WARNING):
        view = fxamp.convert(model, (X,), policy="O1,dtype=bf16")
    assert (facts(model.scale), facts(model.mean)) == before
    assert "put back" in caplog.text
    assert not fxamp.plan_of(view).complete


def test_a_plan_goes_behind_breaks_and_names_what_no_graph_has() -> None:
    class Net(nn.Module):
        def __init__(self, apart: bool) -> None:
            super().__init__()
            self.a, self.b, self.c, self.unused = (nn.Linear(6, 6) for _ in range(4))
            self.apart = apart

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def outside(self, h: Tensor) -> Any:
            return self.c(h)

        def forward(self, x: Tensor) -> Any:
            h = self.a(x)
            if h.sum() > 1e9:
                h = h * 2
            h = self.b(h)
            return self.outside(h) if self.apart else self.c(h)

    plan = fxamp.plan(Net(False), (X,), policy="O1,dtype=bf16")
    assert plan.complete
    assert {d.module_path for d in plan.decisions} >= {"a", "b", "c"}
    plan = fxamp.plan(Net(True), (X,), policy="O1,dtype=bf16")
    assert not plan.complete
    assert any("reads parameters that no graph has: c.weight, c.bias" in note for note in plan.notes)
    assert not any("unused" in note and "reads" in note for note in plan.notes)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_with_recomputed_weights_is_copied() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        h = self.l(x)
        torch._dynamo.graph_break()
        return self.m(h)

    model = Two(forward)
    nn.utils.weight_norm(model.l)
    nn.utils.weight_norm(model.m)
    model(X)  # its weights are results of ops now
    plan = fxamp.plan(model, (X,), policy="O1,dtype=bf16")
    assert plan.complete
    assert {d.module_path for d in plan.decisions} >= {"l", "m"}


def test_a_call_adds_nothing_to_what_the_plan_says() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        h = self.l(x).bfloat16()
        chosen = h[x > 0]
        h = h * 2
        return chosen, h.detach(), self.m(h.float())

    view = fxamp.convert(Two(forward), (X,), policy="O1,dtype=bf16")
    plan = fxamp.plan_of(view)
    view(X)
    assert fxamp.plan_of(view) == plan
