"""The result of the gate as text, as Markdown, as JSON and as annotations of a GitHub workflow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from ..diff.changes import lines as listed
from ..diff.changes import rows
from ..forms.harmless import markdown, visible
from .gate import KEPT, WAY_OUT, Outcome

_SUMMARY = 1_000_000  # bytes; GitHub drops a job summary of more than 1 MiB as a whole
_SHOWN = 200  # changes of a target, in Markdown
_ANNOTATIONS = 10  # of a kind in a step; GitHub shows no more


def to_text(outcomes: Sequence[Outcome], way_out: str = WAY_OUT) -> str:
    """Write a line for each target, and under it what changed and which budgets are broken.

    Args:
        outcomes: the results for all targets.
        way_out: a last line that says how to accept the changes; "" for none.
    """
    lines = []
    for outcome in outcomes:
        lines.append(visible(outcome.message))
        lines += [f"  over budget: {visible(text)}" for text in outcome.broken]
        lines += [f"  {visible(text)}" for text in outcome.ran]
        lines += [f"  {line}" for _, line in listed(outcome.changes, outcome.places)]
    if way_out and any(outcome.changes for outcome in outcomes):
        lines.append(way_out)
    return "\n".join(lines) + "\n"


def to_markdown(outcomes: Sequence[Outcome]) -> str:
    """Write a job summary: a section for each target, shortened by sections where it would be too long."""
    parts = ["## Precision\n"]
    room = _SUMMARY
    for outcome in outcomes:
        mark = "✅" if outcome.status == KEPT else "❌"
        found = [[markdown(cell) for cell in row] for row in rows(outcome.changes)]
        shown = found[:_SHOWN]
        section = [f"{mark} {markdown(outcome.message)}\n"]
        section += [f"- over budget: {markdown(text)}\n" for text in outcome.broken]
        section += [f"- {markdown(text)}\n" for text in outcome.ran[:_SHOWN]]
        if shown:
            table = tabulate(shown, ("change", "node", "what"), "pipe", disable_numparse=True)
            section.append(f"\n{table}\n\n{WAY_OUT}\n")
        if len(found) > len(shown):
            section.append(f"\n{len(found) - len(shown)} more changes are left out here.\n")
        text = "".join(section)
        if len(text.encode()) > room:
            text = (
                f"{mark} {markdown(outcome.message)}\n\nIts {len(found)} changes are left out: the summary is full.\n"
            )
        room -= len(text.encode())
        parts.append(text)
    return "\n".join(parts)


def to_json(outcomes: Sequence[Outcome]) -> str:
    """Write a list with one object for each target."""
    return json.dumps([o.to_data() for o in outcomes], indent=1, ensure_ascii=False) + "\n"


def to_github(outcomes: Sequence[Outcome]) -> str:
    """Write workflow commands that annotate the user's lines."""
    lines = []
    for outcome in outcomes:
        if outcome.status != KEPT:
            lines.append(_command("error", outcome.message + f"\n{WAY_OUT}" * bool(outcome.changes)))
        lines += [_command("error", f"{outcome.target}: {text}") for text in (*outcome.broken, *outcome.ran)]
        lines += list(_annotations(outcome))
    return "".join(f"{line}\n" for line in lines) or "as planned\n"


def _annotations(outcome: Outcome) -> Iterable[str]:
    by_place: dict[tuple[str, int], list[str]] = {}
    for key, said in listed(outcome.changes):
        place = outcome.places.get(key)
        if place is not None:
            by_place.setdefault((place.file, place.line), []).append(said)
    for (file, line), texts in list(by_place.items())[:_ANNOTATIONS]:
        yield _command("warning", "\n".join(texts), file=file, line=str(line), title=f"precision of {outcome.target}")


def _command(name: str, message: str, **properties: str) -> str:
    """Write one workflow command, escaped so that no name in it can end it or begin another."""
    given = ",".join(f"{key}={_escaped(value, property=True)}" for key, value in properties.items())
    return f"::{name}{' ' * bool(given)}{given}::{_escaped(message)}"


def _escaped(text: str, property: bool = False) -> str:
    lines = [visible(line) for line in text.split("\n")]
    out = "\n".join(lines).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return out.replace(":", "%3A").replace(",", "%2C") if property else out
