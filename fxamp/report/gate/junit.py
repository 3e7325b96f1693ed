"""The result of the gate as JUnit XML, which every CI shows as tests: a suite for each target.

Before: two changes and a budget that is not kept      After: the failed tests "plan" and "budget casts"
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from passes.contract.errors import FxampError

from ..forms.harmless import visible
from .gate import UNKNOWN, Outcome
from .listed import WAY_OUT
from .listed import lines as listed

_SHOWN = 200  # changes of a target


def to_junit(outcomes: Sequence[Outcome]) -> str:
    """Write a suite for each target: a test for its plan, and one for every budget that is exceeded.

    Raises:
        FxampError: the library that writes the format is not installed.
    """
    try:
        import junitparser
    except ModuleNotFoundError as e:
        raise FxampError(f"--output-format junit needs {e.name}; install it with: pip install 'fxamp[ci]'") from e
    whole = junitparser.JUnitXml("fxamp check")
    for outcome in outcomes:
        suite = junitparser.TestSuite(visible(outcome.target))
        for name, kind, message, lines in _tests(outcome):
            case = junitparser.TestCase(visible(name), visible(outcome.target))
            if kind:
                result = {"error": junitparser.Error, "failure": junitparser.Failure}[kind]
                case.result = [result(visible(message), kind)]
                case.result[0].text = "\n".join(map(visible, lines))
            suite.add_testcase(case)
        whole.add_testsuite(suite)
    text: bytes = whole.tostring()
    return '<?xml version="1.0" encoding="utf-8"?>\n' + text.decode() + "\n"


def _tests(outcome: Outcome) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield for each test its name, "" if it passed or else the kind of failure, a line, and further lines."""
    if outcome.status == UNKNOWN:
        yield "plan", "error", outcome.message, []
        return
    if not outcome.changes:
        yield "plan", "", "", []
    else:
        lines = []
        found = listed(outcome.changes)
        for key, line in found[:_SHOWN]:
            place = outcome.places.get(key)
            lines.append(line + (f"  ({place.file}:{place.line})" if place else ""))
        left = len(found) - len(lines)
        yield "plan", "failure", outcome.message, [*lines, *[f"and {left} more changes"] * (left > 0), WAY_OUT]
    for text in outcome.broken:
        yield f"budget {text.partition(' ')[0]}", "failure", text, []
