"""Records made by hand, for what is shown of them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import fxamp
from fxamp.report.record.record import RECORD_VERSION, Cast, NodeRecord, Read, Record, State, Totals
from fxamp.report.report import Report
from passes.contract.plan import Decision, Plan
from passes.contract.policy import Policy

SCHEMA = Path(fxamp.__file__).parent / "schemas" / "record.json"
# What a stranger may call a module, a file or a line, and what it must not do anywhere.
HOSTILE = [
    "<script>boo()</script><img src=x onerror=boo()>",
    "</script><script>boo()</script>",
    "\"'><svg/onload=boo()>",
    "]]><x>&boo;<!--",
    "a|b\n## c\n[d](http://e.f)`g`",
    "\x1b[2J\x1b]0;boo\x07\x9b31m\x00",
    "::error file=x::boo\r\n::stop-commands::y ##[error]z",
    "\u202eoob\u2066 \ud800",
    "{{ 7 * 7 }}{% boo %}${boo}{0}",
    '\\";boo[',
    "../../boo%0A%00:*?<>|",
]


def node(at: int, module: str = "", reads_too: tuple[Read, ...] = (), **more: Any) -> NodeRecord:
    """Make the record of a node, which reads the one before."""
    before = (Read(f"/op#{at - 1}", "node", ""),) * (at > 0)
    return NodeRecord(**{
        "key": f"/op#{at}", "graph": 0, "op": "op", "module": module, "file": "net.py", "line": at + 1, "code": "x",
        "torch_source": "", "colour": "bfloat16", "autocast": "bfloat16", "original": "float32", "kind": "low",
        "reason_code": "low", "reason": "because", "causes": (), "dtypes": ("bfloat16",), "shapes": (("3",),),
        "bytes": 6, "flops": 2, "saved_bytes": 6, "casts": (),
        "reads": before + reads_too, **more,
    })  # fmt: skip


def report_of(nodes: Sequence[NodeRecord], *, model: str = "Net", note: str = "a note") -> Report:
    """Make a report of nodes, with the plan that they would have."""
    decisions = tuple(
        Decision(
            n.key, n.graph, n.op, n.module, f"{n.file}:{n.line}: {n.code}", n.colour, n.autocast, n.kind,
            f"{n.reason_code}: {n.reason}", n.causes, n.reason_code,
        )
        for n in nodes
    )  # fmt: skip
    plan = Plan(decisions, Policy("O1", dtype="bf16", device="cpu"), notes=(note,))
    totals = Totals(len(nodes), len(nodes), 0, 0, 0, 0, 0, 6, 100.0, 2, 100.0, 6, 12, 6, 0)
    record = Record(
        RECORD_VERSION, "O1,dtype=bf16,device=cpu", "cpu", "export", "fake", plan.torch_version, "0",
        (State("", totals, (), ()),), 1, tuple(nodes), (note,),
    )  # fmt: skip
    return Report(plan, ((note, note),), record, model)


def hostile_report(text: str) -> Report:
    """Make a report in which everything that a stranger may choose is that text."""
    named: dict[str, Any] = {
        "module": text.replace(".", ""), "op": text, "file": text, "code": text, "torch_source": text, "reason": text,
        "shapes": ((text,),), "casts": (Cast(text, text, text, 3, 1),),
    }  # fmt: skip
    reads = (Read(text, "attribute", text), Read(f"{text}2", "input", text))
    first = node(0, key=f"{text}/op#0", reads_too=reads, **named)
    second = node(1, key=f"{text}/op#1", causes=(first.key, text), reads_too=(Read(first.key, "node", text),), **named)
    return report_of([first, second], model=text, note=text)


def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a record, as it is published."""
    made = json.loads(msgspec.json.encode(msgspec.json.schema(Record)))  # in which a default is as JSON has it
    for kind in made["$defs"].values():  # docstrings, from which only Python 3.13 takes the indentation
        kind["description"] = inspect.cleandoc(kind["description"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "fxamp precision record", **made}
