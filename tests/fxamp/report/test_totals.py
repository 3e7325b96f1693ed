"""The totals of each state of a model: the same in every form, and what one call in that state moves."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.convert import to_read
from fxamp.measure.counts import _Counter as Counter
from fxamp.measure.counts import saved_bytes
from fxamp.report.gate.budget import Budget
from fxamp.report.gate.gate import check
from fxamp.report.reader import with_totals
from fxamp.report.record.record import TOTALS, Record, State
from passes.contract.policy import Policy
from passes.graph.notes import is_inserted
from tests.fxamp.report.page.test_page import Page
from tests.support.subjects import converted, subject, unchanged
from tests.support.zoo import ZOO

MATRIX = pytest.mark.matrix
POLICIES = ("O1,dtype=bf16", "O2,dtype=bf16")
FEW = [*zip(("lenet5", "hf_bert"), POLICIES, strict=True)]
MODELS = [
    pytest.param(zoo.name, policy, marks=() if (zoo.name, policy) in FEW else MATRIX)
    for zoo in ZOO for policy in POLICIES
]  # fmt: skip


class Modes(nn.Module):
    """A model with one cast more in training."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(torch.softmax(x, -1).exp()) if self.training else x


@pytest.fixture(scope="module")
def view() -> Any:
    """Return a view of a model that was called in three states."""
    view = fxamp.compile(Modes(), policy="O1,dtype=bf16,ops.softmax=fp32", backend="eager")
    view(torch.randn(2, 4))
    view.eval()
    view(torch.randn(2, 4))
    with torch.no_grad():
        view(torch.randn(2, 4))
    return view


def casts_of(module: nn.Module) -> list[int]:
    """Count the casts of each graph; states that decide the same count once."""
    graphs = {graph.meta["fxamp"]["number"]: graph for graph in reversed(fxamp.graphs(module))}
    return [sum(is_inserted(n) for n in graphs[number].graph.nodes) for number in sorted(graphs)]


@pytest.mark.parametrize(("name", "policy"), MODELS)
def test_every_form_of_every_state_has_the_same_totals(name: str, policy: str) -> None:
    module = converted(name, policy)
    report = fxamp.report(module)
    states = report.record.states
    assert [state.totals.casts for state in states] == casts_of(module)
    assert sum(state.totals.casts or 0 for state in states) == report.plan.casts
    data = json.loads(report.to_json())
    assert Record.from_json(json.dumps(data["record"])) == report.record
    assert data["totals"]["casts of the forward"] == states[0].totals.casts
    assert data["totals"]["nodes"] == states[0].totals.nodes
    shown = Page(report.to_html()).data["states"]
    for state, on_page in zip(states, shown, strict=True):
        assert {key: on_page["totals"][key] for key in TOTALS} == {key: getattr(state.totals, key) for key in TOTALS}
        listed = sum(len(n.casts) for n in report.record.of(state)) + len(state.output_casts)
        if len(states) == 1:
            assert listed + dict(report.record.casts_elsewhere(state)).get("(inner graphs)", 0) == state.totals.casts
    plan, _ = with_totals(module)
    for state in states:
        behind = f" ({state.name})" if state.name else ""
        assert plan.totals[f"casts{behind}"] == state.totals.casts
    table = report.to_tree().partition("Modules")[0]
    (row,) = [line for line in table.splitlines() if line.startswith("casts of the forward")]
    assert [int(cell) for cell in row.split()[4:]] == [state.totals.casts for state in states]


@pytest.mark.parametrize("name", [*(name for name, _ in FEW), pytest.param("hf_gpt2", marks=MATRIX)])
def test_the_totals_of_a_state_are_what_a_call_in_it_keeps(name: str) -> None:
    found, module = subject(name), converted(name, "O1,dtype=bf16")
    for training in (True, False):  # whatever was captured before
        module.train(training)
        with unchanged(found.model):
            module(*found.args, **found.kwargs)
    states = [state for state in fxamp.report(module).record.states if "no_grad" not in state.name]
    assert states
    for state in states:
        module.train(not state.name.startswith("eval"))
        with unchanged(found.model):
            counted = saved_bytes(lambda: module(*found.args, **found.kwargs))
        assert state.totals.saved_bytes == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize(("name", "policy"), MODELS)
def test_the_casts_of_a_state_are_those_that_a_call_in_it_makes(name: str, policy: str) -> None:
    found, module = subject(name), converted(name, policy).eval()  # in training, attention with dropout casts inside
    with unchanged(found.model):
        module(*found.args, **found.kwargs)
        with Counter() as counted:
            module(*found.args, **found.kwargs)
    totals = next(s.totals for s in fxamp.report(module).record.states if not s.name or "eval" in s.name)
    if name in ("hf_t5", "hf_llama"):  # whose own casts change dtypes too
        assert (totals.casts or 0) <= counted.casts
    else:
        assert (totals.casts, totals.cast_bytes) == (counted.casts, counted.cast_bytes)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of a module that torch imports
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=MATRIX)])
def test_behind_a_compiler_figures_are_planned_and_what_it_keeps_is_measured(backend: str) -> None:
    found = subject("lenet5")
    view = fxamp.convert(found.zoo.build(), found.args, policy="O1,dtype=bf16", backend=backend)
    (before,) = fxamp.report(view).record.states
    assert (before.compiler, before.kept_bytes) == (backend, None)
    with torch.no_grad():
        view(*found.args)
    counted = saved_bytes(lambda: view(*found.args))  # the hooks of a user hide what is kept
    assert all(state.kept_bytes is None for state in fxamp.report(view).record.states)
    again = fxamp.convert(found.zoo.build(), found.args, policy="O1,dtype=bf16", backend=backend)
    again(*found.args)
    report = fxamp.report(again)
    (state,) = report.record.states
    assert state.kept_bytes == counted
    assert state.totals == before.totals
    assert f"MB saved, measured behind {backend}" in report.to_tree()
    assert f"planned: the emitted graphs as PyTorch runs them; {backend} behind them" in report.to_tree()
    assert json.loads(report.to_json())["totals"]["figures"].startswith("planned: ")
    shown = Page(report.to_html()).data["states"][0]
    assert (shown["compiler"], shown["kept_bytes"]) == (backend, counted)
    assert with_totals(again)[0].totals["saved_bytes"] == state.totals.saved_bytes  # a plan has what is planned


def test_what_runs_as_it_was_emitted_is_planned(view: Any) -> None:
    assert {(state.compiler, state.kept_bytes) for state in fxamp.report(view).record.states} == {("", None)}
    assert "planned: the emitted graphs as PyTorch runs them\n" in fxamp.report(view).to_tree()


def named(states: tuple[State, ...]) -> dict[str, int | None]:
    return {state.name: state.totals.casts for state in states}


def test_a_view_has_the_totals_of_each_state(view: Any) -> None:
    record = fxamp.report(view).record
    found = named(record.states)
    assert list(found) == ["train, grad", "eval, grad or eval, no_grad"]  # the last two decide the same
    assert list(found.values()) == casts_of(view)
    assert list(found.values()) == sorted(map(int, filter(None, found.values())), reverse=True)
    assert all(state.totals.cast_bytes for state in record.states)
    text = fxamp.report(view).to_tree()
    assert "one call in state" in text
    assert "Modules: train, grad" in text
    assert "Modules: eval, grad or eval, no_grad" in text


def test_the_tree_of_a_state_that_is_that_of_another_is_not_repeated() -> None:
    class Turned(Modes):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) if self.training else self.a(self.b(x))

    view = fxamp.convert(Turned(), torch.randn(2, 4), policy="O1,dtype=bf16").eval()
    view(torch.randn(2, 4))
    assert "Modules: eval, grad: as in train, grad" not in fxamp.report(view).to_tree()
    assert "Modules: eval, grad: as in train, grad" in fxamp.report(view).to_tree(depth=0)


def test_graphs_of_one_state_are_one_state() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    view = fxamp.compile(Broken(), policy="O1,dtype=bf16", backend="eager")
    view(torch.ones(2, 4))
    assert len(fxamp.graphs(view)) == 2
    (state,) = fxamp.report(view).record.states
    assert (state.name, state.totals.casts, state.totals.nodes) == ("", sum(casts_of(view)), 2)


def test_budgets_hold_for_each_state(view: Any, tmp_path: Path) -> None:
    most = max(casts_of(view))
    plan = tmp_path / "plan.json"

    def broken(*budgets: str) -> tuple[str, ...]:
        return check("net", lambda _: view, plan, [Budget.parse(text) for text in budgets], False).broken

    with_totals(view)[0].save(plan)
    assert broken(f"casts={most}", "casts=+0", "cast_bytes=+0", "low_bytes=-1%") == ()
    (said,) = broken(f"casts={most - 1}")
    assert said.startswith(f"casts (train, grad) is {most}, and the budget casts={most - 1} allows at most")


def test_a_saved_plan_keeps_the_totals_of_its_states() -> None:
    plan, record = with_totals(to_read(Modes(), (torch.randn(2, 4),), None, Policy("O1", dtype="bf16")))
    assert len(record.states) == 2
    again = fxamp.report(plan).record
    assert named(again.states) == named(record.states)
    assert [state.totals.saved_bytes for state in again.states] == [s.totals.saved_bytes for s in record.states]
    without = fxamp.report(dataclasses.replace(plan, totals={})).record
    assert named(without.states) == dict.fromkeys(named(record.states))
    assert "not known of a state" in fxamp.report(dataclasses.replace(plan, totals={})).to_tree()


def test_what_is_kept_to_bring_a_value_into_range_is_counted_with_its_reader() -> None:
    pytest.importorskip("transformers")
    entry = next(e for e in ZOO if e.name == "hf_bert")
    model, (args, kwargs) = entry.build().train(), entry.inputs(4)
    view = fxamp.convert(model, args, kwargs, policy="O2,dtype=bf16")
    (graph,) = fxamp.graphs(view)
    assert graph.graph.find_nodes(op="call_function", target=torch.ops.aten.clamp.default)
    totals = fxamp.report(view).record.states[0].totals
    assert totals.saved_bytes == pytest.approx(saved_bytes(lambda: view(*args, **kwargs).logits), rel=0.01)
    assert totals.saved_bytes_fp32 == pytest.approx(saved_bytes(lambda: model(*args, **kwargs).logits), rel=0.01)
