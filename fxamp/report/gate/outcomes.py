"""The results of the gate: as text, Markdown and JSON, as annotations of a GitHub workflow, as JUnit XML and as SARIF.

Two changes and a budget that is not kept are two lines and a third, two annotated lines of the user's code, the failed
tests "plan" and "budget casts", and three results of code scanning. The tests validate SARIF by the standard's schema.
"""

from __future__ import annotations

import hashlib
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import PurePath, PureWindowsPath
from typing import Any
from urllib.parse import quote

from tabulate import tabulate

from passes.contract.plan import installed

from ...harmless import markdown, visible
from ..diff.changes import PLAN_KEY, Change, folded, lines, rows
from .gate import KEPT, UNKNOWN, WAY_OUT, Outcome

_SUMMARY = 1_000_000  # bytes; GitHub drops a job summary of more than 1 MiB as a whole
_SHOWN = 200  # changes of a target, in Markdown and JUnit
_ANNOTATIONS = 10  # of a kind in a step; GitHub shows no more
MOST = 5_000  # results of a run of code scanning; GitHub keeps no more
_SCHEMA = "https://raw.githubusercontent.com/oasis-tcs/sarif-spec/master/Schemata/sarif-schema-2.1.0.json"
_RULES = {
    "decision-changed": "A node runs in another dtype, or for another reason, than in the committed plan.",
    "decision-added": "A node is not in the committed plan.",
    "decision-removed": "A node of the committed plan is gone.",
    "plan-changed": "A total, the policy or the capture is not that of the committed plan.",
    "over-budget": "A total is over its budget.",
    "ran-otherwise": "An op of a step did not run as planned, or as in the committed census.",
}
_HELP = "https://fxamp.github.io/fxamp/checking.html"


def to_text(outcomes: Sequence[Outcome], way_out: str = WAY_OUT, *, verbose: bool = False) -> str:
    """Write a line for each target, under it what changed and which budgets are broken, and at last a way out.

    Nodes of one op and line of source that change alike share a line, unless it is `verbose`.
    """
    out, hidden = [], False
    for outcome in (o for o in outcomes if o.status != UNKNOWN):  # whose message is an error's
        out.append(visible(outcome.message))
        out += [f"  over budget: {visible(text)}" for text in outcome.broken]
        out += [f"  {visible(text)}" for text in outcome.ran]
        every = [line for _, line in lines(outcome.changes, outcome.places)]
        shown = every if verbose else folded(outcome.changes, outcome.places)
        hidden |= len(shown) < len(every)
        out += [f"  {line}" for line in shown]
    if way_out and hidden:
        out.append("Changes that are alike share a line: --verbose lists each, for every state of the model.")
    if way_out and any(outcome.is_update_asked for outcome in outcomes):
        out.append(way_out)
    return "".join(f"{line}\n" for line in out)


def to_markdown(outcomes: Sequence[Outcome]) -> str:
    """Write a job summary: a section for each target, shortened by sections where it would be too long."""
    parts, room = ["## Precision\n"], _SUMMARY
    for outcome in outcomes:
        mark = "✅" if outcome.status == KEPT else "❌"
        found = [[*(markdown(cell) for cell in row), _line(outcome, row[1])] for row in rows(outcome.changes)]
        section = [f"{mark} {markdown(outcome.message)}\n"]
        section += [f"- over budget: {markdown(text)}\n" for text in outcome.broken]
        section += [f"- {markdown(text)}\n" for text in outcome.ran[:_SHOWN]]
        if found:
            table = tabulate(found[:_SHOWN], ("change", "node", "what", "line"), "pipe", disable_numparse=True)
            section.append(f"\n{table}\n")
        if outcome.is_update_asked:
            section.append(f"\n{WAY_OUT}\n")
        if len(found) > _SHOWN:
            section.append(f"\n{len(found) - _SHOWN} more changes are left out here.\n")
        text = "".join(section)
        if len(text.encode()) > room:
            text = f"{section[0]}\nIts {len(found)} changes are left out: the summary is full.\n"
        room -= len(text.encode())
        parts.append(text)
    return "\n".join(parts)


def _line(outcome: Outcome, key: str) -> str:
    """Return the user's line of a node, for a cell of a table; "" where it is not known."""
    place = outcome.places.get(key)
    return "" if place is None else markdown(f"{place.file}:{place.line}")


def to_json(outcomes: Sequence[Outcome]) -> str:
    """Write a list with one object for each target."""
    return json.dumps([asdict(outcome) for outcome in outcomes], indent=1, ensure_ascii=False) + "\n"


def to_github(outcomes: Sequence[Outcome]) -> str:
    """Write workflow commands that annotate the user's lines."""
    out = []
    for outcome in outcomes:
        if outcome.status != KEPT:
            out.append(_command("error", outcome.message + f"\n{WAY_OUT}" * outcome.is_update_asked))
        out += [_command("error", f"{outcome.target}: {text}") for text in (*outcome.broken, *outcome.ran)]
        level = "notice" if outcome.status == KEPT else "warning"
        by_place: dict[tuple[str, int], list[str]] = {}
        for key, said in lines(outcome.changes):
            if (place := outcome.places.get(key)) is not None:
                by_place.setdefault((place.file, place.line), []).append(said)
        title = f"precision of {outcome.target}"
        for (file, line), texts in list(by_place.items())[:_ANNOTATIONS]:
            out.append(_command(level, "\n".join(texts), file=file, line=str(line), title=title))
    return "".join(f"{line}\n" for line in out) or "no difference, and no broken budget\n"


def _command(name: str, message: str, **properties: str) -> str:
    """Write one workflow command, escaped so that no name in it can end it or begin another."""
    given = ",".join(f"{key}={_escaped(value, property=True)}" for key, value in properties.items())
    return f"::{name}{' ' * bool(given)}{given}::{_escaped(message)}"


def _escaped(text: str, property: bool = False) -> str:
    out = "\n".join(map(visible, text.split("\n"))).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return out.replace(":", "%3A").replace(",", "%2C") if property else out


def to_junit(outcomes: Sequence[Outcome]) -> str:
    """Write a suite for each target: a test for its plan, and one for every budget that is exceeded."""
    whole = ET.Element("testsuites", name="fxamp check")
    for outcome in outcomes:
        suite = ET.SubElement(whole, "testsuite", name=visible(outcome.target), time=f"{outcome.seconds:.3f}")
        for name, kind, message, told in _tests(outcome):
            case = ET.SubElement(suite, "testcase", name=visible(name), classname=visible(outcome.target))
            if kind:
                failed = ET.SubElement(case, kind, message=visible(message), type=kind)
                failed.text = "\n".join(map(visible, told))
        for count, path in (("tests", "testcase"), ("failures", "testcase/failure"), ("errors", "testcase/error")):
            suite.set(count, str(len(suite.findall(path))))
    ET.indent(whole)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(whole, encoding="unicode") + "\n"


def _tests(outcome: Outcome) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield for each test its name, "" if it passed or else the kind of failure, a line, and further lines."""
    if outcome.status == UNKNOWN:
        yield "plan", "error", outcome.message, []
        return
    if outcome.status == KEPT or not outcome.changes:
        yield "plan" if outcome.plan else "check", "", "", []
    else:
        found = lines(outcome.changes, outcome.places)
        told = [line for _, line in found[:_SHOWN]]
        left = len(found) - len(told)
        yield "plan", "failure", outcome.message, [*told, *[f"and {left} more changes"] * (left > 0), WAY_OUT]
    for text in outcome.broken:
        yield f"budget {text.partition(' is ')[0]}", "failure", text, []
    if outcome.ran:
        yield "run", "failure", outcome.message, list(outcome.ran[:_SHOWN])


def to_sarif(outcomes: Sequence[Outcome]) -> str:
    """Write one run of code scanning (SARIF 2.1.0): a result for each broken budget and each changed node."""
    results = [result for found in (_over_budget, _changed) for outcome in outcomes for result in found(outcome)]
    said = [{"level": "error", "message": _message(o.message)} for o in outcomes if o.status == UNKNOWN]
    if len(results) > MOST:
        left_out = f"{len(results) - MOST} of {len(results)} results are left out."
        said.append({"level": "warning", "message": _message(left_out)})
    rules = [
        {"id": name, "shortDescription": {"text": text}, "helpUri": f"{_HELP}#{name}"} for name, text in _RULES.items()
    ]
    version = {"version": installed()} if installed() else {}
    driver = {"name": "fxamp", "informationUri": _HELP, **version, "rules": rules}
    invocation: dict[str, Any] = {"executionSuccessful": all(o.status != UNKNOWN for o in outcomes)}
    if said:
        invocation["toolExecutionNotifications"] = said
    run = {"tool": {"driver": driver}, "invocations": [invocation], "results": results[:MOST]}
    return json.dumps({"runs": [run], "version": "2.1.0", "$schema": _SCHEMA}, indent=2, ensure_ascii=False) + "\n"


def _over_budget(outcome: Outcome) -> Iterable[dict[str, Any]]:
    for text in outcome.broken:
        yield _result("over-budget", "error", outcome, text, text.partition(" is ")[0], "budget")
    for text in outcome.ran:
        yield _result("ran-otherwise", "error", outcome, text, text.partition(": ")[0], "run")


def _changed(outcome: Outcome) -> Iterable[dict[str, Any]]:
    by_node: dict[tuple[str, str], list[Change]] = {}
    for change in outcome.changes:
        rule = "plan-changed" if change.key == PLAN_KEY else f"decision-{change.kind}"
        by_node.setdefault((rule, change.key), []).append(change)
    for (rule, key), changes in by_node.items():
        level = "note" if outcome.status == KEPT else "error"  # where the command exits with 1, it is one
        yield _result(rule, level, outcome, "; ".join(line for _, line in lines(changes)), key, rule)


def _result(rule: str, level: str, outcome: Outcome, text: str, key: str, kind: str) -> dict[str, Any]:
    """Return one result; that of the same kind and key in another run is the same, also when its line has moved."""
    made: dict[str, Any] = {"ruleId": rule, "level": level, "message": _message(f"{outcome.target}: {text}")}
    # Code scanning shows no result without a place: where no line is known it is the plan.
    place = outcome.places.get(key)
    file, line = (place.file, place.line) if place is not None else (outcome.plan or outcome.census, 1)
    if file:
        physical = {"artifactLocation": _artifact(file), "region": {"startLine": line}}
        logical = [{"fullyQualifiedName": visible(key)}]
        made["locations"] = [{"physicalLocation": physical, "logicalLocations": logical}]
    known = "\0".join((outcome.target, kind, key)).encode(errors="surrogatepass")
    return made | {"partialFingerprints": {"fxampDecision/v1": hashlib.sha256(known).hexdigest()[:32]}}


def _artifact(file: str) -> dict[str, str]:
    """Return a file, relative to the root of the sources unless its path is absolute."""
    for path in (PurePath(file), PureWindowsPath(file)):
        if path.is_absolute():
            return {"uri": path.as_uri()}
    return {"uri": quote(file.replace("\\", "/"), errors="replace"), "uriBaseId": "%SRCROOT%"}


def _message(text: str) -> dict[str, str]:
    """Return a text in which nothing is a placeholder or a link."""
    shown = re.sub(r"[{}]", r"\g<0>\g<0>", visible(text).replace("\\", "\\\\"))
    return {"text": re.sub(r"[\[\]]", r"\\\g<0>", shown)}
