"""The page of a report: one HTML file that needs no other file. Its data is here; its script draws it.

The page can run no other script and fetch nothing. Data is put into it as JSON that cannot end early, and the script
puts texts into elements, never markup. The page's own policy (CSP) names the hashes of its style and its script, so
that not even markup that got in could run or load anything.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import linecache
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any

import msgspec

from passes.contract.reasons import Code

from ...harmless import visible
from ..record.record import PALETTE, NodeRecord, Record, State, style_of

MOST_NODES = 60_000  # most nodes on a page; browsers are slow with larger files
MOST_LINES, ROUND = 20_000, 3  # lines of all files; lines shown before and after one that made a node
# Modules of the script, each after those that it needs when it is read.
SCRIPTS = ("data.js", "elements.js", "layout.js", "drawing.js", "views.js", "main.js")
_LINKS = re.compile(r'^import [^;]* from "[^"]*";\n|^export (?=const |function )', re.MULTILINE)
# Characters that could end the data early in HTML or in the script. In JSON their escapes mean the same text.
_ENDS = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
_KINDS = ("node", "input", "attribute")


def page(
    record: Record,
    model: str = "model",
    training: Sequence[tuple[str, str]] = (),
    nodes: Sequence[NodeRecord] | None = None,
    census: Mapping[str, Any] | None = None,
    errors: Mapping[str, float] | None = None,
) -> str:
    """Return the page of a record: all its nodes or some, with facts about training and a census as plain data.

    Of errors it shows the predicted share of each node in the variance of the loss, by key.
    """
    shown = record.nodes if nodes is None else tuple(nodes)
    said = []
    if len(shown) < len(record.nodes):
        said.append(f"{len(shown)} of {len(record.nodes)} nodes were chosen for this page; the totals count all nodes.")
    if len(shown) > MOST_NODES:
        said.append(
            f"{len(shown)} nodes are more than the {MOST_NODES} that a page can hold: it shows totals only. "
            "Choose some of them with --module PATH, or take --output-format json."
        )
        shown = ()
    data = {
        "model": model, "policy": record.policy, "notes": record.notes, "training": training, "said": said,
        "made": f"{record.device} · captured by {record.capture} · torch {record.torch} · fxamp {record.fxamp}",
        "meanings": {code.value: code.meaning for code in Code}, "files": excerpts(shown),
        "census": census, "error": None if errors is None else [100 * errors.get(n.key, 0.0) for n in shown],
        "states": [_state(record, state, shown) for state in record.states], **_columns(shown),
    }  # fmt: skip
    return _render(f"{model}: precision under {record.policy}", data)


def _state(record: Record, state: State, shown: Sequence[NodeRecord]) -> dict[str, Any]:
    """Return the totals of one state, and the places of its nodes among those shown; None for all of them."""
    at = {id(node): i for i, node in enumerate(shown)}
    places = [at[id(n)] for n in record.of(state) if id(n) in at]
    return {
        "name": state.name, "totals": msgspec.to_builtins(state.totals),
        "nodes": places if len(record.states) > 1 else None,
        "compiler": state.compiler, "kept_bytes": state.kept_bytes,
        "elsewhere": record.casts_elsewhere(state) if len(shown) == len(record.nodes) else [],
        "output_bytes": sum(c.bytes or 0 for c in state.output_casts),
    }  # fmt: skip


class _Strings(dict[str, int]):
    """Number texts, since most of a page's are there many times."""

    def __missing__(self, text: str) -> int:
        self[text] = number = len(self)
        return number


def _columns(nodes: Sequence[NodeRecord]) -> dict[str, Any]:
    """Return the nodes as columns, which refer to texts and to other nodes by number."""
    strings = _Strings()
    at = {(n.graph, n.key): i for i, n in enumerate(nodes)}
    first = min((n.graph for n in nodes), default=0)

    def place(node: NodeRecord, key: str) -> int:
        """Return the place of a node of the same graph, or of the first; or the number of the text, below zero."""
        return at.get((node.graph, key), at.get((first, key), -1 - strings[key]))

    texts: Mapping[str, list[str]] = {
        # A key begins with its module nearly always.
        "key": [n.key.removeprefix(n.module) if n.key.startswith(f"{n.module}/") else n.key for n in nodes],
        "op": [n.op for n in nodes], "module": [n.module for n in nodes], "file": [n.file for n in nodes],
        "code": [n.code for n in nodes], "inside": [n.torch_source for n in nodes],
        "colour": [n.colour for n in nodes], "autocast": [n.autocast for n in nodes],
        "original": [n.original for n in nodes], "because": [n.reason_code for n in nodes],
        "reason": [n.reason for n in nodes],
        "gives": [_gives(n) for n in nodes],
    }  # fmt: skip
    columns: dict[str, Any] = {name: [strings[text] for text in column] for name, column in texts.items()}
    columns |= {name: [getattr(n, name) for n in nodes] for name in ("graph", "line", "bytes", "flops", "saved_bytes")}
    columns["causes"] = [[place(n, key) for key in n.causes] for n in nodes]
    columns["casts"] = [
        [(strings[c.operand], strings[c.before], strings[c.after], c.bytes, c.shared) for c in n.casts] for n in nodes
    ]
    columns["reads"] = [
        [(_KINDS.index(r.kind), place(n, r.value) if r.kind == "node" else -1 - strings[r.value], strings[r.cast])
         for r in n.reads] for n in nodes
    ]  # fmt: skip
    dtypes = dict.fromkeys(name for n in nodes for name in (n.colour, n.autocast, n.original) if name)
    return {"columns": columns, "strings": list(strings), "styles": {name: style_of(name) for name in dtypes}}


def _gives(node: NodeRecord) -> str:
    shapes = ", ".join(f"[{', '.join(shape)}]" for shape in node.shapes)
    return f"{', '.join(node.dtypes)} {shapes}".strip()


def excerpts(nodes: Sequence[NodeRecord]) -> dict[str, list[tuple[int, str]]]:
    """Return (number, text) of the lines that made nodes, with a few round each, for each file; gaps are left out.

    A file on this machine is shown only where every line that made a node is still as it was; else those lines alone.
    """
    known: dict[str, dict[int, str]] = {}
    for node in nodes:
        if node.file and node.line:
            known.setdefault(node.file, {})[node.line] = node.code
    out, room = {}, MOST_LINES
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


def _render(title: str, data: Any) -> str:
    style = _source("page.css") + "".join(f":root{{--{name}-solid:{value}}}" for name, value in PALETTE.items())
    code = script()
    text = json.dumps(_all_shown(data), ensure_ascii=False, separators=(",", ":")).translate(_ENDS)
    return Template(_source("page.html")).substitute(
        title=html.escape(visible(title)), style=style, code=code, data=text, style_hash=_hash(style),
        code_hash=_hash(code),
    )  # fmt: skip


@functools.cache
def script() -> str:
    """Return the modules of the page's script as one script, since a page without other files can import none.

    They share no name, so that what each imports is there without it.
    """
    return '"use strict";\n\n' + "\n".join(_LINKS.sub("", _source(name)) for name in SCRIPTS)


def _all_shown(data: Any) -> Any:
    """Return data with every text made harmless, since a script shows texts as they are."""
    if isinstance(data, str):
        return _cached(data)
    if isinstance(data, dict):
        return {_cached(key): _all_shown(value) for key, value in data.items()}
    return [_all_shown(value) for value in data] if isinstance(data, (list, tuple)) else data


_cached = functools.lru_cache(maxsize=10_000)(visible)


@functools.cache
def _source(name: str) -> str:
    """Return the text of a file of the page, which is ours."""
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the hash of the content of an element, in the form of a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
