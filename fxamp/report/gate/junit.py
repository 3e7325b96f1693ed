"""The result of the gate as JUnit XML, which every CI shows as tests: a suite for each target.

Before: two changes and a budget that is not kept      After: the failed tests "plan" and "budget casts"
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence

from ..diff.changes import lines
from ..forms.harmless import visible
from .gate import UNKNOWN, WAY_OUT, Outcome

_SHOWN = 200  # changes of a target


def to_junit(outcomes: Sequence[Outcome]) -> str:
    """Write a suite for each target: a test for its plan, and one for every budget that is exceeded."""
    whole = ET.Element("testsuites", name="fxamp check")
    for outcome in outcomes:
        tests = list(_tests(outcome))
        kinds = [kind for _, kind, _, _ in tests]
        counts = {"tests": len(tests), "failures": kinds.count("failure"), "errors": kinds.count("error")}
        given = {"name": visible(outcome.target)} | {name: str(count) for name, count in counts.items()}
        suite = ET.SubElement(whole, "testsuite", given)
        for name, kind, message, told in tests:
            case = ET.SubElement(suite, "testcase", name=visible(name), classname=visible(outcome.target))
            if kind:
                failed = ET.SubElement(case, kind, message=visible(message), type=kind)
                failed.text = "\n".join(map(visible, told))
    ET.indent(whole)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(whole, encoding="unicode") + "\n"


def _tests(outcome: Outcome) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield for each test its name, "" if it passed or else the kind of failure, a line, and further lines."""
    if outcome.status == UNKNOWN:
        yield "plan", "error", outcome.message, []
        return
    if not outcome.changes:
        yield "plan", "", "", []
    else:
        found = lines(outcome.changes, outcome.places)
        told = [line for _, line in found[:_SHOWN]]
        left = len(found) - len(told)
        yield "plan", "failure", outcome.message, [*told, *[f"and {left} more changes"] * (left > 0), WAY_OUT]
    for text in outcome.broken:
        yield f"budget {text.partition(' is ')[0]}", "failure", text, []
    if outcome.ran:
        yield "run", "failure", outcome.message, list(outcome.ran[:_SHOWN])
