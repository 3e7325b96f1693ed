from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_examples_of_the_readme_run_one_after_the_other() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) > 5

    names: dict[str, object] = {"__name__": "readme"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md, example {number}", "exec"), names)


@pytest.mark.parametrize("package", ["fxamp", "passes"])
def test_every_module_has_its_line_in_the_readme(package: str) -> None:
    described = re.findall(rf"^- `({package}/\w+\.py)`: .", README.read_text(encoding="utf-8"), re.MULTILINE)

    modules = (README.parent / package).glob("*.py")
    assert sorted(described) == sorted(
        f"{package}/{module.name}" for module in modules if module.stem not in ("__init__", "__main__")
    )
