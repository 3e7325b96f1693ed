"""Who follows the guide for contributors word for word has what it promises: its code runs, and its tests pass."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GUIDE = Path(__file__).parents[2] / ".github" / "CONTRIBUTING.md"


def section(title: str) -> str:
    """Return what the guide says under a title."""
    text = GUIDE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2]
    return text.partition("\n## ")[0]


def followed(title: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], None]]:
    """Run the code of a section, block by block, in one module; return the tests in it."""
    module: Any = types.ModuleType("stranger")
    monkeypatch.setitem(sys.modules, "stranger", module)  # where dataclasses look their types up
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```$", section(title), re.DOTALL | re.MULTILINE)):
        exec(compile(block, f"CONTRIBUTING.md, {title}, block {number}", "exec"), vars(module))
    return {name: test for name, test in vars(module).items() if name.startswith("test_")}


@pytest.mark.parametrize(("title", "tests"), [("Add a pass", 3), ("Add a cost model", 1)])
def test_a_stranger_does_what_the_guide_says(title: str, tests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = followed(title, monkeypatch)
    assert len(made) == tests
    for test in made.values():
        test()
