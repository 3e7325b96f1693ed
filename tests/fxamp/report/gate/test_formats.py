"""What `fxamp check` writes for CI: JUnit XML and SARIF, each validated against its schema."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import xmlschema

from fxamp.cli.main import main
from fxamp.report.diff.changes import Change, Place, counted
from fxamp.report.gate.gate import Outcome
from fxamp.report.gate.outcomes import MOST, to_github, to_json, to_junit, to_markdown, to_sarif, to_text
from passes.contract.plan import Plan, installed
from passes.contract.policy import Policy
from tests.support.records import HOSTILE

GUIDE = Path(__file__).parents[4] / ".github" / "docs" / "checking.md"
SCHEMAS = Path(__file__).parents[3] / "support" / "schemas"
CHANGED = Outcome(
    "net", 1, "net: 1 added, 1 removed, 1 changed against net.json, 1 budget broken, 1 difference in what ran",
    (
        Change("changed", "(plan)", "casts", "8", "9"),
        Change("changed", "fc/linear#0", "colour", "bfloat16", "float32"),
        Change("changed", "fc/linear#0", "reason", "low: rule", "override: by the policy"),
        Change("added", "/softmax#0", "colour", None, "float32"),
        Change("removed", "/exp#0", "colour", "float32", None),
    ),
    {"fc/linear#0": Place("src/my net.py", 12), "/softmax#0": Place("src/my net.py", 15)},
    ("casts is 9, and the budget casts=+0 allows at most 8",), {"casts": 9}, "plans/net.json",
    ("net.py:12, module fc: ran addmm in float32",),
)  # fmt: skip
KEPT = Outcome("other", 0, "other: as planned")
UNKNOWN = Outcome("third", 2, "third: there is no plan 'x.json' yet: write it with --update, and commit it")


@pytest.fixture(scope="module")
def sarif_schema() -> Any:
    found = json.loads((SCHEMAS / "sarif-schema-2.1.0.json").read_text())
    return jsonschema.Draft7Validator(found, format_checker=jsonschema.Draft7Validator.FORMAT_CHECKER)


@pytest.fixture(scope="module")
def junit_schema() -> Any:
    return xmlschema.XMLSchema(str(SCHEMAS / "junit-10.xsd"))


def hostile(text: str) -> Outcome:
    """Make an outcome in which everything that a stranger may choose is that text."""
    changes = (Change("changed", text, "reason", text, text), Change("added", f"{text}1", "colour", None, text))
    return Outcome(text, 1, text, changes, {text: Place(text, 3)}, (text,), {}, text)


def test_sarif_has_one_run_and_one_result_for_each_changed_decision(sarif_schema: Any) -> None:
    log = json.loads(to_sarif([CHANGED, KEPT]))
    sarif_schema.validate(log)
    (run,) = log["runs"]
    rules = [r["ruleId"] for r in run["results"]]
    assert rules == [
        "over-budget", "ran-otherwise", "plan-changed", "decision-changed", "decision-added", "decision-removed",
    ]  # fmt: skip
    assert set(rules) == {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    changed = run["results"][3]
    assert "runs in: bfloat16 -> float32; reason" in changed["message"]["text"]
    assert "reason: low: rule -> override: by the policy" in changed["message"]["text"]
    place = changed["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "src/my%20net.py", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {"startLine": 12}
    removed = run["results"][5]["locations"][0]
    assert removed["physicalLocation"]["artifactLocation"]["uri"] == "plans/net.json"
    assert removed["logicalLocations"] == [{"fullyQualifiedName": "/exp#0"}]
    assert len({r["partialFingerprints"]["fxampDecision/v1"] for r in run["results"]}) == len(rules)
    assert run["invocations"] == [{"executionSuccessful": True}]
    assert {r["level"] for r in run["results"]} == {"error"}  # as the exit status says
    driver = run["tool"]["driver"]
    assert driver["version"] == installed()
    assert all(rule["helpUri"].startswith(driver["informationUri"]) for rule in driver["rules"])
    guide = GUIDE.read_text(encoding="utf-8")
    assert all(f"\n### {rule['helpUri'].partition('#')[2]}\n" in guide for rule in driver["rules"])


def test_a_reason_alone_is_told_and_fails_nothing(sarif_schema: Any, junit_schema: Any) -> None:
    reason = Change("changed", "fc/linear#0", "reason", "low: rule", "override: by the policy")
    places = {"fc/linear#0": Place("net.py", 12)}
    kept = Outcome(
        "net", 0, "net: as planned, 1 for another reason than in net.json", (reason,), places, plan="net.json"
    )
    assert to_text([kept]).splitlines()[1] == (
        "  ! fc/linear#0  reason: low: rule -> override: by the policy  (net.py:12)"
    )
    assert "--update" not in to_text([kept]) + to_markdown([kept]) + to_github([kept])
    assert to_github([kept]).startswith("::notice file=net.py,line=12")
    log = json.loads(to_sarif([kept]))
    sarif_schema.validate(log)
    assert [r["level"] for r in log["runs"][0]["results"]] == ["note"]
    assert "<failure" not in to_junit([kept])


def test_markdown_has_the_authors_lines() -> None:
    (row,) = [line for line in to_markdown([CHANGED]).splitlines() if "/softmax#0" in line]
    assert row.split("|")[-2].strip() == "src/my net.py:15"


def test_counts_are_counts_of_lines_and_every_figure_has_its_unit() -> None:
    more = (Change("changed", "(plan)", "cast_bytes", "272", "296"), Change("changed", "(plan)", "low_bytes", "1", "2"))
    moved = Change("changed", "fc/linear#0", "autocast_dtype", "bfloat16", "float32")
    changes = (*more, *CHANGED.changes, moved)
    text = to_text([dataclasses.replace(CHANGED, changes=changes, broken=(), ran=())]).splitlines()
    assert text[1:] == [
        "  ! bytes cast: 272 -> 296",
        "  ! low, % of bytes: 1 -> 2",
        "  ! casts of the forward: 8 -> 9",
        "  ! fc/linear#0  runs in: bfloat16 -> float32; reason: low: rule -> override: by the policy"
        "  (src/my net.py:12)",
        "  + /softmax#0  runs in: float32  (src/my net.py:15)",
        "  - /exp#0  runs in: float32",
        "If this is intended, run fxamp check --update with the same arguments, and commit what it writes.",
    ]
    assert counted(changes) == "1 added, 1 removed, 4 changed"
    table = [line for line in to_markdown([dataclasses.replace(CHANGED, changes=changes)]).splitlines() if "| " in line]
    assert [row.split("|")[1].strip() for row in table[1:]] == ["changed"] * 4 + ["added", "removed"]
    assert "runs in: bfloat16 -> float32; reason" in table[4]
    assert to_text([KEPT]) == "other: as planned\n"


def test_sarif_knows_a_result_again_when_lines_move() -> None:
    moved = Outcome(**{**vars(CHANGED), "places": {key: Place("other.py", 99) for key in CHANGED.places}})
    before, after = (json.loads(to_sarif([o]))["runs"][0]["results"] for o in (CHANGED, moved))
    assert before != after
    assert [r["partialFingerprints"] for r in before] == [r["partialFingerprints"] for r in after]


def test_sarif_says_what_it_could_not_tell_and_what_it_left_out(sarif_schema: Any) -> None:
    many = tuple(Change("added", f"/op#{i}", "colour", None, "float32") for i in range(MOST + 7))
    log = json.loads(to_sarif([UNKNOWN, Outcome("net", 1, "net", many)]))
    sarif_schema.validate(log)
    (run,) = log["runs"]
    assert len(run["results"]) == MOST
    (invocation,) = run["invocations"]
    assert invocation["executionSuccessful"] is False
    said = [n["message"]["text"] for n in invocation["toolExecutionNotifications"]]
    assert "there is no plan 'x.json' yet" in said[0]
    assert said[1] == f"7 of {MOST + 7} results are left out."


def test_junit_has_a_suite_for_each_target(junit_schema: Any) -> None:
    text = to_junit([CHANGED, KEPT, UNKNOWN])
    junit_schema.validate(text)
    whole = ET.fromstring(text)
    suites = {suite.get("name"): suite for suite in whole}
    assert list(suites) == ["net", "other", "third"]
    assert [(s.get("tests"), s.get("failures"), s.get("errors")) for s in whole] == [
        ("3", "3", "0"), ("1", "0", "0"), ("1", "0", "1"),
    ]  # fmt: skip
    plan, budget, run = suites["net"]
    assert (plan.get("name"), budget.get("name"), run.get("name")) == ("plan", "budget casts", "run")
    assert suites["net"].get("time") == "0.000"
    assert "+ /softmax#0  runs in: float32  (src/my net.py:15)" in (plan[0].text or "")
    assert suites["third"][0][0].tag == "error"


@pytest.mark.parametrize("text", HOSTILE)
def test_no_name_gets_out_of_its_place(text: str, sarif_schema: Any, junit_schema: Any) -> None:
    log = to_sarif([hostile(text)])
    sarif_schema.validate(json.loads(log))
    assert all(c.isprintable() or c == "\n" for c in log)
    assert len(json.loads(log)["runs"][0]["results"]) == 3
    xml = to_junit([hostile(text)])
    junit_schema.validate(xml)
    assert all(c.isprintable() or c == "\n" for c in xml)
    assert [(e.tag) for e in ET.fromstring(xml).iter()] == [
        "testsuites", "testsuite", "testcase", "failure", "testcase", "failure",
    ]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_no_name_is_a_command_or_markup_in_the_other_formats(text: str) -> None:
    outcome = hostile(text)
    for shown in (to_text([outcome]), to_markdown([outcome])):
        assert all(c.isprintable() or c == "\n" for c in shown)
        assert not [line for line in shown.splitlines() if line.lstrip().startswith("::") or "##[" in line]
    assert "<" not in to_markdown([outcome]).replace("&lt;", "")
    assert to_markdown([outcome]).count("\n| ") == to_markdown([hostile("name")]).count("\n| ")
    lines = to_github([outcome]).splitlines()
    assert [line.partition("::")[2].partition("::")[0].partition(" ")[0] for line in lines] == [
        "error", "error", "warning",
    ]  # fmt: skip
    assert all(c.isprintable() for line in lines for c in line)
    assert all("\r" not in line and "##[" not in line for line in lines)
    assert msgspec.convert(json.loads(to_json([outcome]))[0], Outcome) == outcome


@pytest.mark.parametrize("form", ["junit", "sarif"])
def test_the_command_writes_them(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sarif_schema: Any, junit_schema: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "import torch\n\n\ndef make():\n    return torch.nn.Sequential(torch.nn.Linear(4, 4)), (torch.ones(2, 4),)\n"
    )
    Plan((), Policy("O1", dtype="bf16", device="cpu")).save("net.json")
    words = [
        "check",
        "--here",
        "net.py:make",
        "--plan=net.json",
        "--policy=O1,dtype=bf16",
        f"--output-format={form}",
        "-o",
        form,
    ]
    assert main(words) == 1
    text = (tmp_path / form).read_text(encoding="utf-8")
    if form == "sarif":
        sarif_schema.validate(json.loads(text))
        assert any(r["ruleId"] == "decision-added" for r in json.loads(text)["runs"][0]["results"])
    else:
        junit_schema.validate(text)
