"""Reports of nothing, and of very much; a model that has no plan yet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fxamp
from fxamp.cli.main import main
from passes.contract.plan import Decision, Plan
from passes.contract.policy import Policy
from tests.fxamp.report.page.test_page import Page
from tests.support.records import report_of

MANY = 100_000
POLICY = Policy("O1", dtype="bf16", device="cpu")


def test_a_report_without_graphs_has_every_form() -> None:
    for report in (report_of([]), fxamp.report(Plan((), POLICY))):
        for width in (None, 40):
            text = report.to_tree(nodes=True, lines=True, edits=True, width=width)
            assert "Totals" in text
            assert width is None or max(map(len, text.splitlines())) <= width
        assert report.to_markdown().startswith("## Totals")
        assert json.loads(report.to_json())["totals"]["nodes"] == 0
        assert Page(report.to_html()).keys() == []
        assert json.loads(report.to_model_explorer()[0])["graphs"] == []
    assert not fxamp.diff(Plan((), POLICY), Plan((), POLICY))


def test_the_command_takes_a_saved_plan_without_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    Plan((), POLICY).save(plan)
    for form in ("text", "markdown", "json", "html"):
        assert main(["report", str(plan), "--output-format", form]) == 0
        assert capsys.readouterr().out
    assert main(["diff", str(plan), str(plan)]) == 0
    assert main(["report", str(plan), "--op", "linear"]) == 2
    assert "no node has the op 'linear'" in capsys.readouterr().err


def test_a_model_that_was_not_called_yet_is_refused_by_every_reader() -> None:
    view = fxamp.convert(nn.Linear(4, 4), policy="O1,dtype=bf16")
    readers = (fxamp.report, fxamp.plan_of, fxamp.diff, lambda module: fxamp.diff(module, module))
    for read in readers:
        with pytest.raises(fxamp.CaptureError, match="not"):
            read(view)
    view(torch.ones(2, 4))
    assert all(read(view) is not None for read in readers)


def decision(at: int, colour: str = "bfloat16") -> Decision:
    module = f"layers.{at // 10}.part{at % 3}"
    source = f"net.py:{at % 500 + 1}: x = self.f(x)"
    return Decision(
        f"{module}/linear#{at}", 0, "linear", module, source, colour, "bfloat16", "low", "low: matrix product"
    )


@pytest.mark.matrix
def test_a_plan_of_very_many_nodes_is_reported_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    decisions = tuple(map(decision, range(MANY)))
    Plan(decisions, POLICY).save(before)
    Plan((*decisions[:-1], decision(MANY - 1, "float32")), POLICY).save(after)
    assert main(["report", str(before), "--module", "layers.7", "--nodes"]) == 0
    assert capsys.readouterr().out.count("net.py:") == 10
    assert main(["report", str(before), "--output-format", "html"]) == 0
    assert f"{MANY} nodes are more than" in capsys.readouterr().out
    assert main(["diff", str(before), str(after)]) == 1
    assert "@@ 0 added, 0 removed, 1 changed @@" in capsys.readouterr().out
