"""Names that want to be HTML, Markdown, a terminal's or a workflow's commands are text in every format of a report."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fxamp.harmless import visible
from fxamp.report.forms.text import MODULE
from tests.fxamp.report.page.test_page import Page
from tests.support.records import HOSTILE, hostile_report


def harmless(text: str) -> bool:
    """Say whether a terminal and the log of a workflow show a text as it is."""
    lines = text.split("\n")
    return all(c.isprintable() for line in lines for c in line) and not any(
        line.lstrip().startswith("::") or "##[" in line or "##vso[" in line for line in lines
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_a_page_has_no_more_elements_than_with_plain_names(text: str) -> None:
    plain, page = (Page(hostile_report(name).to_html()) for name in ("name", text))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
    assert [list(attributes) for _, attributes in page.tags] == [list(attributes) for _, attributes in plain.tags]
    assert page.column("op")[0] == visible(text)
    (_, name, cast), *_ = page.data["columns"]["reads"][0]
    assert page.data["strings"][-1 - name] == page.data["strings"][cast] == visible(text)
    assert harmless(hostile_report(text).to_html())


@pytest.mark.parametrize("text", HOSTILE)
def test_a_table_has_no_more_cells_and_nothing_is_a_command(text: str) -> None:
    report = hostile_report(text)
    for shown in (str(report), report.to_tree(nodes=True), report.to_tree(nodes=True, width=40)):
        assert harmless(shown)
    for shown in (report.to_markdown(), report.to_tree(nodes=True, style="pipe")):
        assert harmless(shown)
        assert "<" not in shown.replace("&lt;", "")
        assert len([line for line in shown.splitlines() if line.startswith("#")]) == shown.count("\n## ") + 1
        rows = [line for line in shown.splitlines() if line.startswith("| ")]
        counts = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in rows]
        assert set(counts) <= {3, 4, 7, len(MODULE) + 1}
        assert not re.search(r"(?<!\\)(?:\\\\)*[`\[\]]", "\n".join(rows))


@pytest.mark.parametrize("text", HOSTILE)
def test_graphs_for_other_tools_keep_their_form(text: str) -> None:
    graph, data = (json.loads(part) for part in hostile_report(text).to_model_explorer())
    assert [n["label"] for n in graph["graphs"][0]["nodes"]][-2:] == [text, text]
    assert len(data["graph 0"]["results"]) == 2


@pytest.mark.parametrize("text", HOSTILE)
def test_json_has_the_names_as_they_are(text: str) -> None:
    data: dict[str, Any] = json.loads(hostile_report(text).to_json())
    assert data["record"]["nodes"][0]["op"] == text
    assert data["plan"]["notes"] == [text]
