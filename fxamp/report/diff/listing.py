"""Write a difference as a listing for terminals, as Markdown, and as an HTML page."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from ..forms.harmless import markdown, visible
from .changes import Change

_SUMMARY = 900_000  # bytes; GitHub drops a job summary of more than 1 MiB as a whole
_HEADERS = ("change", "node", "field", "before", "after")
_COLOURS = {"+": "32", "-": "31", "!": "33", "@": "36", "=": "36"}
_STYLE = (
    ":root{color-scheme:light dark}body{font:14px/1.5 system-ui,sans-serif;margin:2em}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;text-align:left;border-bottom:1px solid #8884}.added{color:#1a7f37}.removed{color:#cf222e}"
)


def by_module(changes: Iterable[Change]) -> dict[str, list[Change]]:
    """Return the changes of each module, in the order of modules; changes that concern no node come first."""
    found: dict[str, list[Change]] = {"(all)": []}
    for change in changes:
        found.setdefault("(all)" if change.key.startswith("(") else change.module, []).append(change)
    return {module: own for module, own in found.items() if own}


def to_text(titles: tuple[str, str], totals: str, renamed: Sequence[Change], changes: Sequence[Change]) -> str:
    """Write the listing: what each side is, the totals, and module by module a line for each change."""
    lines = [visible(f"--- {titles[0]}"), visible(f"+++ {titles[1]}"), f"@@ {totals} @@"]
    lines += [visible(f"= {c.before}  is now  {c.after}  ({len(c.nodes)} nodes)") for c in renamed]
    for module, own in by_module(changes).items():
        if module != "(all)":
            lines.append(visible(f"@@ {module or '(model)'}: {counted(own)}"))
        lines += map(str, own)
    return "\n".join(lines)


def counted(changes: Iterable[Change]) -> str:
    """Say how many nodes were added, removed and changed, without the zeros."""
    nodes = {(c.kind, key) for c in changes for key in c.counted}
    counts = {kind: sum(k == kind for k, _ in nodes) for kind in ("added", "removed", "changed")}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def coloured(text: str) -> str:
    """Colour the lines of a listing, as terminals do it."""
    lines = [f"\x1b[{_COLOURS[line[0]]}m{line}\x1b[0m" if line[:1] in _COLOURS else line for line in text.split("\n")]
    return "\n".join(lines)


def to_markdown(
    titles: tuple[str, str], totals: str, renamed: Sequence[Change], changes: Sequence[Change], code: Sequence[str] = ()
) -> str:  # fmt: skip
    """Write the changes as a Markdown table, or the code, shortened where a job summary would be too long."""
    before, after = (visible(title).replace("`", "'") for title in titles)
    head = f"**before** `{before}`  \n**after** `{after}`\n\n{totals}\n"
    if code:
        return f"{head}\n{_fenced(code)}"
    rows = [[markdown(cell) for cell in _cells(c)] for c in _ordered(renamed, changes)]
    if not rows:
        return head
    room, shown = _SUMMARY - len(head.encode()), 0
    widths = [max(len(row[i].encode()) for row in rows) for i in range(len(_HEADERS))]
    shown = min(len(rows), room // (sum(widths) + 3 * len(widths) + 4))  # the table pads each cell to its column
    table = tabulate(rows[:shown], _HEADERS, "pipe", disable_numparse=True)
    left_out = f"\n{len(rows) - shown} more changes are left out here.\n" if shown < len(rows) else ""
    return f"{head}\n{table}\n{left_out}"


def _fenced(code: Sequence[str]) -> str:
    """Write code as a block in which added and removed lines have colours."""
    room = _SUMMARY
    shown = [line for line in code if (room := room - len(line.encode()) - 1) > 0]
    fence = "`" * max(3, 1 + max((len(run) for line in shown for run in re.findall("`+", line)), default=0))
    left_out = f"\n{len(code) - len(shown)} more lines are left out here.\n" if len(shown) < len(code) else ""
    return "\n".join([f"{fence}diff", *shown, fence]) + f"\n{left_out}"


def to_html(
    titles: tuple[str, str], totals: str, renamed: Sequence[Change], changes: Sequence[Change], code: Sequence[str] = ()
) -> str:  # fmt: skip
    """Write the changes as one page that needs nothing else: the code, and a table with a heading for every module."""
    written = f"<pre>{chr(10).join(map(_escaped, code))}</pre>\n" if code else ""
    body = []
    groups = {"(all)": list(renamed)} if renamed else {}
    for module, own in by_module(changes).items():
        groups.setdefault(module, []).extend(own)
    for module, own in groups.items():
        name = {"(all)": "the whole model", "": "(model)"}.get(module, module)
        body.append(f'<tr><th colspan="{len(_HEADERS)}" scope="rowgroup">{_escaped(name)}: {counted(own)}</th></tr>')
        body += [
            f'<tr class="{c.kind}">' + "".join(f"<td>{_escaped(cell)}</td>" for cell in _cells(c)) + "</tr>"
            for c in own
        ]  # fmt: skip
    heads = "".join(f'<th scope="col">{name}</th>' for name in _HEADERS)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>fxamp diff</title>\n'
        f"<style>{_STYLE}</style>\n<h1>{_escaped(totals)}</h1>\n<p>before: <code>{_escaped(titles[0])}</code><br>"
        f"after: <code>{_escaped(titles[1])}</code></p>\n{written}<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n"
        + "\n".join(body) + "\n</tbody>\n</table>\n</html>\n"
    )  # fmt: skip


def _ordered(renamed: Sequence[Change], changes: Sequence[Change]) -> list[Change]:
    return [*renamed, *(c for own in by_module(changes).values() for c in own)]


def _cells(change: Change) -> tuple[str, str, str, str, str]:
    key = f"{change.key}, {len(change.nodes)} nodes" if change.nodes else change.key
    return change.kind, key, change.field, change.before or "", change.after or ""


def _escaped(text: str) -> str:
    return html.escape(visible(text))
