"""A report as a graph for other tools: Graphviz, and Google's Model Explorer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import fxamp
from fxamp.cli.main import main
from fxamp.report.report import Report
from reports.subjects import converted

# What a line may be: the whole, a module, a node or an edge. In quotes a quote has a backslash before it.
QUOTED = r'"(?:[^"\\]|\\.)*"'
ATTRIBUTES = rf"\[\w+={QUOTED}(?:, \w+={QUOTED})*\]"
LINES = re.compile(
    rf"digraph fxamp {{|}}|newrank=true|node \[shape=box, style={QUOTED}, fontname={QUOTED}\]|"
    r"subgraph cluster[\d_]* {|"
    rf"label={QUOTED}|n\d+ {ATTRIBUTES}|n\d+ -> n\d+(?: {ATTRIBUTES})?"
)


@pytest.fixture(scope="module")
def report() -> Report:
    return fxamp.report(converted("hf_bert", "O2,dtype=bf16"))


def test_dot_has_every_node_and_what_it_reads(report: Report) -> None:
    lines = [line.strip() for line in report.to_dot().splitlines()]
    assert [line for line in lines if not LINES.fullmatch(line)] == []
    assert sum(line.endswith("{") for line in lines) == sum(line == "}" for line in lines)
    assert report.record is not None
    nodes = report.record.nodes
    assert sum(re.match(r"n\d+ \[", line) is not None for line in lines) == len(nodes)
    reads = {(n.key, r.value) for n in nodes for r in n.reads if r.kind == "node"}
    assert sum(" -> " in line for line in lines) == len(reads)
    assert sum(" -> " in line and "bfloat16" in line for line in lines) == len(
        {(n.key, r.value) for n in nodes for r in n.reads if r.kind == "node" and r.cast}
    )


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
    converted("lenet5", "O1,dtype=bf16").plan.save(plan)
    assert main(["report", str(plan), "--output-format=model-explorer"]) == 2
    assert "give -o FILE.json" in capsys.readouterr().err
    assert main(["report", str(plan), "--output-format=model-explorer", "-o", str(tmp_path / "graph.json")]) == 0
    assert json.loads((tmp_path / "graph.json").read_text())["graphs"]
    assert json.loads((tmp_path / "graph.node_data.json").read_text())["graph 0"]["results"]


def test_a_page_and_a_graph_are_written_by_the_command(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    converted("lenet5", "O1,dtype=bf16").plan.save(plan)
    for name in ("html", "dot"):
        assert main(["report", str(plan), f"--output-format={name}", "-o", str(tmp_path / name), "--op=linear"]) == 0
    assert (tmp_path / "html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "dot").read_text().startswith("digraph")
    assert "relu" not in (tmp_path / "dot").read_text()
