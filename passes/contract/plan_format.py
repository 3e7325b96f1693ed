"""Plans as text: read strictly, in every format that fxamp has ever written; written atomically."""

from __future__ import annotations

import contextlib
import json
import os
import reprlib
import uuid
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

from .errors import PlanError

FORMAT_VERSION = 8
REMEDY = "make a new plan, with `fxamp report TARGET --save-plan FILE` or `fxamp.plan(model, ...).save(path)`"
LONGEST = 64 << 20  # characters; 50,000 nodes take 13 MB


def strictly(text: str, name: str, what: str, remedy: str = REMEDY) -> Any:
    """Read JSON without duplicate keys, NaN and infinities; errors call it `name`, and say `what` it should be."""
    if len(text) > LONGEST:
        raise PlanError(f"{name}: not a {what} (longer than {LONGEST >> 20} MB, which no model needs); {remedy}")
    try:
        return json.loads(text, object_pairs_hook=_said_once, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise PlanError(f"{name}:{error.lineno}: not JSON, or cut short ({error.msg}); {remedy}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets within brackets
        raise PlanError(f"{name}: not a {what} ({error}); {remedy}") from error


def _said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{reprlib.repr(twice)} is given twice in one object")
    return data


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def in_this_format(data: dict[str, Any]) -> dict[str, Any]:
    """Return a plan of an older format in this one."""
    if data["version"] < 2:  # version 1 knew only one graph
        data = {**data, "states": []}
    if data["version"] < 7 and isinstance(data.get("decisions"), list):
        data = {**data, "decisions": [_decision_in_this_format(row) for row in data["decisions"]]}
    if data["version"] < 6 and isinstance(data.get("decisions"), list) and isinstance(data.get("states"), list):
        data = {**data, "decisions": _listed_in_each_state(data["decisions"], data["states"])}
    added = {
        "edits": {}, "totals": {}, "certificate": {}, "fxamp_version": "", "machine": "", "timings": {},
        "complete": True, "stored": [],
    }  # fmt: skip
    return {**added, **data, "version": FORMAT_VERSION}


def _decision_in_this_format(row: Any) -> Any:
    """Return a decision of an older format in this one: version 2 had codes only in reasons, version 6 no ranges."""
    if not isinstance(row, dict) or not isinstance(row.get("reason"), str):
        return row
    return {"code": row["reason"].partition(":")[0].strip(), "ranges": [], **row}


def _listed_in_each_state(rows: list[Any], states: list[Any]) -> list[Any]:
    """Return decisions with those of the first state in every state; up to format 5 they were listed there alone."""
    numbers = [str(state).partition(":")[0] for state in states]
    shaped = all(isinstance(row, dict) and isinstance(row.get("graph"), int) for row in rows)
    if len(states) < 2 or not shaped or not all(n.isdecimal() and len(n) < 9 for n in numbers):
        return rows
    firsts = [int(n) for n in numbers]
    shared = [row for row in rows if row["graph"] < firsts[1]]
    known = {(row["graph"], row.get("key")) for row in rows}
    moved = [{**row, "graph": row["graph"] + first} for first in firsts[1:] for row in shared]
    added = [row for row in moved if (row["graph"], row.get("key")) not in known]
    return sorted([*rows, *added], key=lambda row: int(row["graph"]))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file atomically; ValueError: the path is invalid, or UTF-8 cannot encode the text."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that takes the place of another when it is complete.

    A reader sees the old file or the new one, never a part, even with several writers.
    """
    # If the path is a symbolic link, the link stays and its target is replaced.
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        # For a directory this raises an error; a device or a pipe cannot be replaced, only written to.
        with target.open("wb") as file:
            yield file
        return
    temporary = target.with_name(f".fxamp-{uuid.uuid4().hex}.tmp")  # short, for the target's own name may be long
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        if error.filename != str(temporary):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error  # the caller's file, not one of ours
    finally:
        temporary.unlink(missing_ok=True)


# The JSON types of annotations; all others are text.
_JSON_TYPES: dict[str, type[Any]] = {"int": int, "bool": bool, "tuple": list, "Mapping": dict}


def check_shape(kind: Any, data: Any, where: str) -> None:
    """Refuse JSON data that does not have exactly the fields of `kind`, each of its type."""
    if not isinstance(data, dict):
        raise PlanError(f"{where}: expected an object, found {type(data).__name__}; {REMEDY}")
    types = {f.name: str(f.type) for f in fields(kind)}
    for name in sorted(types.keys() ^ data.keys()):
        problem = "is missing" if name in types else "is not a field of this format"
        raise PlanError(f"{where}: {name!r} {problem}; {REMEDY}")
    for name, value in data.items():
        expected = _JSON_TYPES.get(types[name].partition("[")[0], str)
        # bool is an int to Python, but not in a plan.
        if not isinstance(value, expected) or isinstance(value, bool) is not (expected is bool):
            raise PlanError(f"{where}: {name!r} is {reprlib.repr(value):.60}, expected {expected.__name__}; {REMEDY}")
        if isinstance(value, int) and value < 0:
            raise PlanError(f"{where}: {name!r} is negative, {value}; {REMEDY}")
        numbers = value.values() if isinstance(value, dict) else ()
        if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
            raise PlanError(f"{where}: {name!r} holds something other than numbers; {REMEDY}")
        if types[name] == "tuple[str, ...]" and not all(isinstance(item, str) for item in value):
            raise PlanError(f"{where}: {name!r} holds something other than text; {REMEDY}")
