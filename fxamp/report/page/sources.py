"""The lines of the user's files that made nodes, each with a few lines round it.

A file on this machine is shown only where every line that made a node is still as it was; else those lines alone are.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator, Sequence

from ..record.record import NodeRecord

ROUND = 3  # lines before and after
MOST = 20_000  # lines of all files


def excerpts(nodes: Sequence[NodeRecord]) -> dict[str, list[tuple[int, str]]]:
    """Return (number, text) of lines for each file, in order; gaps are left out."""
    known: dict[str, dict[int, str]] = {}
    for node in nodes:
        if node.file and node.line:
            known.setdefault(node.file, {})[node.line] = node.code
    out, room = {}, MOST
    for file, lines in known.items():
        text = _text(file, lines)
        wanted = sorted({at for line in lines for at in range(line - ROUND, line + ROUND + 1) if 0 < at <= len(text)})
        found = [(at, text[at - 1]) for at in wanted] if text else sorted(lines.items())
        out[file] = found[:room]
        room -= len(out[file])
    return {file: lines for file, lines in out.items() if lines}


def _text(file: str, lines: dict[int, str]) -> list[str]:
    """Return the text of the file of that name that has these lines; nothing if there is none."""
    for path in filter(os.path.isfile, _candidates(file)):
        text = [line.rstrip("\n") for line in linecache.getlines(path)]
        if text and all(n <= len(text) and text[n - 1].strip() == code.strip() for n, code in lines.items()):
            return text
    return []


def _candidates(file: str) -> Iterator[str]:
    """Yield the paths that a file may have: below this folder, or that of a module that is loaded."""
    if not file.endswith(".py"):
        return
    yield os.path.abspath(file)
    name = os.path.basename(file)
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and os.path.basename(path) == name:
            yield path
