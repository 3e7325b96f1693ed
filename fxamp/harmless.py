"""Text that comes from models, files and errors, made harmless where it is shown.

Names of modules, and of nodes in a plan, are untrusted input. In a terminal, in Markdown and in the log of a workflow
such a name must be shown as text, and never act as a command.

Before: <script>, ::error::, and what clears a terminal         After: &lt;script>, : :error::, and its escape
"""

from __future__ import annotations

import html
import json
import re

# What GitHub interprets as a workflow command: at the beginning of a line, or anywhere.
_COMMANDS = ((re.compile(r"^(\s*):(?=:)"), r"\1: "), (re.compile(r"#(?=#(?:\[|vso\[))"), "# "))
_MARKDOWN = re.compile(r"[\\`|\[\]]")


def visible(text: str) -> str:
    """Return one line of text that is safe on a terminal: characters that cannot be printed are written as escapes."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    for command, instead in _COMMANDS:
        shown = command.sub(instead, shown)
    return shown


def markdown(text: str) -> str:
    """Return text for a cell of a Markdown table, escaped so that it ends no cell and is neither HTML nor a link."""
    shown = visible(text).replace("&", "&amp;").replace("<", "&lt;")
    return _MARKDOWN.sub(r"\\\g<0>", shown)


def lines(text: str) -> str:
    """Return several lines, each of them visible."""
    return "\n".join(map(visible, text.split("\n")))


def as_json(text: str) -> str:
    """Return equivalent JSON in which characters that cannot be printed are written as escapes."""
    shown = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    return re.sub(r"#(?=#(?:\[|vso\[))", r"\\u0023", shown)


def in_notebook(page: str) -> str:
    """Return markup that shows a page in a frame of its own, where its style and its script touch nothing else."""
    inside = html.escape(page, quote=True)
    return f'<iframe srcdoc="{inside}" style="width:100%;height:720px;border:0" sandbox="allow-scripts"></iframe>'


def as_text(text: str) -> str:
    """Return markup that shows text in a fixed width."""
    return f'<pre style="overflow-x:auto">{html.escape(text)}</pre>'
