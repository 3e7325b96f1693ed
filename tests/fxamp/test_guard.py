"""A foreign module named `passes` is said, not imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fxamp

ROOT = Path(fxamp.__file__).parent.parent


def run(first: Path) -> subprocess.CompletedProcess[str]:
    script = f"import sys; sys.path[:0] = [{str(first)!r}, {str(ROOT)!r}]; import fxamp"
    return subprocess.run([sys.executable, "-c", script], cwd="/", capture_output=True, text=True, check=False)


def test_a_module_in_front_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "passes.py").write_text("x = 1\n")
    result = run(tmp_path)
    assert result.returncode == 1
    assert "ImportError: fxamp brings a package named 'passes'" in result.stderr
    assert str(tmp_path / "passes.py") in result.stderr
    assert "rename that module" in result.stderr


def test_a_folder_in_front_without_code_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "passes").mkdir()
    assert run(tmp_path).returncode == 0
