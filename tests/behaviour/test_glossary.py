"""The glossary has every name that a report prints, and the guide on checking every word of a reason."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import fxamp
from fxamp.choose.compare import Comparison
from fxamp.demo import LeNet5
from fxamp.report.diff.changes import _LABELS
from passes.contract.reasons import Code

GUIDES = Path(__file__).parents[2] / ".github" / "docs"
GLOSSARY = (GUIDES / "glossary.md").read_text(encoding="utf-8")
NAMES = set(re.findall(r"\*\*(.+?)\*\*", GLOSSARY))


def names_of(text: str) -> set[str]:
    """Return the heads of the tables of a text, and of tables without heads, which are facts, the first column."""
    lines = text.splitlines()
    found = set(re.findall(r"^((?:[a-z]+ )*[a-z]+): ", text, re.MULTILINE)) - {"note", "fxamp calibration"}
    for head in (line for line in lines if line.startswith("dtype ")):  # of a census, which has no rule below it
        found |= set(re.split(r"\s{2,}", head))
    for at in (at for at, line in enumerate(lines) if set(line) == {"-", " "}):
        head = lines[at - 1].strip()
        facts = itertools.takewhile(lambda line: line and set(line) != {"-", " "}, lines[at + 1 :])
        for row in (head,) if head else facts:
            cells = re.split(r"\s{2,}", row)
            found |= set(cells if head else cells[:1])
    # "O2: of the loss" is of a policy; "its % to 0" is explained with "% to 0"
    return {re.sub(r"^(its (?=%)|.*: )", "", name) for name in found}


def test_every_name_that_a_report_prints_is_in_the_glossary() -> None:
    model, x, y = LeNet5(), torch.randn(8, 1, 8, 8), torch.randint(10, (8,))
    view = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    step = fxamp.TrainStep(view, cross_entropy, torch.optim.AdamW(model.parameters()))
    step(x, y)
    said = {
        "report": str(fxamp.report(step)),
        "lines": fxamp.report(view).to_tree(lines=True),
        "census": str(fxamp.census(view, x, y, loss=cross_entropy)),
        "error": str(fxamp.estimate_error(model, x, y, loss=cross_entropy, policies="O2", gradients="nodes")),
        "measured": str(fxamp.measure_error(model, x, y, loss=cross_entropy, policies="O1")),
        "comparison": str(Comparison("LeNet5", (), "FP32", "")),
        "calibration": str(fxamp.calibrate(model, x, y, loss=cross_entropy)),
    }
    printed = {name for text in said.values() for name in names_of(text)} | set(_LABELS.values())
    assert len(printed) > 40
    assert printed <= NAMES


def test_every_word_of_a_reason_is_in_the_guide() -> None:
    table = (GUIDES / "checking.md").read_text(encoding="utf-8").partition("## Reasons")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    assert {word for row in rows for word in re.findall(r"`(\w+)`", row)} == set(Code)
