"""Imports run tests -> reports -> fxamp -> passes -> torch and never back."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PASSES = sorted((ROOT / "passes").rglob("*.py"))
FXAMP = sorted((ROOT / "fxamp").rglob("*.py"))
REPORTS = sorted((ROOT / "reports").rglob("*.py"))
OURS = {"fxamp", "passes", "tests", "reports"}


@functools.cache
def imports(path: Path) -> set[tuple[int, str]]:
    """Return (level, module) of every import statement of a file; level 0 is absolute."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {(0, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.level, node.module or ""))
    return found


def packages(path: Path) -> set[str]:
    return {module.partition(".")[0] for level, module in imports(path) if level == 0}


def test_there_is_something_to_check() -> None:
    assert len(PASSES) > 5
    assert len(FXAMP) > 5
    assert len(REPORTS) > 5


@pytest.mark.parametrize("path", PASSES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_compiler_imports_nothing_of_the_product(path: Path) -> None:
    assert not packages(path) & OURS
    depth = len(path.relative_to(ROOT).parts) - 1  # folders from here up to the package itself
    assert all(level <= depth for level, _ in imports(path))


@pytest.mark.parametrize("path", FXAMP, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_product_imports_no_tests_and_itself_relatively(path: Path) -> None:
    assert not packages(path) & (OURS - {"passes"})


@pytest.mark.parametrize("path", REPORTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_reports_import_no_tests(path: Path) -> None:
    assert "tests" not in packages(path)


@pytest.mark.parametrize("path", PASSES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_compiler_needs_torch_and_networkx_only(path: Path) -> None:
    known = {"torch", "networkx", "sympy", ""}
    standard = {"__future__", *__import__("sys").stdlib_module_names}
    assert packages(path) <= known | standard


@pytest.mark.parametrize("path", [*PASSES, *FXAMP], ids=lambda p: str(p.relative_to(ROOT)))
def test_private_modules_of_torch_are_named_in_one_file(path: Path) -> None:
    if path.name == "_torch.py":
        return
    private = {m for level, m in imports(path) if level == 0 and m.startswith("torch.") and "._" in m}
    assert not private
