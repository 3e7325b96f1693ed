"""A report as a graph for Google's Model Explorer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fxamp
from fxamp.cli.main import main
from fxamp.report.report import Report
from tests.support.subjects import converted


@pytest.fixture(scope="module")
def report() -> Report:
    return fxamp.report(converted("hf_bert", "O2,dtype=bf16"))


def test_model_explorer_has_every_node_and_every_edge_leads_from_one(report: Report) -> None:
    graph, data = (json.loads(text) for text in report.to_model_explorer())
    assert set(graph) == {"label", "graphs"}
    (only,) = graph["graphs"]
    ids = {node["id"] for node in only["nodes"]}
    assert len(ids) == len(only["nodes"])
    assert all(edge["sourceNodeId"] in ids for node in only["nodes"] for edge in node.get("incomingEdges", ()))
    assert report.record is not None
    assert data[only["id"]]["results"].keys() == {n.key for n in report.record.nodes} <= ids
    namespaces = {n["id"]: n["namespace"] for n in only["nodes"]}
    assert all(namespaces[n.key] == n.module.replace(".", "/") for n in report.record.nodes)
    colours = {(r["value"], r["bgColor"]) for r in data[only["id"]]["results"].values()}
    assert len(colours) == 2
    assert all(isinstance(a["value"], str) for node in only["nodes"] for a in node.get("attrs", ()))


def test_model_explorer_is_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    fxamp.plan_of(converted("lenet5", "O1,dtype=bf16")).save(plan)
    assert main(["report", str(plan), "--output-format=model-explorer"]) == 2
    assert "give -o FILE.json" in capsys.readouterr().err
    assert main(["report", str(plan), "--output-format=model-explorer", "-o", str(tmp_path / "graph.json")]) == 0
    assert json.loads((tmp_path / "graph.json").read_text())["graphs"]
    assert json.loads((tmp_path / "graph.node_data.json").read_text())["graph 0"]["results"]


def test_a_page_is_written_by_the_command(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    fxamp.plan_of(converted("lenet5", "O1,dtype=bf16")).save(plan)
    assert main(["report", str(plan), "--output-format=html", "-o", str(tmp_path / "html"), "--op=linear"]) == 0
    assert (tmp_path / "html").read_text().startswith("<!doctype html>")
