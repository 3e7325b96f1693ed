"""The harness of trial finds what it is made to find, and a small sample of it finds nothing.

All of it: `python -m pytest -m trial`, which takes hours; `reports/programs.py`, `reports/op_coverage.py` and
`reports/libraries.py` do the same with a record, so that a run can be ended and gone on with.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reports import programs
from reports.trial import judge
from reports.trial.generate import generate, runs
from reports.trial.judge import LEVELS, Subject, judged
from reports.trial.program import Line, Program
from reports.trial.shrink import shrink
from reports.trial.workers import Record, run_all
from tests.front_ends import WARNINGS

pytestmark = WARNINGS
SAMPLE = range(100, 103)


def test_a_seed_gives_the_same_program_in_every_process() -> None:
    made = [generate(seed) for seed in SAMPLE]
    assert made == [generate(seed) for seed in SAMPLE]
    assert len({program.text() for program in made if program is not None}) > 1


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_random_program_has_no_failure(seed: int) -> None:
    assert not programs.failed(programs.work(str(seed)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x).softmax(-1)


@pytest.mark.parametrize("front_end", judge.FRONT_ENDS)
def test_an_ordinary_model_is_ok_at_every_level(front_end: str) -> None:
    torch.manual_seed(0)
    found = judged(Subject(Net(), (torch.randn(4, 6),)), front_end)
    assert {level: verdict.kind for level, verdict in found.items()} == dict.fromkeys(LEVELS, "ok")


def test_a_changed_value_is_a_mismatch_at_every_level(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted = judge.emitted

    def twice_as_much(*args: Any) -> Any:
        module = emitted(*args)
        module.register_forward_hook(lambda m, a, out: out * 2)
        return module

    torch.manual_seed(0)
    monkeypatch.setattr(judge, "emitted", twice_as_much)
    found = judged(Subject(Net(), (torch.randn(4, 6),)), "export")
    assert {verdict.kind for verdict in found.values()} == {"mismatch"}


def test_a_failing_program_shrinks_to_the_line_that_fails() -> None:
    lines = (
        Line("v0", "self.l(x)"),
        Line("", "with torch.no_grad():", (Line("v1a", "v0 * 2"), Line("v1b", "v1a.cumsum(0)"))),
        Line("v2", "v1b + y"),
        Line("v3", "v2.sum(-1)"),
    )
    program = Program(lines, "(v3, v0)", training=True)
    small = shrink(program, lambda p: "cumsum" in p.text() and runs(p))
    assert small.rendered_lines() == ["v1b = x.cumsum(0)"]
    assert (small.output, small.training, small.parts) == ("v1b", False, [])


def _work(case: str) -> dict[str, Any]:
    if case == "dies":
        os._exit(3)
    while case == "hangs":
        pass
    return {"found": case}


def test_a_case_that_dies_or_hangs_ends_no_run_and_a_run_goes_on_where_its_record_ends(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.jsonl")
    run_all(["a", "dies", "b"], _work, record, seconds=60)
    run_all(["a", "hangs", "c"], _work, record, seconds=1)
    again = Record(record.path).found
    assert {case: entry.get("died", "") for case, entry in again.items()} == {
        "a": "", "b": "", "c": "", "dies": "its process ended with 3", "hangs": "took longer than 1 s",
    }  # fmt: skip
    assert [json.loads(line)["case"] for line in record.path.read_text().splitlines()].count("a") == 1


@pytest.mark.trial
def test_no_random_program_fails(tmp_path: Path) -> None:
    programs.main(["--record", str(tmp_path / "programs.jsonl"), "-o", str(tmp_path)])
    assert json.loads(tmp_path.joinpath("programs.json").read_text())["failures"] == []
