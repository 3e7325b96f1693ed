"""The house: which room may import which, how many entries a floor has, how long a file is, and what each room says.

A room is a folder; what lies on the floor of `passes` or of `fxamp` itself is a room of its own. Arrows count wherever
they stand: in functions, and for types alone too.
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
FLOORS = sorted({p.parent for p in FILES.values()})

# Room: what it imports. The lowest first; what is new here has to have a reason.
ARROWS = {
    "passes.contract": "",
    "passes._torch": ".contract",
    "passes.runtime": "._torch",
    "passes.colouring": ".contract",
    "passes.ops.table": "",
    "passes.ops": "._torch .contract .ops.table .runtime",
    "passes.graph": "._torch .contract .ops .runtime",
    "passes.assign.colour": "._torch .colouring .contract .form .graph .ops",
    "passes.form": ".colouring .contract .graph",
    "passes.legalize": "._torch .contract .form .graph .ops",
    "passes.assign.place": "._torch .assign.colour .colouring .contract .graph .ops",
    "passes.assign": ".assign.colour .assign.place .colouring .contract .form .graph .ops",
    "passes.casts": "._torch .colouring .contract .form .graph .ops .runtime",
    "passes.watch": ".casts .form .ops",
    "passes.pipeline": (".assign .assign.colour .casts .colouring .contract .form .graph .legalize .ops .watch"),
    "passes": ".pipeline .watch",
    "fxamp.guard": "",
    "fxamp.capture.model": "passes passes._torch passes.contract passes.graph",
    "fxamp.module": ".capture.model passes._torch passes.contract passes.graph passes.ops",
    "fxamp.train.ranks": ".module passes._torch passes.contract",
    "fxamp.train.scale": ".train.ranks passes.contract",
    "fxamp.train.window": ".train.ranks .train.scale passes.contract",
    "fxamp.trust": ".capture.model .module passes._torch passes.contract passes.graph passes.ops",
    "fxamp.capture": (
        ".capture.model .module .trust passes._torch passes.contract passes.graph passes.ops passes.runtime"
    ),
    "fxamp.report.record": ".capture.model .module .trust passes._torch passes.contract passes.graph passes.ops",
    "fxamp.dynamo": (
        ".capture.model .module .report.record .trust passes passes._torch passes.contract passes.graph passes.ops"
    ),
    "fxamp.measure": ".capture .capture.model .module .trust passes._torch passes.contract passes.graph",
    "fxamp.report.forms": ".report.record",
    "fxamp.convert": (
        ".capture .capture.model .dynamo .measure .module .trust passes passes._torch passes.contract passes.graph"
    ),
    "fxamp.report.page": ".report.forms .report.record passes.contract",
    "fxamp.train.weights": ".dynamo .measure .module passes._torch passes.contract passes.graph passes.runtime",
    "fxamp.report.diff": ".convert .dynamo .module .report.forms passes._torch passes.contract passes.graph passes.ops",
    "fxamp.train.compiled": (
        ".dynamo .module .train.ranks .train.scale .train.weights .train.window passes._torch passes.contract "
        "passes.ops"
    ),
    "fxamp.report.gate": ".convert .module .report.diff .report.forms .report.record passes.contract passes.ops",
    "fxamp.train": (
        ".dynamo .train.compiled .train.ranks .train.scale .train.weights .train.window passes._torch passes.contract"
    ),
    "fxamp.demo": ".convert .measure .train .train.weights passes.contract",
    "fxamp.pytest_plugin": ".report.gate",
    "fxamp.report": ".dynamo .module .report.diff .report.forms .report.page .report.record .train passes.contract",
    "fxamp.cli": (".convert .demo .report .report.diff .report.forms .report.gate passes passes.contract passes.ops"),
    "fxamp.__main__": ".cli",
}
# What of the compiler anyone may use. The others are its passes, which only its entrance reaches.
OPEN = {"passes", "passes._torch", "passes.contract", "passes.graph", "passes.ops", "passes.runtime"}
MOST_ENTRIES, MOST_LINES = 12, 400
MOST_DECISIONS = 20  # of a function
# Rooms whose `__init__` holds more than its docstring: what a user imports, and what saved modules name.
WITH_NAMES = {"passes", "fxamp", "fxamp.dynamo", "fxamp.module", "fxamp.report", "fxamp.report.page"}


def table(rows: dict[str, str]) -> dict[str, set[str]]:
    """Return a table of rooms, in which what begins with a dot is of the same package."""
    return {
        room: {room.partition(".")[0] + name if name.startswith(".") else name for name in imported.split()}
        for room, imported in rows.items()
    }


def room_of(module: str) -> str:
    """Return the room that a module lies in; a package of ours by itself is what its `__init__` gives."""
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
        rooms = found.setdefault(room_of(module), set())
        rooms.update(room_of(name) for name in imported(module))
    return {room: others - {room} for room, others in found.items()}


def test_rooms_import_what_the_table_says() -> None:
    assert arrows() == table(ARROWS)


def test_imports_between_rooms_have_no_cycle() -> None:
    assert list(graphlib.TopologicalSorter(arrows()).static_order())  # raises CycleError, which names the rooms


def test_the_product_reaches_into_no_pass() -> None:
    for room, others in arrows().items():
        inside = {o for o in others if o.startswith("passes")} - OPEN
        assert not inside or not room.startswith("fxamp"), (room, inside)


@pytest.mark.parametrize("floor", FLOORS, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_folder_has_too_many_files(floor: Path) -> None:
    files = [p for p in FILES.values() if p.parent == floor and not p.stem.startswith("__")]
    folders = [p for p in FLOORS if p.parent == floor]
    assert len(files) + len(folders) <= MOST_ENTRIES, [p.name for p in (*folders, *files)]


def length(path: Path) -> int:
    """Return how many lines a file has, without the examples at the end of docstrings, which are the reference's."""
    text = path.read_text(encoding="utf-8")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    said = [ast.get_docstring(n) or "" for n in ast.walk(ast.parse(text)) if isinstance(n, kinds)]
    examples = [doc.partition("\n\nExample:\n")[2] for doc in said]
    return len(text.splitlines()) - sum(len(example.splitlines()) + 3 for example in examples if example)


def test_no_file_is_too_long() -> None:
    long = {}
    for path in FILES.values():
        lines = length(path)
        if lines > MOST_LINES:
            long[path.relative_to(ROOT).as_posix()] = lines
    assert not long


DECIDES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case, ast.comprehension)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def decisions(function: Function) -> int:
    """Count the ways through a function as McCabe does, and each `and` and `or` beside: all that a reader must hold."""
    count, left = 1, list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        if isinstance(node, (Function, ast.ClassDef)):
            continue  # counted by itself
        count += isinstance(node, DECIDES)
        count += len(node.ifs) if isinstance(node, ast.comprehension) else 0
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        left += ast.iter_child_nodes(node)
    return count


def test_no_function_has_too_many_branches() -> None:
    found = {}
    for path in FILES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, Function) and (count := decisions(node)) > MOST_DECISIONS:
                found[f"{path.relative_to(ROOT).as_posix()}:{node.name}"] = count
    assert not found


def test_conditions_that_are_joined_count_like_branches() -> None:
    source = "def f(a, b, c):\n    if a and b or c:\n        return [x for x in a if x]\n    return (lambda: b or c)()"
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert decisions(function) == 1 + 1 + 2 + 2 + 1


@pytest.mark.parametrize("floor", FLOORS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_says_what_it_is_for_what_it_imports_and_who_uses_it(floor: Path) -> None:
    tree = ast.parse((floor / "__init__.py").read_text(encoding="utf-8"))
    said = (ast.get_docstring(tree) or "").splitlines()
    name = ".".join(floor.relative_to(ROOT).parts)
    if name != "fxamp":  # which says to users how it is called
        assert any(line.startswith("Imports ") for line in said)
        assert len(" ".join(said).split(". ")) >= 3
    assert (len(tree.body) > 1) == (name in WITH_NAMES)


def test_tests_lie_in_the_rooms_of_what_they_test() -> None:
    tests = ROOT / "tests"
    folders = {p.parent for p in tests.rglob("test_*.py")}
    rooms = {tests / floor.relative_to(ROOT) for floor in FLOORS}
    assert folders - rooms == {tests / "behaviour", tests / "reports"}
