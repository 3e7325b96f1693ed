"""`fxamp check`: a model against its committed plan and its budgets, as CI runs it."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fxamp
from fxamp.cli.main import main
from fxamp.report.diff.changes import Change, Place, folded
from fxamp.report.gate.budget import Budget
from fxamp.target import load_target
from passes.contract.errors import PolicyError
from passes.contract.plan import Plan
from passes.contract.policy import Policy
from passes.ops.facts import Machine, as_on

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        h = self.body(self.stem(x))
        return self.head(h)


def make():
    return Net(), (torch.randn(3, 16),)
"""
LOW = "--policy=O1,dtype=bf16"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


Check = Callable[..., "tuple[int, str, str]"]


@pytest.fixture
def check(folder: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    def run(*words: str) -> tuple[int, str, str]:
        here = ["--here"] * any(":" in word for word in words[:1])  # a process of its own takes seconds
        status = main(["check", *here, *words])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def change(folder: Path, before: str, after: str, name: str = "net.py") -> None:
    text = (folder / name).read_text()
    assert before in text
    (folder / name).write_text(text.replace(before, after))


def test_a_plan_that_is_missing_is_no_answer_and_names_the_way_out(check: Check) -> None:
    status, _, err = check("net.py:make", "--plan=net.json", LOW)
    assert (status, "--update" in err) == (2, True)


@pytest.mark.parametrize("update", [(), ("--update",)])
@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("--plan", '{"version": 99}', r"net.json: plan format 99 is newer than \d+, .*; upgrade fxamp, or restore it"),
        ("--plan", '{"version": 7', "net.json:1: not JSON, or cut short .*; restore it"),
        ("--census", '{"version": 99, "ran": []}', "net.json: a census of format 99, .*; use the fxamp that wrote it"),
        ("--census", '{"version": 1', "net.json:1: not JSON, or cut short .*; restore it"),
    ],
)  # fmt: skip
def test_a_committed_file_that_cannot_be_read_is_an_error_and_stays(
    option: str, text: str, said: str, update: tuple[str, ...], folder: Path, check: Check
) -> None:
    (folder / "net.json").write_text(text)
    status, out, err = check("net.py:make", f"{option}=net.json", *update)
    assert (status, out) == (2, "")
    assert re.search(f"net.py:make: {said}|error: {said}", err)
    assert "or delete it and write it anew with --update" in err
    assert (folder / "net.json").read_text() == text


@pytest.mark.parametrize(("layer", "count"), [("self.head", 2), ("self", 6)])
def test_parameters_that_are_low_now_are_named_before_what_came_of_it(
    layer: str, count: int, folder: Path, check: Check
) -> None:
    check("net.py:make", "--plan=net.json", LOW, "--update")
    change(folder, "self.head = nn.Linear(16, 4)", f"self.head = nn.Linear(16, 4)\n        {layer}.bfloat16()")
    if layer == "self":
        change(folder, "torch.randn(3, 16)", "torch.randn(3, 16, dtype=torch.bfloat16)")
    status, out, _ = check("net.py:make", "--plan=net.json", LOW)
    name = "head.weight" if layer == "self.head" else "stem.weight"
    assert status == 1
    assert out.splitlines()[1].startswith(f"  ! trainable parameters in 16 bits: none -> '{name}' (bfloat16)")
    assert ("and " in out.splitlines()[1]) == (count > 3)


def test_what_is_as_planned_passes_and_what_changed_names_the_authors_line(folder: Path, check: Check) -> None:
    assert check("net.py:make", "--plan=net.json", LOW, "--update")[0] == 0
    assert check("net.py:make", "--plan=net.json", LOW)[0] == 0
    change(folder, "return self.head(h)", "return self.head(h.float().softmax(-1))")
    status, out, _ = check("net.py:make", "--plan=net.json", LOW, "--verbose")
    assert status == 1
    assert re.search(r"\+ /softmax#0 .*net\.py:15", out)
    head, *lines, last = out.splitlines()
    counts = [sum(line.startswith(f"  {sign}") for line in lines) for sign in "+-!"]
    assert head == "net.py:make: {} added, {} removed, {} changed against net.json".format(*counts)
    assert last.startswith("If this is intended, run fxamp check --update")


LAYERS = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(16, 48), nn.Linear(16, 16), nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        attention = (q @ k.transpose(-2, -1) / 4).softmax(-1)
        return x + self.drop(self.out(attention @ v))


def make():
    return nn.Sequential(*[Block() for _ in range(4)]), (torch.randn(2, 5, 16),)
"""


def test_one_changed_line_of_equal_layers_is_few_lines_and_verbose_has_all(folder: Path, check: Check) -> None:
    (folder / "net.py").write_text(LAYERS)
    check("net.py:make", "--plan=net.json", LOW, "--update")
    change(folder, "(q @ k.transpose(-2, -1) / 4)", "(q.float() @ k.float().transpose(-2, -1) / 4)")
    status, out, _ = check("net.py:make", "--plan=net.json", LOW)
    listed = [line for line in out.splitlines()[1:] if line.startswith("  ")]
    assert status == 1
    assert len(listed) <= 12
    [added] = [line for line in listed if line.startswith("  + ")]
    assert re.fullmatch(r"  \+ 0/to#\d+ and 7 more  .*\(net\.py:14\)", added)
    assert not re.search(r"\b\d:", out.partition("\n")[2].replace("net.py:", ""))
    labels = [line.partition(":")[0] for line in listed if " -> " in line and "(net.py" not in line]
    assert len(labels) == len(set(labels))
    assert "--verbose lists each" in out
    status, every, _ = check("net.py:make", "--plan=net.json", LOW, "--verbose")
    whole = [line for line in every.splitlines()[1:] if line.startswith("  ")]
    assert status == 1
    assert len(whole) > 2 * len(listed)
    ops = [line.partition("/")[2].partition("#")[0] for line in listed if "(net.py" in line]
    assert len(ops) == len(set(ops)) > 1  # an op of the changed line is read beside the others, in all layers at once
    assert every.splitlines()[0] == out.splitlines()[0]
    data = json.loads(check("net.py:make", "--plan=net.json", LOW, "--output-format=json")[1])
    assert len(data[0]["changes"]) >= len(whole)


def test_a_node_that_changes_alike_in_two_states_counts_once_and_otherwise_twice() -> None:
    wide, half = ("colour", "bfloat16", "float32"), ("colour", "float16", "float32")
    nodes = [("0/mm#0", *wide), ("1/mm#0", *wide), ("1:0/mm#0", *wide), ("1:1/mm#0", *half)]
    totals = [("(plan)", f"casts ({state})", "2", str(n)) for state, n in (("train", 4), ("eval", 3))]
    changes = [Change("changed", *one) for one in (*totals, ("(plan)", "casts", "4", "7"), *nodes)]
    assert folded(changes, {key: Place("net.py", 3) for key in ("0/mm#0", "1/mm#0")}) == [
        "! casts of the forward: 2 -> 4 (train); 2 -> 3 (eval); 4 -> 7 (all states)",
        "! 0/mm#0 and 1 more  runs in: bfloat16 -> float32  (net.py:3)",
        "! 1/mm#0  runs in: float16 -> float32  (net.py:3)",
    ]


def test_a_line_that_moves_is_no_change(folder: Path, check: Check) -> None:
    check("net.py:make", "--plan=net.json", LOW, "--update")
    before = (folder / "net.json").read_text()
    change(folder, "class Net", "# a comment\n\n\nclass Net")
    assert check("net.py:make", "--plan=net.json", LOW)[0] == 0
    assert check("net.py:make", "--plan=net.json", LOW, "--update")[0] == 0
    assert (folder / "net.json").read_text() == before


def test_another_policy_is_a_change(check: Check) -> None:
    check("net.py:make", "--plan=net.json", LOW, "--update")
    status, out, _ = check("net.py:make", "--plan=net.json", "--policy=O2,dtype=bf16")
    assert status == 1
    assert "policy: O1,dtype=bf16,device=cpu -> O2,dtype=bf16,device=cpu" in out


def test_a_plan_of_another_model_is_one_sentence(folder: Path, check: Check) -> None:
    check("net.py:make", "--plan=net.json", LOW, "--update")
    made = "torch.nn.Conv2d(1, 2, 3), torch.ones(1, 1, 8, 8)"
    (folder / "other.py").write_text(f"import torch\ndef make():\n    return {made}")
    status, out, err = check("other.py:make", "--plan=net.json", LOW)
    assert (status, out) == (2, "")
    assert "another model" in err


def test_a_layer_put_in_between_changes_no_other_and_a_renamed_one_is_a_line(folder: Path, check: Check) -> None:
    check("net.py:make", "--plan=net.json", LOW, "--update")
    change(folder, "nn.Sequential(nn.Linear", "nn.Sequential(nn.Tanh(), nn.Linear")
    status, out, _ = check("net.py:make", "--plan=net.json", LOW)
    assert status == 1
    assert "! (modules)  path: body.0 to 2 -> body.1 to 3" in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("  +")] == ["body.0/tanh#0"]
    check("net.py:make", "--plan=net.json", LOW, "--update")
    change(folder, "self.stem", "self.first")
    status, out, _ = check("net.py:make", "--plan=net.json", LOW)
    said = ["net.py:make: 0 added, 0 removed, 1 changed against net.json", "  ! (modules)  path: stem -> first"]
    assert (status, out.splitlines()[:-1]) == (1, said)


def test_a_budget_is_the_furthest_value_or_change_allowed(check: Check) -> None:
    check("net.py:make", "--plan=net.json", LOW, "--update")
    kept = ("casts=+0", "casts=500", "low_flops=100%", "low_bytes=-0%", "fp32_ops=0")
    for over, status in (((), 0), (("casts=1",), 1)):
        budgets = [f"--budget={budget}" for budget in (*kept, *over)]
        found, out, _ = check("net.py:make", "--plan=net.json", LOW, *budgets)
        assert found == status
        assert re.findall("over budget: (\\w+)", out) == ["casts"] * status


def test_a_change_for_the_worse_breaks_a_relative_budget(folder: Path, check: Check) -> None:
    check("net.py:make", "--plan=net.json", LOW, "--update")
    change(folder, "return self.head(h)", "return self.head(h.float().exp().sum(-1, keepdim=True) + h)")
    status, out, _ = check("net.py:make", "--plan=net.json", LOW, "--budget=fp32_ops=+0", "--budget=low_bytes=-1%")
    assert status == 1
    assert "over budget: fp32_ops is 4, and the budget fp32_ops=+0 allows at most 0" in out
    assert "over budget: low_bytes is" in out


@pytest.mark.parametrize(
    "text", ["cats=1", "casts", "casts=", "casts=many", "casts=-1", "low_flops=+1", "casts=5%", "casts=1e9", "=3"]
)
def test_a_budget_that_does_not_parse_is_refused_by_name(text: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(repr(text))):
        Budget.parse(text)


@pytest.mark.parametrize(
    "budget", [Budget("casts", "+", 5, True), Budget("low_flops", "-", 1, True), Budget("casts", "", 7, False)]
)
def test_a_budget_is_read_back_from_its_text(budget: Budget) -> None:
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize("given", [(), ("--budget=casts=+0",)], ids=["nothing", "a relative budget without a plan"])
def test_nothing_to_check_by_is_no_answer(check: Check, given: tuple[str, ...]) -> None:
    assert check("net.py:make", LOW, *given)[0] == 2


@pytest.fixture
def project(folder: Path, check: Check) -> dict[str, tuple[str, ...]]:
    """Make a project of two targets, and return by name what checks each of them here: a process takes seconds."""
    for name, outputs in (("a", 4), ("b", 8)):
        (folder / name).mkdir()
        (folder / name / "model.py").write_text(NET.replace("16, 4", f"16, {outputs}"))
    tables = [
        f'[tool.fxamp.targets.{name}]\ntarget = "{name}/model.py:make"\npolicy = "O1,dtype=bf16"\n'
        f'plan = "{name}/plan.json"\nbudget = ["casts=+0"]\n'
        for name in ("a", "b")
    ]
    (folder / "pyproject.toml").write_text("".join(tables))
    return {name: (f"{name}/model.py:make", f"--plan={name}/plan.json", LOW) for name in ("a", "b")}


@pytest.mark.matrix  # `.ci/run` checks those of this project so
def test_targets_of_a_project_are_checked_each_in_a_process_of_its_own_whatever_it_prints(
    folder: Path, check: Check, project: dict[str, tuple[str, ...]]
) -> None:
    assert [check(*words, "--update")[0] for words in project.values()] == [0, 0]
    prints = "import atexit, os\nos.write(1, b'{')\natexit.register(print, '[1]')\n"
    change(folder, "import torch\n", f"{prints}import torch\n", "a/model.py")
    change(folder, "return self.head(h)", "return self.head(h).float().exp()", "b/model.py")
    status, out, _ = check("--output-format=json", "--jobs=2")
    assert status == 1
    assert [o["status"] for o in json.loads(out)] == [0, 1]


@pytest.mark.matrix  # the same in more processes
def test_plans_of_a_project_that_are_missing_or_have_changed_are_written_and_no_others(
    folder: Path, check: Check, project: dict[str, tuple[str, ...]]
) -> None:
    status, _, err = check("--jobs=2")
    assert (status, err.count("--update")) == (2, 2)
    assert check("--update", "--jobs=2")[0] == 0
    change(folder, "return self.head(h)", "return self.head(h).float().exp()", "b/model.py")
    before = (folder / "a" / "plan.json").stat().st_mtime_ns
    check("--update", "--jobs=2")
    assert (folder / "a" / "plan.json").stat().st_mtime_ns == before
    assert check("b")[0] == 0
    assert [check(*words)[0] for words in project.values()] == [0, 0]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('policy = "O1"', "needs a target"),
        ('target = "net.py:make"', "neither a plan, a budget nor a census"),
        ('target = "net.py:make"\nplans = "x"', "no setting 'plans'"),
        ('target = "net.py:make"\nplan = 3', "plan must be a string"),
        ("target = ", "cannot be read"),
    ],
)
def test_a_table_that_is_wrong_is_named(folder: Path, check: Check, table: str, said: str) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.fxamp.targets.net]\n{table}\n")
    status, _, err = check()
    assert (status, said in err) == (2, True)


def test_a_target_that_leaves_is_no_answer(folder: Path, check: Check) -> None:
    (folder / "leaves.py").write_text("import os\nos._exit(0)")
    table = '[tool.fxamp.targets.leaves]\ntarget = "leaves.py:make"\nbudget = ["casts=1"]\n'
    (folder / "pyproject.toml").write_text(table)
    status, _, err = check()
    assert status == 2
    assert "leaves: its process ended with exit status 0" in err


@pytest.mark.parametrize("jobs", ["0", "-1", "many", "9999"])
def test_a_number_of_processes_that_is_none_is_refused(check: Check, jobs: str) -> None:
    status, _, err = check("net.py:make", "--budget=casts=1", f"--jobs={jobs}")
    assert (status, f"{jobs!r} is not a number of processes" in err) == (2, True)


def test_a_budget_that_does_not_parse_is_no_answer(check: Check) -> None:
    status, _, err = check("net.py:make", LOW, "--budget=cats=1")
    assert (status, "budget 'cats=1': there is no total 'cats'" in err) == (2, True)


def test_annotations_cannot_be_ended_by_a_name(folder: Path, check: Check) -> None:
    check("net.py:make", "--plan=net.json", LOW, "--update")
    change(folder, "return self.head(h)", "return self.head(h.float().exp())")
    plan = json.loads((folder / "net.json").read_text())
    plan["decisions"][0]["reason"] = "low: x\n::error::boo\r::stop-commands::a%0A"
    (folder / "net.json").write_text(json.dumps(plan))
    status, out, _ = check("net.py:make", "--plan=net.json", LOW, "--output-format=github")
    assert status == 1
    assert "boo" in out
    assert all(line.startswith(("::error::", "::warning file=net.py,line=")) for line in out.splitlines())


PADDED = """
import torch
from torch import nn


def make():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReflectionPad2d(1), nn.Conv2d(3, 2, 3)).requires_grad_(False)
    return model, (torch.randn(2, 2, 8, 8),)
"""


def test_a_plan_is_compared_by_the_facts_of_the_machine_that_it_was_made_on(folder: Path, check: Check) -> None:
    (folder / "padded.py").write_text(PADDED)
    made: Any = load_target("padded.py:make")
    for capability in ("AVX512", "AVX2"):
        with as_on(Machine("cpu", capability, "2.13")):
            plan = fxamp.plan(*made, policy=LOW.partition("=")[2])
        plan.save(f"{capability}.json")
        assert Plan.load(f"{capability}.json").machine == f"cpu {capability}, torch 2.13"
    assert fxamp.diff("AVX512.json", "AVX2.json")  # the padding runs in low alone where it is known to round once
    for capability in ("AVX512", "AVX2"):
        assert check("padded.py:make", f"--plan={capability}.json", LOW)[0] == 0
    nonsense = Path("AVX2.json").read_text().replace("cpu AVX2, torch 2.13", "somewhere")
    Path("nonsense.json").write_text(nonsense)
    status, _, err = check("padded.py:make", "--plan=nonsense.json", LOW)
    assert (status, "'somewhere'" in err) == (2, True)


def test_with_measured_costs_a_plan_is_replayed_and_nothing_is_timed(
    folder: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = "--policy=O2,dtype=bf16,cost=measured"
    made: Any = load_target("net.py:make")
    plan = fxamp.plan(*made, policy="O2,dtype=bf16")
    dataclasses.replace(plan, policy=Policy.parse("O2,dtype=bf16,device=cpu,cost=measured")).save("net.json")
    monkeypatch.setattr(sys.modules["fxamp.convert"], "fastest_plan", pytest.fail)
    monkeypatch.setattr(sys.modules["fxamp.convert"], "measured_costs", pytest.fail)
    assert check("net.py:make", "--plan=net.json", policy)[0] == 0
    change(folder, "return self.head(h)", "return self.head(h.relu())")
    status, out, _ = check("net.py:make", "--plan=net.json", policy)
    assert status == 1
    assert "no longer fits net.json" in out
    assert "relu" in out


def test_a_model_that_breaks_its_graph_is_gated_whole(folder: Path, check: Check) -> None:
    change(folder, "        return self.head(h)", "        return self.head(h) if h.sum() > -1e9 else self.head(-h)")
    how = ("net.py:make", "--plan=net.json", LOW)
    assert check(*how, "--update")[0] == 0
    assert any("graph break" in note for note in Plan.load("net.json").notes)
    assert check(*how, "--budget=casts=+0")[0] == 0
    change(folder, "nn.GELU()", "nn.Softmax(-1)")
    status, out, _ = check(*how)
    assert (status, "softmax" in out) == (1, True)


UNCOPIED = """
    def __deepcopy__(self, memo):
        raise TypeError("a Net has no copies")

    def forward(self, x):
"""


def test_a_plan_that_is_not_complete_is_no_answer(folder: Path, check: Check) -> None:
    check("net.py:make", "--plan=net.json", LOW, "--update")
    change(folder, "        return self.head(h)", "        return self.head(h) if h.sum() > -1e9 else self.head(-h)")
    change(folder, "\n    def forward(self, x):\n", UNCOPIED)
    for more in ((), ("--update",), ("--budget=casts=500",)):
        before = (folder / "net.json").read_text()
        status, out, err = check("net.py:make", "--plan=net.json", LOW, *more)
        assert (status, "the plan is not complete" in err, "a Net has no copies" in err) == (2, True, True)
        assert "casts" not in out
        assert (folder / "net.json").read_text() == before


def test_another_reason_alone_fails_only_where_that_is_asked_for(folder: Path, check: Check) -> None:
    how = ("net.py:make", "--plan=net.json", LOW)
    check(*how, "--update")
    plan = json.loads((folder / "net.json").read_text())
    plan["decisions"][0]["reason"] = "low: for another reason"
    (folder / "net.json").write_text(json.dumps(plan))
    status, out, _ = check(*how)
    assert status == 0
    assert out.splitlines()[0] == "net.py:make: as planned, 1 for another reason than in net.json"
    assert "reason: low: for another reason -> " in out
    assert check(*how, "--strict")[0] == 1
    assert check(*how, "--update")[1].startswith("net.py:make: updated net.json")
    assert check(*how, "--strict")[0] == 0
