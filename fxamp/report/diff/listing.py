"""A difference, and how it is written: a listing for terminals, Markdown, JSON, an HTML page."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from tabulate import tabulate

from passes.contract.errors import public

from ...harmless import as_text, markdown, visible
from .changes import PLAN_KEY, RULE, Change

_SUMMARY = 900_000  # bytes; GitHub drops a job summary of more than 1 MiB as a whole
_HEADERS = ("change", "node", "field", "before", "after")
_STYLE = (
    ":root{color-scheme:light dark}body{font:14px/1.5 system-ui,sans-serif;margin:2em}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;text-align:left;border-bottom:1px solid #8884}.added{color:#1a7f37}.removed{color:#cf222e}"
)


@public
@dataclass(frozen=True)
class GraphDiff:
    """The changes between two sides, in graph order. Its truth value is True if the two differ.

    Attributes:
        before: A line that describes the first side.
        after: A line that describes the second side.
        changes: The changes of nodes and of totals.
        renamed: Modules whose path has changed; their nodes do not count as changes.
        code: When a graph was compared with its converted module, the code of the graph, with marks at the lines that
            conversion changed.

    Example:
        >>> found = fxamp.diff(converted, fxamp.plan(model, (x,), policy="O1,dtype=bf16,modules.2=fp32"))
        >>> found.totals, found.another_model
        ('0 added, 0 removed, 2 changed', False)
    """

    before: str
    after: str
    changes: tuple[Change, ...]
    renamed: tuple[Change, ...] = ()
    code: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Say whether the two differ."""
        return bool(self.changes or self.renamed)

    def __repr__(self) -> str:
        """Return the totals."""
        return f"<fxamp diff: {self.totals}>"

    def _repr_html_(self) -> str:
        """Show the text in a notebook."""
        return as_text(str(self))

    def __str__(self) -> str:
        """Return the listing: what each side is, the totals, then module by module one line per change."""
        lines = [visible(f"--- {self.before}"), visible(f"+++ {self.after}"), f"@@ {self.totals} @@"]
        lines += [visible(f"= {c.before}  is now  {c.after}  ({len(c.nodes)} nodes)") for c in self.renamed]
        if self.code:
            return "\n".join([*lines, *self.code])
        for module, own in _by_module(self.changes).items():
            if module != "(all)":
                lines.append(visible(f"@@ {module or '(model)'}: {_counted(own)}"))
            lines += map(str, own)
        return "\n".join(lines)

    @property
    def another_model(self) -> bool:
        """Whether the two have so little in common that one cannot be a version of the other."""
        return any(c.field == "model" and c.key == PLAN_KEY for c in self.changes)

    @property
    def totals(self) -> str:
        """How many nodes were added, removed and changed, as one line.

        A node counts once, however many of its fields changed.
        """
        return _counted(self.changes, zeros=True) if self else "no difference"

    def to_markdown(self) -> str:
        """Return the changes as a Markdown table, or the code as a block, shortened where CI would drop it.

        Example:
            >>> text = fxamp.diff(converted, fxamp.plan_of(converted)).to_markdown()
        """
        before, after = (visible(title).replace("`", "'") for title in (self.before, self.after))
        head = f"**before** `{before}`  \n**after** `{after}`\n\n{self.totals}\n"
        if self.code:
            return f"{head}\n{_fenced(self.code)}"
        groups = _by_module((*self.renamed, *self.changes))
        rows = [[markdown(cell) for cell in _cells(c)] for own in groups.values() for c in own]
        if not rows:
            return head
        widths = [max(len(row[i].encode()) for row in rows) for i in range(len(_HEADERS))]
        room = _SUMMARY - len(head.encode())
        shown = min(len(rows), room // (sum(widths) + 3 * len(widths) + 4))  # the table pads each cell to its column
        table = tabulate(rows[:shown], _HEADERS, "pipe", disable_numparse=True)
        left_out = f"\n{len(rows) - shown} more changes are left out here.\n" if shown < len(rows) else ""
        return f"{head}\n{table}\n{left_out}"

    def to_html(self) -> str:
        """Return the changes as an HTML page, with a heading for every module; the page needs no other file.

        Example:
            >>> fxamp.diff(converted, fxamp.plan_of(converted)).to_html().splitlines()[0]
            '<!doctype html>'
        """
        written = f"<pre>{chr(10).join(map(_escaped, self.code))}</pre>\n" if self.code else ""
        body = []
        for module, own in _by_module((*self.renamed, *self.changes)).items():
            name = {"(all)": "the whole model", "": "(model)"}.get(module, module)
            heading = f"{_escaped(name)}: {_counted(own)}"
            body.append(f'<tr><th colspan="{len(_HEADERS)}" scope="rowgroup">{heading}</th></tr>')
            for c in own:
                cells = "".join(f"<td>{_escaped(cell)}</td>" for cell in _cells(c))
                body.append(f'<tr class="{c.kind}">{cells}</tr>')
        heads = "".join(f'<th scope="col">{name}</th>' for name in _HEADERS)
        before, after = _escaped(self.before), _escaped(self.after)
        return (
            '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>fxamp diff</title>\n'
            f"<style>{_STYLE}</style>\n<h1>{_escaped(self.totals)}</h1>\n<p>before: <code>{before}</code><br>"
            f"after: <code>{after}</code></p>\n{written}<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n"
            + "\n".join(body) + "\n</tbody>\n</table>\n</html>\n"
        )  # fmt: skip

    def to_json(self) -> str:
        """Return the changes as JSON; equal changes give equal text.

        Example:
            >>> import json
            >>> json.loads(fxamp.diff(converted, fxamp.plan_of(converted)).to_json())["differ"]
            False
        """
        changes, moved = (
            [{name: value for name, value in asdict(c).items() if name != "nodes" or value} for c in found]
            for found in (self.changes, self.renamed)
        )
        data = {"before": self.before, "after": self.after, "changes": changes, "renamed": moved, "differ": bool(self)}
        return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _by_module(changes: Iterable[Change]) -> dict[str, list[Change]]:
    """Return the changes of each module, in the order of modules; changes that concern no node come first."""
    found: dict[str, list[Change]] = {"(all)": []}
    for change in changes:
        found.setdefault("(all)" if change.key.startswith("(") else change.module, []).append(change)
    return {module: own for module, own in found.items() if own}


def _counted(changes: Iterable[Change], *, zeros: bool = False) -> str:
    """Say how many nodes were added, removed and changed; a renamed module is one change."""
    nodes = {(c.kind, key) for c in changes for key in (c.nodes if c.key.startswith(RULE) else (c.key,))}
    counts = {kind: sum(k == kind for k, _ in nodes) for kind in ("added", "removed", "changed")}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count or zeros)


def _fenced(code: Sequence[str]) -> str:
    """Write code as a block in which added and removed lines have colours."""
    room = _SUMMARY
    shown = [line for line in code if (room := room - len(line.encode()) - 1) > 0]
    fence = "`" * max(3, 1 + max((len(run) for line in shown for run in re.findall("`+", line)), default=0))
    left_out = f"\n{len(code) - len(shown)} more lines are left out here.\n" if len(shown) < len(code) else ""
    return "\n".join([f"{fence}diff", *shown, fence]) + f"\n{left_out}"


def _cells(change: Change) -> tuple[str, str, str, str, str]:
    key = f"{change.key}, {len(change.nodes)} nodes" if change.nodes else change.key
    return change.kind, key, change.field, change.before or "", change.after or ""


def _escaped(text: str) -> str:
    return html.escape(visible(text))
