"""The architecture: which package may import which, and what each package says of itself.

A file that lies directly in `passes` or in `fxamp` counts as a package of its own. Imports count wherever they stand:
in functions, and for types alone too. How complex a function may be is for ruff (`max-complexity`).
"""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
    for package in ("passes", "fxamp")
    for p in sorted((ROOT / package).rglob("*.py"))
}
FOLDERS = sorted({p.parent for p in FILES.values()})

# Package: what it imports. The lowest first; what is new here has to have a reason.
ARROWS = {
    "passes.contract": "",
    "passes.ops.table": ".contract",
    "passes._torch": ".contract",
    "passes.runtime": "._torch .contract",
    "passes.ops": "._torch .contract .ops.table .runtime",
    "passes.graph": "._torch .contract .ops .runtime",
    "passes.form": ".contract .graph .ops .runtime",
    "passes.assign.colour": "._torch .contract .form .graph .ops",
    "passes.assign.place": ".assign.colour .contract .form .graph .ops",
    "passes.casts": "._torch .contract .form .graph .ops .runtime",
    "passes.legalize": "._torch .contract .form .graph .ops .runtime",
    "passes.assign": ".assign.colour .assign.place .contract .form .graph .ops",
    "passes.pipeline": ".assign .casts .contract .form .graph .legalize .ops .runtime",
    "passes": ".assign.place .form .graph .pipeline",
    "fxamp._torch": "passes._torch",
    "fxamp.errors": "passes.contract",
    "fxamp.guard": "",
    "fxamp.module": "passes.contract",
    "fxamp.harmless": "",
    "fxamp.results": ".harmless passes._torch passes.contract",
    "fxamp.calibration": ".errors .results passes.contract",
    "fxamp.target": "passes.contract",
    "fxamp.observe": "._torch .errors passes passes._torch passes.contract passes.graph passes.ops passes.runtime",
    "fxamp.capture": (
        "._torch .errors .observe passes passes._torch passes.contract passes.graph passes.legalize "
        "passes.ops passes.runtime"
    ),
    "fxamp.view": (
        "._torch .capture .errors .observe passes._torch passes.contract passes.graph passes.ops passes.runtime"
    ),
    "fxamp.measure": ".capture .observe .view passes passes._torch passes.contract passes.graph passes.ops",
    "fxamp.measure.fake_cuda": ".capture .errors .measure .observe .target passes._torch passes.contract",
    "fxamp.convert": "._torch .calibration .capture .errors .measure .observe .view passes.contract",
    "fxamp.diagnose": ".capture .convert .errors .measure .observe .view passes._torch passes.contract passes.graph",
    "fxamp.census": (
        "._torch .capture .convert .diagnose .observe .results passes.contract passes.graph passes.ops passes.runtime"
    ),
    "fxamp.error": ".diagnose .observe .results passes.contract passes.graph passes.ops",
    "fxamp.ranges": (
        "._torch .calibration .capture .convert .diagnose .errors .observe .results "
        "passes._torch passes.contract passes.graph passes.ops"
    ),
    "fxamp.choose": (
        ".convert .diagnose .error .errors .measure .observe .results .train passes passes.contract passes.graph"
    ),
    "fxamp.train.ranks": "._torch .view passes.contract passes.graph",
    "fxamp.train": (
        "._torch .capture .census .convert .diagnose .errors .measure .observe .ranges .train.ranks .view "
        "passes._torch passes.contract passes.graph"
    ),
    "fxamp.report.record": "._torch .observe passes._torch passes.contract passes.graph passes.ops passes.runtime",
    "fxamp.report.forms": ".harmless .report.record passes.contract",
    "fxamp.report.page": ".harmless .report.record passes.contract",
    "fxamp.report": (
        ".capture .census .convert .error .harmless .report.forms .report.page .report.record .train .view "
        "passes.contract"
    ),
    "fxamp.report.diff": (
        ".capture .harmless .observe .report .report.record passes._torch passes.contract passes.graph passes.ops"
    ),
    "fxamp.report.gate": (
        ".capture .census .convert .errors .harmless .measure .measure.fake_cuda .report .report.diff "
        ".report.record .target .train passes.contract passes.ops"
    ),
    "fxamp.pytest_plugin": ".report.gate",
    "fxamp.demo": ".census .convert .measure .observe .report .report.gate .train passes.contract",
    "fxamp.integrations": ".capture .census .convert .errors .train .view passes.contract passes.ops",
    "fxamp.lightning": ".integrations",
    "fxamp.huggingface": ".integrations",
    "fxamp.cli": (
        ".census .convert .demo .errors .harmless .report .report.diff .report.gate .target .train fxamp passes "
        "passes.contract passes.ops"
    ),
    "fxamp.__main__": ".cli",
}
# What of the compiler anyone may use; of legalization, how a graph is put where its call stood, as front ends do too.
# The others are its passes, which only its entrance reaches.
OPEN = {"passes", "passes._torch", "passes.contract", "passes.graph", "passes.legalize", "passes.ops", "passes.runtime"}
# Packages whose `__init__` holds more than its docstring: what a user imports, and what saved modules name; and the
# command, which filters a warning of torch's before it imports torch.
WITH_NAMES = {"passes", "fxamp", "fxamp.cli", "fxamp.report.page"}


def table(rows: dict[str, str]) -> dict[str, set[str]]:
    """Return a table of packages, in which what begins with a dot is of the same package."""
    return {
        package: {package.partition(".")[0] + name if name.startswith(".") else name for name in imported.split()}
        for package, imported in rows.items()
    }


def package_of(module: str) -> str:
    """Return the package that a module lies in; a package of ours by itself is what its `__init__` gives."""
    path = FILES[module]
    folder = ".".join(path.parent.relative_to(ROOT).parts)
    return module if folder in ("passes", "fxamp") else folder


def imported(module: str) -> Iterator[str]:
    """Yield the modules of ours that a file imports, anywhere in it; they have to be there."""
    path = FILES[module]
    package = path.parent.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names if base.partition(".")[0] in ("passes", "fxamp") else ():
                name = f"{base}.{alias.name}"
                assert name in FILES or base in FILES, f"{path}:{node.lineno} imports {name}, which is not there"
                yield name if name in FILES else base


@functools.cache
def arrows() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for module in FILES:
        if module == "fxamp":
            continue  # gives on what a user may name, from anywhere
        packages = found.setdefault(package_of(module), set())
        packages.update(package_of(name) for name in imported(module))
    return {package: others - {package} for package, others in found.items()}


def test_packages_import_what_the_table_says() -> None:
    assert arrows() == table(ARROWS)


def test_imports_between_packages_have_no_cycle() -> None:
    assert list(graphlib.TopologicalSorter(arrows()).static_order())  # raises CycleError, which names the packages


def first_level(module: str) -> str:
    """Return the folder of `fxamp` that a module lies in, however deep, or the file that lies in `fxamp` itself."""
    return ".".join(module.split(".")[:2])


def named(module: str) -> Iterator[str]:
    """Yield the modules of ours that a file names in a string, as "fxamp.convert" or "fxamp.convert:plan"."""
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            yield from [name] if "." in name and name in FILES else []


def test_the_folders_of_the_product_have_no_cycle() -> None:
    found: dict[str, set[str]] = {}
    for module in FILES:
        if module.startswith("fxamp"):
            reached = {first_level(name) for name in (*imported(module), *named(module)) if name.startswith("fxamp")}
            found.setdefault(first_level(module), set()).update(reached - {first_level(module)})
    assert list(graphlib.TopologicalSorter(found).static_order())  # raises CycleError, which names the folders


def test_the_product_reaches_into_no_pass() -> None:
    for package, others in arrows().items():
        inside = {o for o in others if o.startswith("passes")} - OPEN
        assert not inside or not package.startswith("fxamp"), (package, inside)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_package_says_what_it_is_for_what_it_imports_and_who_uses_it(folder: Path) -> None:
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    said = (ast.get_docstring(tree) or "").splitlines()
    name = ".".join(folder.relative_to(ROOT).parts)
    if name != "fxamp":  # which says to users how it is called
        assert any(line.startswith("Imports ") for line in said)
        assert len(" ".join(said).split(". ")) >= 3
    assert (len(tree.body) > 1) == (name in WITH_NAMES)


def test_tests_lie_in_the_packages_of_what_they_test() -> None:
    tests = ROOT / "tests"
    folders = {p.parent for p in tests.rglob("test_*.py")}
    packages = {tests / folder.relative_to(ROOT) for folder in FOLDERS}
    assert folders - packages == {tests / "behaviour", tests / "reports"}
