"""The result of the gate as SARIF 2.1.0, which code scanning reads: a result for each changed decision.

The tests validate what is written by the schema of the standard.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath, PureWindowsPath
from typing import Any
from urllib.parse import quote

from ..diff.changes import PLAN_KEY, Change, lines
from ..forms.harmless import visible
from .gate import UNKNOWN, Outcome

MOST = 5_000  # results of a run; GitHub keeps no more
_SCHEMA = "https://raw.githubusercontent.com/oasis-tcs/sarif-spec/master/Schemata/sarif-schema-2.1.0.json"
_PLACEHOLDER = re.compile(r"[{}]")
_LINK = re.compile(r"[\[\]]")
_RULES = {
    "decision-changed": "A node runs in another dtype, or for another reason, than in the committed plan.",
    "decision-added": "A node is not in the committed plan.",
    "decision-removed": "A node of the committed plan is gone.",
    "plan-changed": "A total, the policy or the capture is not that of the committed plan.",
    "over-budget": "A total is over its budget.",
}


def to_sarif(outcomes: Sequence[Outcome]) -> str:
    """Write one run for all targets."""
    results = [*_budgets(outcomes), *_decisions(outcomes)]
    said = [{"level": "error", "message": _message(o.message)} for o in outcomes if o.status == UNKNOWN]
    if len(results) > MOST:
        left_out = f"{len(results) - MOST} of {len(results)} results are left out."
        said.append({"level": "warning", "message": _message(left_out)})
    rules = [{"id": name, "shortDescription": {"text": text}} for name, text in _RULES.items()]
    invocation: dict[str, Any] = {"executionSuccessful": all(o.status != UNKNOWN for o in outcomes)}
    if said:
        invocation["toolExecutionNotifications"] = said
    run = {
        "tool": {"driver": {"name": "fxamp", "rules": rules}}, "invocations": [invocation], "results": results[:MOST],
    }  # fmt: skip
    return json.dumps({"runs": [run], "version": "2.1.0", "$schema": _SCHEMA}, indent=2, ensure_ascii=False) + "\n"


def _budgets(outcomes: Sequence[Outcome]) -> Iterator[dict[str, Any]]:
    for outcome in outcomes:
        for text in (*outcome.broken, *outcome.ran):
            key = text.partition(" is ")[0]
            yield _result("over-budget", "error", outcome, text, key, ("budget", key))


def _decisions(outcomes: Sequence[Outcome]) -> Iterator[dict[str, Any]]:
    for outcome in outcomes:
        by_node: dict[tuple[str, str], list[Change]] = {}
        for change in outcome.changes:
            rule = "plan-changed" if change.key == PLAN_KEY else f"decision-{change.kind}"
            by_node.setdefault((rule, change.key), []).append(change)
        for (rule, key), changes in by_node.items():
            text = "; ".join(line for _, line in lines(changes))
            yield _result(rule, "warning", outcome, text, key, (rule, key))


def _result(rule: str, level: str, outcome: Outcome, text: str, key: str, same: Sequence[str]) -> dict[str, Any]:
    """Return one result; what is the `same` in two runs is the same result, also when its line has moved."""
    made: dict[str, Any] = {"ruleId": rule, "level": level, "message": _message(f"{outcome.target}: {text}")}
    # Code scanning shows no result without a place: where no line is known it is the plan.
    place = outcome.places.get(key)
    file, line = (place.file, place.line) if place is not None else (outcome.plan, 1)
    if file:
        physical: dict[str, Any] = {"artifactLocation": _artifact(file), "region": {"startLine": line}}
        logical: list[Any] = [{"fullyQualifiedName": visible(key)}]
        made["locations"] = [{"physicalLocation": physical, "logicalLocations": logical}]
    known = "\0".join((outcome.target, *same)).encode(errors="surrogatepass")
    return made | {"partialFingerprints": {"fxampDecision/v1": hashlib.sha256(known).hexdigest()[:32]}}


def _artifact(file: str) -> dict[str, str]:
    """Return a file, relative to the root of the sources unless its path is absolute."""
    for path in (PurePath(file), PureWindowsPath(file)):
        if path.is_absolute():
            return {"uri": path.as_uri()}
    return {"uri": quote(file.replace("\\", "/"), errors="replace"), "uriBaseId": "%SRCROOT%"}


def _message(text: str) -> dict[str, str]:
    """Return a text in which nothing is a placeholder or a link."""
    shown = _PLACEHOLDER.sub(r"\g<0>\g<0>", visible(text).replace("\\", "\\\\"))
    return {"text": _LINK.sub(r"\\\g<0>", shown)}
