"""The table of the README: one row a setting, out of the figures of other reports; nothing is measured here.

    python reports/summary.py     # print it

A test holds the README to it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

HERE = Path(__file__).resolve().parent

HEADERS = ("setting", "of autocast's", "FP32", "fxamp O1", "fxamp O2", "all low")
_PER_STEP = ("FP32", "fxamp O1 per_step", "fxamp O2 per_step", "all low")


def table() -> str:
    """Return the table, in Markdown."""
    rows = [
        ("CPU, eager: step of BERT 64 x 4, batch 2 x 16", "time", *_cpu("bert_64")),
        ("CPU, eager: step of BERT 256 x 6, batch 4 x 64", "time", *_cpu("bert_256")),
        ("any device, eager: window of 4 of BERT", "bytes cast", *_cast()),
        (
            "H200, eager: step of BERT-base, 32 x 128", "time",
            *_gpu("eager", "BERT-base, 32 x 128, BF16", "fxamp O1", "fxamp O2"),
        ),
        (
            "H200, eager: inference in `fxamp.frozen`, 8 x 128", "time",
            *_gpu("inference", "BERT-base, 8 x 128, BF16", "fxamp O1, frozen", "fxamp O2, frozen"),
        ),
        ("Inductor for an H100: step of BERT-base", "bytes moved", "", *_compiled("fxamp O1", "")),
        (
            'the same with `update="compiled"`', "bytes moved", "",
            *_compiled("fxamp O1, compiled update", "fxamp O2, compiled update"),
        ),
    ]  # fmt: skip
    return tabulate(rows, HEADERS, "pipe", disable_numparse=True, colalign=("left", "left", *["right"] * 4))


def _of(name: str) -> Any:
    return json.loads((HERE / name).read_text(encoding="utf-8"))


def _rows(model: str) -> dict[str, dict[str, Any]]:
    return {r["variant"]: r for r in _of("casts.json")["rows"] if r["model"] == model and r["dtype"] == "BF16"}


def _cpu(model: str) -> list[str]:
    rows = _rows(model)
    return [f"{rows[v]['step_time']:.2f} ± {rows[v]['step_spread'] / 2:.2f}" for v in _PER_STEP]


def _cast() -> list[str]:
    moved = {variant: row["counts"]["cast_bytes"] for variant, row in _rows("bert").items()}
    return [f"{moved[variant] / moved['torch.autocast']:.2f}" for variant in _PER_STEP]


def _gpu(section: str, model: str, o1: str, o2: str) -> list[str]:
    rows = {row["variant"]: row for row in _of("gpu.json")["sections"][section][model]}
    base = rows["torch.autocast"]["ms"]
    names = ("FP32 with TF32", o1, o2, "all low")
    return [f"{rows[v]['ms'] / base:.2f} ± {rows[v]['spread'] / base:.2f}" for v in names]


def _compiled(o1: str, o2: str) -> list[str]:
    rows = _of("compiled_step.json")["gpu"]["BERT-base"]["rows"]
    total = {v: sum(rows[v][part]["moved_bytes"] for part in rows[v] if part != "peak") for v in rows}
    return [f"{total[v] / total['torch.autocast']:.2f}" if v else "" for v in (o1, o2, "all low")]


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
