"""Random numbers that Python draws in `forward`: a graph would repeat those of its capture in every call.

Numbers that torch draws are nodes of the graph, and are drawn anew.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

from passes.contract.errors import INSTEAD, NotFaithfulError


@contextlib.contextmanager
def refuse_drawn_numbers(front_end: str) -> Iterator[None]:
    """Raise NotFaithfulError if Python's or NumPy's global generator was used inside; restore their states."""
    before, numpy = random.getstate(), sys.modules.get("numpy")
    arrays = None if numpy is None else numpy.random.get_state()
    drawn = []
    try:
        yield
    finally:
        if random.getstate() != before:
            drawn.append("random")
            random.setstate(before)
        if numpy is not None and arrays is not None and not _same(numpy.random.get_state(), arrays):
            drawn.append("numpy.random")
            numpy.random.set_state(arrays)
    if drawn:
        raise NotFaithfulError(
            f"forward() draws numbers from {' and '.join(drawn)}; capture='{front_end}' would repeat the numbers of "
            f"this one call. {INSTEAD}, or draw them by torch, as torch.rand(1)."
        )


def _same(a: Any, b: Any) -> bool:
    """Say whether two states of NumPy's generator are equal: tuples of a name, an array and numbers."""
    return all(bool((x == y).all()) if hasattr(x, "all") else x == y for x, y in zip(a, b, strict=True))
