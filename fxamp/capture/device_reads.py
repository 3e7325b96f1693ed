"""Where the code of a model reads its kind of device, which decides what a plan for another kind is of."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from itertools import pairwise
from types import CodeType

import torch

_OF_TORCH = torch.__file__.removesuffix("__init__.py")


def reads_of_device(codes: Iterable[CodeType], here: str) -> tuple[str, ...]:
    """Return a note for each line outside of torch that asks for the kind of device, which is `here` in the trace."""
    places = dict.fromkeys(place for code in codes if not code.co_filename.startswith(_OF_TORCH) for place in _in(code))
    return tuple(
        f"{place} reads {what}, which is that of '{here}' in this capture: on the device of the plan another branch "
        "may run"
        for place, what in places
    )


def _in(code: CodeType) -> Iterator[tuple[str, str]]:
    line = code.co_firstlineno
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    for i, (step, after) in enumerate(pairwise(steps)):
        line = step.starts_line if isinstance(step.starts_line, int) and step.starts_line > 1 else line
        named = step.argval if step.opname in ("LOAD_ATTR", "LOAD_METHOD") else None
        compared = any(s.opname in ("COMPARE_OP", "CONTAINS_OP") for s in steps[i + 2 : i + 5])
        if named == "is_cuda" or (named == "device" and after.argval == "type" and compared):
            yield (
                f"{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name} ({code.co_filename}:{line})",
                ("is_cuda" if named == "is_cuda" else "device.type"),
            )
