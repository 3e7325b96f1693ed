"""The result of the gate as SARIF 2.1.0, which code scanning reads: a result for each changed decision.

The classes are the few objects of the standard that are used here; the tests validate the result by its schema.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath, PureWindowsPath
from typing import Literal
from urllib.parse import quote

import msgspec

from ..diff.changes import Change
from ..forms.harmless import visible
from .gate import UNKNOWN, Outcome
from .listed import lines

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

Level = Literal["warning", "error"]


class _Shape(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The base of every object of a log."""


class Message(_Shape, frozen=True):
    """A text."""

    text: str


class ArtifactLocation(_Shape, frozen=True):
    """A file, relative to the root of the sources."""

    uri: str
    uri_base_id: str | None = None


class Region(_Shape, frozen=True):
    """A line."""

    start_line: int


class PhysicalLocation(_Shape, frozen=True):
    """A line of a file."""

    artifact_location: ArtifactLocation
    region: Region


class LogicalLocation(_Shape, frozen=True):
    """A node, by its key."""

    fully_qualified_name: str


class Location(_Shape, frozen=True):
    """Where a result is."""

    physical_location: PhysicalLocation
    logical_locations: tuple[LogicalLocation, ...] = ()


class Result(_Shape, frozen=True):
    """One changed decision, or one budget that is exceeded."""

    rule_id: str
    level: Level
    message: Message
    locations: tuple[Location, ...] = ()
    partial_fingerprints: dict[str, str] = {}


class Rule(_Shape, frozen=True):
    """A kind of results."""

    id: str
    short_description: Message


class Driver(_Shape, frozen=True):
    """This program."""

    name: str
    rules: tuple[Rule, ...]


class Tool(_Shape, frozen=True):
    """This program."""

    driver: Driver


class Notification(_Shape, frozen=True):
    """The messages about the run itself."""

    level: Level
    message: Message


class Invocation(_Shape, frozen=True):
    """How the run ended."""

    execution_successful: bool
    tool_execution_notifications: tuple[Notification, ...] = ()


class Run(_Shape, frozen=True):
    """All that one run found."""

    tool: Tool
    invocations: tuple[Invocation, ...]
    results: tuple[Result, ...] = msgspec.field()


class Log(_Shape, frozen=True):
    """The whole file."""

    runs: tuple[Run, ...]
    version: str = msgspec.field()
    schema: str = msgspec.field(name="$schema")


def to_sarif(outcomes: Sequence[Outcome]) -> str:
    """Write one run for all targets."""
    results = [*_budgets(outcomes), *_decisions(outcomes)]
    said = [Notification("error", _message(o.message)) for o in outcomes if o.status == UNKNOWN]
    if len(results) > MOST:
        said.append(Notification("warning", _message(f"{len(results) - MOST} of {len(results)} results are left out.")))
    rules = tuple(Rule(name, Message(text)) for name, text in _RULES.items())
    run = Run(
        Tool(Driver("fxamp", rules)), (Invocation(all(o.status != UNKNOWN for o in outcomes), tuple(said)),),
        tuple(results[:MOST]),
    )  # fmt: skip
    return msgspec.json.format(msgspec.json.encode(Log((run,), "2.1.0", _SCHEMA)), indent=1).decode() + "\n"


def _budgets(outcomes: Sequence[Outcome]) -> Iterator[Result]:
    for outcome in outcomes:
        for text in outcome.broken:
            key = text.partition(" ")[0]
            yield Result(
                "over-budget", "error", _message(f"{outcome.target}: {text}"), _locations(outcome, key),
                _fingerprint(outcome.target, "budget", key),
            )  # fmt: skip


def _decisions(outcomes: Sequence[Outcome]) -> Iterator[Result]:
    for outcome in outcomes:
        by_node: dict[tuple[str, str], list[Change]] = {}
        for change in outcome.changes:
            rule = "plan-changed" if change.key == "(plan)" else f"decision-{change.kind}"
            by_node.setdefault((rule, change.key), []).append(change)
        for (rule, key), changes in by_node.items():
            texts = (line for _, line in lines(changes))
            yield Result(
                rule, "warning", _message(f"{outcome.target}: {'; '.join(texts)}"), _locations(outcome, key),
                _fingerprint(outcome.target, rule, key),
            )  # fmt: skip


def _locations(outcome: Outcome, key: str) -> tuple[Location, ...]:
    """Return the user's line of a node, else the plan file: code scanning shows no result without a place."""
    place = outcome.places.get(key)
    file, line = (place.file, place.line) if place is not None else (outcome.plan, 1)
    if not file:
        return ()
    return (Location(PhysicalLocation(_artifact(file), Region(line)), (LogicalLocation(visible(key)),)),)


def _artifact(file: str) -> ArtifactLocation:
    for path in (PurePath(file), PureWindowsPath(file)):
        if path.is_absolute():
            return ArtifactLocation(path.as_uri())
    return ArtifactLocation(quote(file.replace("\\", "/"), errors="replace"), "%SRCROOT%")


def _message(text: str) -> Message:
    """Return a text in which nothing is a placeholder or a link."""
    shown = _PLACEHOLDER.sub(r"\g<0>\g<0>", visible(text).replace("\\", "\\\\"))
    return Message(_LINK.sub(r"\\\g<0>", shown))


def _fingerprint(*parts: str) -> dict[str, str]:
    """Return a fingerprint of a result, which stays the same when lines move."""
    text = "\0".join(parts).encode(errors="surrogatepass")
    return {"fxampDecision/v1": hashlib.sha256(text).hexdigest()[:32]}
