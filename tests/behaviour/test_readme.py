from __future__ import annotations

import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

import fxamp

README = Path(__file__).parents[2] / "README.md"


def test_the_examples_of_the_readme_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = README.read_text(encoding="utf-8").replace("/tmp/bert", str(tmp_path))
    own, others = text.split("## In the tools you use")
    module = types.ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)  # Dynamo looks up the globals of a function there
    names: dict[str, Any] = vars(module)
    for part in (own, others):
        blocks = re.findall(r"^```python\n(.*?)^```$", part, re.DOTALL | re.MULTILINE)
        assert len(blocks) > 5
        for number, block in enumerate(blocks):
            with warnings.catch_warnings():
                if part is others:
                    warnings.simplefilter("ignore")  # other libraries' own
                exec(compile(block, f"README.md, example {number}", "exec"), names)
    for name in ("bert", "digits", "compiled"):
        assert "bfloat16" in {d.colour for d in fxamp.plan_of(names[name]).decisions}
    base = [d for d in fxamp.plan_of(names["compiled"]).decisions if d.module_path == "base"]
    assert [(d.op, d.colour) for d in base] == [("linear", "bfloat16")]


@pytest.mark.parametrize("package", ["fxamp", "passes"])
def test_every_module_has_its_line_in_the_readme(package: str) -> None:
    described = re.findall(rf"^- `({package}/[\w/]+\.py)`: .", README.read_text(encoding="utf-8"), re.MULTILINE)

    modules = (README.parent / package).rglob("*.py")
    assert sorted(described) == sorted(
        module.relative_to(README.parent).as_posix()
        for module in modules
        if module.stem not in ("__init__", "__main__")
    )
