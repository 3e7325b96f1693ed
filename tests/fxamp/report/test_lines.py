"""The lines of a model that cost most, and casts that belong to no module: what a report and a page say of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.report.forms.text import LINE, costliest
from fxamp.report.report import Report
from passes.graph.notes import is_inserted
from tests.fxamp.report.page.test_page import Page

WIDE, NARROW, HEAD = "x = torch.relu(self.wide(x))", "x = self.narrow(x)", "return self.head(x)"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.head = nn.Linear(8, 512), nn.Linear(512, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.wide(x))
        x = self.narrow(x)
        return self.head(x)


class Chosen(Net):
    """A model whose sizes depend on values, so that nothing but a run tells them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x[:, 0] > 0])


@pytest.fixture(scope="module")
def converted() -> Any:
    module: Any = fxamp.convert(Net(), (torch.randn(3, 8),), policy="O1,dtype=bf16")
    return module


@pytest.fixture(scope="module")
def report(converted: Any) -> Report:
    return fxamp.report(converted)


@pytest.fixture(scope="module")
def compiled() -> Report:
    module = fxamp.compile(Net(), policy="O1,dtype=bf16", backend="eager")
    module(torch.randn(3, 8))
    return fxamp.report(module)


def found(report: Report) -> list[dict[str, str]]:
    assert report.record is not None
    return [dict(zip(LINE, row, strict=True)) for row in costliest(report.record, report.record.nodes)]


def line_of(code: str) -> int:
    return 1 + next(i for i, text in enumerate(Path(__file__).read_text().splitlines()) if text.strip() == code)


def test_the_lines_whose_casts_move_most_bytes_come_first(report: Report) -> None:
    lines = found(report)
    code = [line["line"].partition(": ")[2] for line in lines if line["line"] != "(outputs)"]
    assert code == [WIDE, NARROW, HEAD]  # (8 + 1) * 512 weights, 512 * 8 + 8, 8 * 2 + 2
    assert lines[0]["line"].split(": ")[0].endswith(f"test_lines.py:{line_of(WIDE)}")
    # The weight, the bias and the input: FP32 read, BF16 written.
    cast = 6 * (8 * 512 + 512 + 3 * 8)
    assert {k: lines[0][k] for k in ("module", "nodes", "casts", "MB cast", "low, % of bytes")} == {
        "module": "wide", "nodes": "2", "casts": "3", "MB cast": f"{cast / 1e6:.3g}", "low, % of bytes": "100",
    }  # fmt: skip


def test_outputs_are_a_line_of_their_own_so_that_all_bytes_are_somewhere(report: Report) -> None:
    assert report.record is not None
    casts = [c for n in report.record.nodes for c in n.casts] + list(report.record.states[0].output_casts)
    assert sum(c.bytes or 0 for c in casts) == report.record.totals.cast_bytes
    (output,) = [line for line in found(report) if line["line"] == "(outputs)"]
    assert (output["casts"], output["MB cast"]) == ("1", f"{3 * 2 * 6 / 1e6:.3g}")


def test_ten_lines_are_enough_and_filters_hold_for_them(report: Report) -> None:
    assert report.record is not None
    nodes = [msgspec.structs.replace(n, line=at) for at in range(20) for n in report.record.nodes]
    assert len(costliest(report.record, nodes)) == 10
    text = report.to_tree(lines=True, modules=["head"]).partition("\nLines\n")[2]
    assert HEAD in text
    assert WIDE not in text
    assert "(outputs)" not in text


def test_text_and_markdown_have_the_same_lines(report: Report) -> None:
    assert "\nLines\n" not in report.to_tree()
    markdown = report.to_tree(lines=True, style="pipe")
    for text in (report.to_tree(lines=True), markdown[markdown.index("## Lines") :]):
        places = [text.index(code) for code in (WIDE, NARROW, HEAD)]
        assert places == sorted(places)


def test_a_narrow_terminal_has_the_lines_without_their_code(report: Report) -> None:
    text = report.to_tree(lines=True, width=100).partition("\nLines\n")[2]
    assert f"test_lines.py:{line_of(WIDE)} " in text
    assert WIDE not in text


def test_what_is_known_of_no_line_is_said(report: Report, compiled: Report) -> None:
    said = "Costs of lines are known only for a module that fxamp.convert returned"
    other = fxamp.report(report.plan)
    assert said in other.to_tree(lines=True)
    assert said not in compiled.to_tree(lines=True)


def test_columns_that_nothing_is_known_of_are_left_out_and_named(report: Report, compiled: Report) -> None:
    sizes = "MB out; low, % of bytes; low, % of FLOPs; MB saved"
    said = "These columns need a module that fxamp.convert returned with example inputs:"
    assert f"{said} casts; {sizes}" in fxamp.report(report.plan).to_tree()
    assert "FP32\n" in fxamp.report(report.plan).to_tree()
    assert said not in compiled.to_tree()
    program = torch.export.export(Chosen(), (torch.randn(3, 8),), strict=False)
    assert f"{said} {sizes}" in fxamp.report(fxamp.convert(program, policy="O1,dtype=bf16")).to_tree()
    assert said not in report.to_tree(modules=["wide"])
    narrow = " ".join(report.to_tree(width=70).split())
    assert "A wider terminal or a file also shows: low, % of bytes; low, % of FLOPs; MB saved" in narrow


def test_casts_of_rows_and_of_outputs_are_those_of_the_totals(report: Report, converted: Any) -> None:
    (graph,) = fxamp.graphs(converted)
    inserted = sum(is_inserted(n) for n in graph.graph.nodes)
    rows = [line.split() for line in report.to_tree().splitlines()]
    whole = next(int(row[4]) for row in rows if row[:1] == ["Net"])
    outputs = next(int(row[1]) for row in rows if row[:1] == ["(outputs)"])
    assert (whole, outputs) == (inserted - 1, 1)
    assert report.plan.casts == inserted
    assert Page(report.to_html()).data["states"][0]["elsewhere"] == [["(outputs)", 1]]
    assert "(outputs)" not in report.to_tree(modules=["head"])


def test_a_view_that_was_called_has_the_costs_of_one_with_example_inputs(report: Report, compiled: Report) -> None:
    assert compiled.model == "Net"
    assert compiled.record.totals == report.record.totals
    assert [n.casts for n in compiled.record.nodes] == [n.casts for n in report.record.nodes]


def test_every_form_has_the_same_totals(report: Report) -> None:
    assert str(report) == report.to_tree(nodes=True)
    assert str(report).startswith(report.to_tree().rstrip())
    assert "\nMB cast " in str(report).partition("\n\nModules\n")[0]
    assert report.to_markdown().startswith(report.to_tree(style="pipe").rstrip())


def test_deviations_are_one_number_whichever_form_is_read() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
    plan = fxamp.plan(model, (torch.randn(3, 2, 4),), policy="O1,dtype=bf16")
    assert any(d.colour != d.autocast_dtype for d in plan.decisions)  # which changes no value
    for made, said in ((plan, "none"), (replace(plan, decisions=(replace(plan.decisions[1], code="keep"),)), "1 keep")):
        shown = fxamp.report(made)
        assert f"deviations from autocast  {said}\n" in str(shown)
        assert f"deviations from autocast  {said}\n" in shown.to_tree()
        (state,) = Page(shown.to_html()).data["states"]
        assert state["totals"]["deviations"] == (said != "none")


@pytest.mark.parametrize("width", [40, 80])
def test_no_line_is_wider_than_the_terminal(report: Report, width: int) -> None:
    for shown in (report, fxamp.report(report.plan)):
        text = shown.to_tree(width=width, nodes=True, lines=True, edits=True)
        assert max(map(len, text.splitlines())) <= width
        assert re.search("policy(: | +)O1,dtype=bf16,device=cpu\n", text)
