"""What a compiled O2 stores in 16 bits is in the plan of its step: it is reported, compared, and stored again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import fxamp
from fxamp.cli.main import main
from fxamp.report.gate.gate import check
from fxamp.train.at_rest import PARTS, AtRest
from fxamp.train.describe import compiled_rows
from passes.contract.plan import Plan, Stored

from .test_at_rest import IDS, POLICY, Cut, asked, at_rest, blocks, noted, step_of

__all__ = ["asked"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of a module that torch imports
STORED = (
    Stored("saved", "mul_10", "2.norm", "", "bfloat16"),
    Stored("backward", "mul_19", "2.norm", "", "bfloat16"),
    Stored("backward", "mul_22", "2.norm", "", "bfloat16"),
    Stored("backward", "add_12", "", "net.py:58", "bfloat16"),
)


def plan(stored: tuple[Stored, ...] = STORED, count: int = 2, policy: str = "O2,dtype=bf16") -> Plan:
    return replace(fxamp.plan(blocks(count), (IDS,), policy=policy), stored=stored)


def only(cut: Cut, *left_out: int) -> AtRest:
    stored = dict.fromkeys(s for graph in (cut.forward, cut.backward) for _, s in noted(graph))
    chosen = [(s.part, s.name, s.module) for at, s in enumerate(stored) if at not in left_out]
    return AtRest(torch.bfloat16, (POLICY,), only=tuple(chosen))


def test_what_a_plan_names_is_stored_and_nothing_else() -> None:
    default = Cut(at_rest(*PARTS))
    assert len(default.notes()) >= 3
    again, less, none = Cut(only(default)), Cut(only(default, 1)), Cut(only(default, *range(9)))
    assert again.notes() == default.notes()
    for ours, theirs in zip(again.gradients, default.gradients, strict=True):
        assert torch.equal(ours, theirs)
    assert [n for at, n in enumerate(default.notes()) if at != 1] == less.notes()
    assert not none.notes()


def test_with_other_sizes_the_same_values_are_stored() -> None:
    default = Cut(at_rest(*PARTS))
    assert Cut(only(default), ids=IDS[:4]).notes() == default.notes()
    assert not Cut(at_rest(*PARTS), ids=IDS[:4]).notes()  # of their own they would be too small


def test_another_choice_has_another_key() -> None:
    every = AtRest(torch.bfloat16, (POLICY,))
    choices = [every, replace(every, only=()), *(replace(every, only=(("saved", name, "2"),)) for name in "ab")]
    assert len(set(map(str, choices))) == len(choices)


def test_a_plan_with_what_is_stored_is_the_same_by_text_and_old_ones_are_read() -> None:
    made = plan()
    assert Plan.from_json(made.to_json()) == made
    assert made != plan(STORED[1:])
    data: dict[str, Any] = json.loads(made.to_json())
    old = {key: value for key, value in data.items() if key != "stored"} | {"version": 7}
    assert Plan.from_json(json.dumps(old)) == plan(())
    del data["stored"][1]["module"]
    with pytest.raises(fxamp.PlanError, match=r"stored\[1\]: 'module' is missing"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("at", range(len(STORED)))
def test_a_change_of_one_stored_value_is_one_line(at: int) -> None:
    lost = STORED[at]
    found = fxamp.diff(plan(), plan((*STORED[:at], *STORED[at + 1 :])))
    assert found.totals == "0 added, 1 removed, 0 changed"
    (change,) = found.changes
    key = f"{lost.module}/{lost.name}" if lost.module else lost.name
    assert str(change).startswith(f"- {key}  stored: {lost.part}, bfloat16")
    assert lost.line in str(change)
    assert fxamp.diff(plan((*STORED[:at], *STORED[at + 1 :])), plan()).totals == "1 added, 0 removed, 0 changed"
    other = plan((*STORED[:at], replace(lost, dtype="float16"), *STORED[at + 1 :]))
    assert [str(c) for c in fxamp.diff(plan(), other).changes] == [f"! {key}  dtype: bfloat16 -> float16"]


def test_lines_and_numbers_in_names_are_no_change() -> None:
    moved = tuple(replace(s, line="net.py:99", name=s.name.replace("_", "_1")) for s in STORED)
    assert not fxamp.diff(plan(), plan(moved))


def test_an_inserted_layer_changes_nothing_at_the_others() -> None:
    moved = tuple(replace(s, module=s.module.replace("2", "3"), name=f"{s.name}0") for s in STORED)
    more = Stored("saved", "mul_5", "1.norm", "", "bfloat16")
    changes = fxamp.diff(plan(), plan((more, *moved), count=3)).changes
    assert [(c.kind, c.after) for c in changes if c.field == "stored"] == [("added", "saved, bfloat16")]


def test_a_report_lists_what_is_stored() -> None:
    made = fxamp.report(plan())
    assert "stored in 16 bits         1 saved, 3 backward" in str(made)
    (row,) = (line for line in str(made).splitlines() if "add_12" in line)
    assert row.split() == ["(no", "module)", "add_12", "backward", "bfloat16", "net.py:58"]
    assert "add_12" not in made.to_tree(nodes=True, modules=["2"])
    assert "mul_10" in made.to_tree(nodes=True, modules=["2"])
    assert "- saved mul_10 in bfloat16: 2.norm, (no line)" in made.to_tree(nodes=True, width=50)
    assert "saved mul_10 in bfloat16: 2.norm" in made.to_html()
    assert "tored in 16 bits" not in str(fxamp.report(plan(())))


def test_the_gate_says_what_is_stored_no_more(tmp_path: Path) -> None:
    file = tmp_path / "net.plan.json"
    view = fxamp.convert(blocks(), (IDS,), plan=plan(policy="O1,dtype=bf16"))
    assert check("net", lambda _: view, file, (), update=True).message == f"net: wrote {file}"
    assert check("net", lambda _: view, file, (), update=False).message == "net: as planned"
    less = fxamp.convert(blocks(), (IDS,), plan=plan(STORED[:-1], policy="O1,dtype=bf16"))
    found = check("net", lambda _: less, file, (), update=False)
    assert (found.status, [str(c) for c in found.changes]) == (1, ["- add_12  stored: backward, bfloat16, net.py:58"])
    many = tuple(replace(STORED[0], name=f"mul_{at}") for at in range(99))  # more than there are nodes
    more = fxamp.convert(blocks(), (IDS,), plan=plan((*STORED, *many), policy="O1,dtype=bf16"))
    assert len(check("net", lambda _: more, file, (), update=False).changes) == 99


def test_a_compiled_step_carries_a_plan_out(asked: list[dict[str, Any]]) -> None:
    """Placements that the policy does not choose: the decisions of O1, in a plan of O2."""
    o1, o2 = (fxamp.plan(blocks(), (IDS,), policy=f"{level},dtype=bf16") for level in ("O1", "O2"))
    assert [d.colour for d in o1.decisions] != [d.colour for d in o2.decisions]
    model = blocks()
    view = fxamp.convert(model, plan=replace(o2, decisions=o1.decisions))
    step = fxamp.TrainStep(view, F.cross_entropy, SGD(model.parameters(), lr=0.1), compile=True)
    step(IDS, IDS)
    assert [d.colour for d in step.plan().decisions] == [d.colour for d in o1.decisions]


@pytest.mark.parametrize(
    ("compile", "reason"), [("aot_eager", "'aot_eager' is asked to compile"), (True, "")], ids=["aot_eager", "inductor"]
)
def test_where_a_plan_cannot_be_stored_so_that_is_said(compile: Any, reason: str, asked: list[dict[str, Any]]) -> None:
    model = blocks()
    step = fxamp.TrainStep(
        fxamp.convert(model, plan=plan()), F.cross_entropy, SGD(model.parameters(), lr=0.1), compile=compile
    )
    if reason:
        step(IDS, IDS)
        assert step.compiled is not None
        said = f"the plan's values are not stored in 16 bits, since {reason}"
        assert any(value.startswith(said) for _, value in compiled_rows(step.compiled))
        assert step.plan().stored == ()
    else:  # what stands for Inductor here stores nothing
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            with pytest.raises(fxamp.PlanError, match=r"saved mul_10 in bfloat16: 2.norm, \(no line\); 4 missing"):
                step(IDS, IDS)
        assert all(p.grad is None and torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_the_plan_of_an_uncompiled_step_is_that_of_its_model() -> None:
    step = step_of(compile=False)
    with pytest.raises(fxamp.CaptureError, match="nothing was captured yet"):
        step.plan()
    step(IDS, IDS)
    assert step.plan() == fxamp.plan_of(step.converted_model)
    assert fxamp.report(step).plan == step.plan()


class Broken(nn.Module):
    """Blocks between which Dynamo breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = blocks(2)[:-1], nn.Sequential(*list(blocks(2))[1:])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(ids)
        torch._dynamo.graph_break()
        out: Tensor = self.second(x)
        return out


@pytest.mark.slow  # builds the kernels of several graphs
@pytest.mark.parametrize("make", [blocks, Broken])
def test_a_step_stores_again_what_the_plan_of_one_says(make: Any, tmp_path: Path) -> None:
    def trained(**how: Any) -> tuple[fxamp.TrainStep, list[Tensor]]:
        torch.manual_seed(0)
        model = make()
        step = fxamp.TrainStep(
            fxamp.convert(model, **how), F.cross_entropy, SGD(model.parameters(), lr=0.1), compile={"dynamic": False}
        )
        return step, [step(IDS, IDS).loss for _ in range(3)]

    first, losses = trained(policy="O2,dtype=bf16")
    made = first.plan()
    assert made.policy.level == "O2"
    assert len({each.graph for each in made.stored}) == (1 if make is blocks else 2)
    assert len({each.name for each in made.stored}) == 3  # both graphs have the same
    assert first.compiled is not None
    assert made.stored == first.compiled.stored
    made.save(tmp_path / "step.plan.json")
    again, as_before = trained(plan=tmp_path / "step.plan.json")
    assert again.plan().stored == made.stored
    assert not fxamp.diff(again, made)
    assert all(map(torch.equal, as_before, losses))
    less, others = trained(plan=replace(made, stored=made.stored[:-1]))
    assert less.plan().stored == made.stored[:-1]
    assert not torch.equal(others[-1], losses[-1])
    assert len(fxamp.diff(made, less).changes) == 1
    with pytest.raises(fxamp.PlanError, match="mul_999"):
        trained(plan=replace(made, stored=(*made.stored, replace(made.stored[0], name="mul_999"))))
    again.switch(replace(made, stored=made.stored[:-1]))
    assert again(IDS, IDS).stepped
    assert again.plan().stored == made.stored[:-1]


def step_and_batch() -> tuple[fxamp.TrainStep, tuple[Tensor, Tensor]]:
    return step_of(), (IDS, IDS)


@pytest.mark.slow  # builds the kernels of two graphs
def test_the_command_checks_what_a_step_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, file = "tests.fxamp.train.test_plans_of_steps:step_and_batch", tmp_path / "step.plan.json"
    words = ["check", target, "--run", "--plan", str(file), "--here"]
    assert main([*words, "--update"]) == 0
    made = Plan.load(file)
    assert made.stored
    assert main(words) == 0
    more = replace(made.stored[0], name="mul_999", module="1.norm")
    replace(made, stored=(*made.stored, more)).save(file)
    capsys.readouterr()
    assert main(words) == 1
    assert "- 1.norm/mul_999  stored in 16 bits: saved, bfloat16" in capsys.readouterr().out
