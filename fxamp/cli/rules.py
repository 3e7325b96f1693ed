"""`fxamp rules`: what is known of each op."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from .output import DONE, write
from .usage import UsageError

SUMMARY = "Show the op table, or the row of one op."
FORMATS = ("text", "markdown", "json")
# The columns of a table of all ops; one op is shown with every column that says something.
COLUMNS = (
    "name", "cpu", "cuda", "reason", "sensitive", "uncast", "same_dtype", "casts_out", "dtype_arg", "out",
    "commutes", "no_low", "since", "until",
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("op", metavar="OP", nargs="?", help="canonical name, such as softmax")


def run(args: argparse.Namespace) -> int:
    """List the rules of one op or of all."""
    from tabulate import tabulate

    from passes.contract.policy import nearest
    from passes.ops.rules import RULES

    if args.op is not None and args.op not in RULES:
        raise UsageError(f"no rule for the op {args.op!r}{nearest(args.op, RULES)}; `fxamp rules` lists all")
    rows = [RULES[name].columns() for name in ([args.op] if args.op else sorted(RULES))]
    # One op is shown as a list of its fields, many ops as a table without the columns that are empty for all.
    columns = [name for name in rows[0] if (args.op or name in COLUMNS) and any(row[name] for row in rows)]
    table = [[_cell(row[name]) for name in columns] for row in rows]
    headers: Sequence[str] = columns
    if args.op:
        table, headers = [[name, cell] for name, cell in zip(columns, table[0], strict=True)], ("fact", "value")
    write(
        args,
        text=lambda: tabulate(table, headers, "simple", disable_numparse=True),
        markdown=lambda: tabulate(table, headers, "pipe", disable_numparse=True),
        json=lambda: json.dumps(rows, indent=1, sort_keys=True, default=_plain) + "\n",
    )
    return DONE


def _cell(value: object) -> str:
    if value is None or value is False:
        return ""
    if isinstance(value, set | frozenset):
        return ", ".join(sorted(map(str, value)))
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _plain(value: object) -> list[str] | str:
    """Convert an object that JSON lacks: a set to a sorted list, anything else to text."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)
