"""The demo shows what it promises, and writes it down."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fxamp import FxampError, demo


def test_the_demo_shows_a_census_a_plan_a_failing_gate_and_casts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    path = tmp_path / "demo.md"
    text = demo.run(output=path)
    assert path.read_text(encoding="utf-8") == text
    assert text in capsys.readouterr().out
    before, after, gate, casts = text.split("\n## ")[1:]
    assert "no plan" in before
    assert "bfloat16" in before
    assert "as planned: 100.0 % of FLOPs" in after
    assert "differences: none" in after
    assert "exits with 1" in gate
    assert "+ /softmax#0" in gate
    assert re.search(r"\(fxamp/demo\.py:\d+\)|\(demo\.py:\d+\)", gate)
    rows = {line.split("|")[1].strip(): line.split("|")[2:4] for line in casts.splitlines() if line.startswith("| ")}
    moved = {name: float(cells[1]) for name, cells in rows.items() if name in demo.VARIANTS}
    assert moved[demo.FP32] == 0
    assert moved[demo.PER_STEP] < moved[demo.O2] <= moved[demo.O1] <= moved[demo.AUTOCAST]


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(FxampError, match=r"cannot write .*missing.* give another file with -o"):
        demo.run(output=tmp_path / "missing" / "demo.md")
