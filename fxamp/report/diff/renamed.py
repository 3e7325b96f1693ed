"""Renamed modules: one line for each, not one for each of the nodes in it.

h.6 to 11  is now  h.7 to 12
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .changes import MODULES, Change
from .match import Item, corresponding

_LAST_NUMBER = re.compile(r"\d+(?!.*\d)")


def renamed(before: Sequence[Item], after: Sequence[Item], pairs: Mapping[int, int]) -> list[Change]:
    """Return a line for each renamed module; neighbours with consecutive numbers share a line."""
    instead = corresponding(before, after, pairs)
    runs: dict[tuple[str, str, int], dict[int, list[str]]] = {}
    for new, old in sorted(pairs.items()):
        a, b = before[old].module, after[new].module
        a, b = (m.partition(":")[2] if m.partition(":")[0].isdigit() else m for m in (a, b))
        if a == b or instead[before[old].module] != after[new].module:
            continue
        a, b = _without_common_end(a, b)
        first, second = _LAST_NUMBER.search(a), _LAST_NUMBER.search(b)
        number = int(first[0]) if first else 0
        step = int(second[0]) - number if first and second else 0
        shape = (a, b, 0) if not step else (_LAST_NUMBER.sub("*", a), _LAST_NUMBER.sub("*", b), step)
        runs.setdefault(shape, {}).setdefault(number if step else 0, []).append(after[new].key)
    return [Change(
        "changed", MODULES, "path", _numbered(a, list(at), 0), _numbered(b, list(at), step),
        tuple(key for keys in at.values() for key in keys),
    ) for (a, b, step), at in runs.items()]  # fmt: skip


def _without_common_end(a: str, b: str) -> tuple[str, str]:
    left, right = a.split(".") if a else [], b.split(".") if b else []
    while left and right and left[-1] == right[-1]:
        left.pop()
        right.pop()
    return ".".join(left), ".".join(right)


def _numbered(path: str, numbers: Sequence[int], step: int) -> str:
    first, *others = sorted(number + step for number in numbers)
    text = path.replace("*", str(first), 1) or "(model)"
    if others == [*range(first + 1, first + 1 + len(others))]:
        return f"{text} to {others[-1]}" if others else text
    return ", ".join((text, *map(str, others)))
