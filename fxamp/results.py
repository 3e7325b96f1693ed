"""What all diagnostics return has in common: text, Markdown, JSON, the text in a notebook, and one error for a name.

Before: each result had some of these, and an unknown name was a KeyError here and a PolicyError there
After:  class Found(Result): its own `_text(style)` and `_data()`
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tabulate import tabulate

from passes._torch import pytree
from passes.contract.errors import PolicyError
from passes.contract.policy import nearest

from .harmless import as_text

Row = TypeVar("Row")


class Result:
    """The result of a diagnostic."""

    def _text(self, style: str) -> str:
        """Return the result as text; `style` is that of its tables, as `tabulate` calls it."""
        raise NotImplementedError

    def _data(self) -> dict[str, Any]:
        """Return everything as plain data."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self._text("simple")

    def to_markdown(self) -> str:
        """Return the result as Markdown.

        Example:
            >>> found = fxamp.estimate_error(model, x, y, loss=nn.functional.cross_entropy, policies="O1")
            >>> found.to_markdown().splitlines()[2][:10]
            '| policy  '
        """
        return self._text("pipe")

    def to_json(self) -> str:
        """Return everything as JSON; a number that is not finite is null.

        Example:
            >>> found = fxamp.measure_error(model, x, y, loss=nn.functional.cross_entropy, policies="O1")
            >>> __import__("json").loads(found.to_json())["reference"]
            'float64'
        """
        data = pytree.tree_map(lambda v: None if isinstance(v, float) and not math.isfinite(v) else v, self._data())
        return json.dumps({"version": 1, **data}, indent=1, sort_keys=True) + "\n"

    def _repr_html_(self) -> str:
        """Show the text in a notebook."""
        return as_text(str(self))


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], style: str) -> str:
    """Return rows as text, without the columns that are empty in all of them."""
    shown = [at for at in range(len(head)) if any(row[at] not in (None, "") for row in rows)]
    cells = [[row[at] for at in shown] for row in rows]
    return tabulate(cells, [head[at] for at in shown], style, disable_numparse=True, missingval="")


def some(names: Iterable[object], most: int = 3) -> str:
    """Return the first few names, and how many more there are."""
    every = list(map(str, names))
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def named(rows: Mapping[str, Row], name: str, what: str) -> Row:
    """Return one of the rows of a result.

    Raises:
        PolicyError: there is none of this name; the message has the nearest one, and all.
    """
    if name not in rows:
        raise PolicyError(f"the {what} has no {name!r}{nearest(name, rows)}; it has {', '.join(rows)}.")
    return rows[name]
