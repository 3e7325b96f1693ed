"""A committed census against that of a step now: which op ran in another dtype, how often, or not at all.

The lines of code outside of graphs are compared without their numbers, which change when a line above is added.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from passes.contract.errors import FxampError
from passes.contract.plan_format import strictly, write_text

from ...census.census import Census
from .gate import ANEW

VERSION = 1
_NUMBER = re.compile(r":\d+(?=,|$)")
_Signature = tuple[tuple[str, ...], tuple[str, ...]]  # dtypes of operands and results
_Ran = Mapping[tuple[str, str, str], "Counter[_Signature]"]


class _Row(msgspec.Struct):
    """What is compared of a row of a census."""

    where: str
    phase: str
    op: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    count: int
    line: str = ""


class _File(msgspec.Struct):
    """What is read of a census."""

    version: int
    name: str
    ran: list[_Row]
    policy: str = ""

    @property
    def subject(self) -> str:
        """What ran."""
        return f"a view at {self.policy}" if self.policy else "a model that nobody converted"


def against(file: Path, name: str, found: Census, update: bool) -> tuple[list[str], str]:
    """Compare a census with the one in a file, and return a sentence for each difference, and one that sums them up.

    With `update` the file is written where it is missing or differs; folders on its way are made.

    Raises:
        FxampError: The file is missing, holds no census that this fxamp can read, or one of a view where this one is of
            a model that nobody converted, or the reverse.
    """
    text = found.to_json()
    if not file.exists():
        if not update:
            raise FxampError(f"there is no census {name!r} yet: write it with --update, and commit it")
        said = []
    else:
        before, now = _read(file.read_text(encoding="utf-8", errors="replace"), name), _read(text, name)
        if bool(before.policy) != bool(now.policy) and not update:
            raise FxampError(
                f"{name} is a census of {before.subject}, and what ran now is {now.subject}: the target's policy says "
                'which it is, "autocast,dtype=bf16" under torch.autocast, "O1,dtype=bf16" a view; or write the census '
                "anew with --update"
            )
        said = list(differences(before, now, name))
        if not update:
            return said, f"{len(said)} differences in what ran against {name}" if said else f"ran as in {name}"
    if said or not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        word = "updated" if file.exists() else "wrote"
        write_text(file, text)
        return [], f"{word} {name}"
    return [], f"ran as in {name}"


def _read(text: str, name: str) -> _File:
    data: Any = strictly(text, name, "census", ANEW)
    version = data.get("version") if isinstance(data, dict) else None
    if isinstance(version, bool) or not isinstance(version, int) or "ran" not in data:
        raise FxampError(f"{name}: JSON, but not a census; {ANEW}")
    if version != VERSION:
        raise FxampError(
            f"{name}: a census of format {version}, and this fxamp reads format {VERSION}; use the fxamp that wrote "
            f"it, or {ANEW}"
        )
    try:
        return msgspec.convert(data, _File)
    except msgspec.ValidationError as error:
        raise FxampError(f"{name}: not a census ({error}); {ANEW}") from error


def differences(before: _File, now: _File, name: str) -> Iterator[str]:
    """Yield a sentence for each op at a place that did not run as before."""
    if before.name != now.name:
        yield f"the census is of {now.name}, and {name} of {before.name}"
    old, new = _ran(before), _ran(now)
    lines = {_place(row): row.line for row in now.ran if row.line}
    for key in dict.fromkeys((*new, *old)):
        place, phase, op = key
        if new.get(key) == old.get(key):
            continue
        line = lines.get(place, "")
        where = line if _NUMBER.sub("", line) == place else f"{place} ({line})" if line else place
        ran, was = (_said(side.get(key)) for side in (new, old))
        in_phase = "" if phase == "forward" else f" in {phase}" if phase == "backward" else ""
        yield f"{where}: {op}{in_phase} ran {ran}, and {was} in {name}"


def _place(row: _Row) -> str:
    return _NUMBER.sub("", row.where)


def _ran(file: _File) -> _Ran:
    """Return how often each op ran in which dtypes, by its place and phase."""
    found: defaultdict[tuple[str, str, str], Counter[_Signature]] = defaultdict(Counter)
    for row in file.ran:
        found[_place(row), row.phase, row.op][row.operands, row.results] += row.count
    return found


def _said(ran: Counter[_Signature] | None) -> str:
    """Say in which dtypes an op ran, and how often if that is not once."""
    if not ran:
        return "not at all"
    return " and ".join(
        f"in {_dtypes(*signature)}{f' {count} times' if count > 1 else ''}" for signature, count in sorted(ran.items())
    )


def _dtypes(operands: tuple[str, ...], results: tuple[str, ...]) -> str:
    """Name the dtypes: one where all are the same."""
    inside, out = (", ".join(dict.fromkeys(side)) for side in (operands, results))
    return inside or out if inside == out or not out or not inside else f"{inside} to {out}"
