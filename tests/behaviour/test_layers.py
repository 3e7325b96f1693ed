"""Imports run tests -> reports -> tests.support -> fxamp -> passes -> torch and never back."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PASSES = sorted((ROOT / "passes").rglob("*.py"))
FXAMP = sorted((ROOT / "fxamp").rglob("*.py"))
REPORTS = sorted((ROOT / "reports").rglob("*.py"))
SUPPORT = sorted((ROOT / "tests" / "support").rglob("*.py"))
OURS = {"fxamp", "passes", "tests", "reports"}


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all that a file is made of."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def imports(path: Path) -> set[tuple[int, str]]:
    """Return (level, module) of every import statement of a file; level 0 is absolute."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {(0, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.level, node.module or ""))
    return found


def packages(path: Path) -> set[str]:
    return {module.partition(".")[0] for level, module in imports(path) if level == 0}


def importers(paths: Iterable[Path], names: Collection[str]) -> dict[str, set[str]]:
    """Return the files that import some of these packages, and which."""
    found = {path.relative_to(ROOT).as_posix(): packages(path) & set(names) for path in paths}
    return {path: names for path, names in found.items() if names}


def test_the_product_imports_no_tests_and_itself_relatively() -> None:
    assert importers(FXAMP, OURS - {"passes"}) == {}


def test_reports_import_no_tests_but_their_models_and_judge() -> None:
    modules = {module for path in REPORTS for _, module in imports(path) if module.partition(".")[0] == "tests"}
    assert all(module.startswith("tests.support") for module in modules)
    assert importers(SUPPORT, {"reports"}) == {}


def test_the_compiler_needs_torch_and_networkx_only() -> None:
    known = {"torch", "networkx", "sympy", "", *sys.stdlib_module_names}
    assert importers(PASSES, set().union(*map(packages, PASSES)) - known) == {}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def ours() -> frozenset[str]:
    """Return every name that our own code defines or assigns: what is private there is ours."""
    found: set[str] = set()
    for path in (*PASSES, *FXAMP):
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return frozenset(found)


def of_torch(made_of: Iterable[ast.AST]) -> dict[str, str]:
    """Return what names of a file are of torch's modules, by the names that they have there."""
    found: dict[str, str] = {}
    for node in made_of:
        if isinstance(node, ast.Import):
            names = [a for a in node.names if a.name.partition(".")[0] == "torch"]
            found |= {a.asname or a.name: a.name for a in names} | ({"torch": "torch"} if names else {})
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == "torch":
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def private_names(made_of: Collection[ast.AST], own: Collection[str] = ()) -> set[str]:
    """Return the private names of torch that a file uses: by import, by a chain of attributes, of an object.

    An object's is told by its name, which nothing of ours has. Of `self` a class of ours may use what it inherits; the
    tables of `nn.Module` are in every saved module; and what operators are called is no name of Python's.
    """
    torchs = of_torch(made_of)
    found = {name for name in torchs.values() if "._" in name}
    for node in made_of:
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        root, *chain = ast.unparse(node).split(".") if isinstance(node.value, ast.Name | ast.Attribute) else [""]
        if root in torchs:
            name = ".".join([torchs[root], *chain])
            found |= {name} - {n for n in (name,) if n.startswith("torch.ops.")}
        elif root not in NOT_TORCHS and node.attr not in TABLES and node.attr not in own:
            found.add(ast.unparse(node))
    return found


TABLES = {"_modules", "_parameters", "_buffers"}
NOT_TORCHS = {"self", "cls", "sys", "super()"}  # `sys._getframe` is Python's
NAMED_TUPLES = {"_asdict", "_fields", "_replace"}


def test_private_names_of_torch_stand_in_one_file() -> None:
    harness = ROOT / "fxamp" / "measure" / "fake_cuda"  # stands in for a device, in a process of its own
    dynamos = ROOT / "fxamp" / "capture" / "frames.py"  # what Dynamo answers for each frame
    owners = {
        ROOT / "passes" / "_torch.py",
        ROOT / "fxamp" / "_torch.py",
        ROOT / "fxamp" / "measure" / "inductor.py",
        ROOT / "fxamp" / "train" / "partitioner.py",  # what Inductor cuts a graph by
        ROOT / "fxamp" / "train" / "scaler.py",  # a subclass of GradScaler, and functions beside it
        dynamos,
    }
    others, own = {path for path in {*PASSES, *FXAMP} - owners if harness not in path.parents}, ours() | NAMED_TUPLES
    found = {path.relative_to(ROOT).as_posix(): private_names(nodes(path), own) for path in others}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch._C import _nn", {"torch._C._nn"}),
        ("import torch._dynamo as d", {"torch._dynamo"}),
        ("import torch._dynamo", {"torch._dynamo"}),
        ("import torch\ntorch._C._foo()", {"torch._C", "torch._C._foo"}),
        ("import torch\ntorch.fx.node._side_effects", {"torch.fx.node._side_effects"}),
        ("from torch import nn\nnn.Module._call_impl", {"torch.nn.Module._call_impl"}),
        ("def f(op): return op._schema.arguments", {"op._schema"}),
        ("def f(op): return getattr(op, 'x')._schema", {"getattr(op, 'x')._schema"}),
        ("def f(op): return op._ours", set()),
        ("import torch\ntorch.ops.aten._to_copy.default, torch.ops.aten.add._overload", set()),
        ("def f(self, m): return self._scale, m._modules, sys._getframe(), m.__dict__", set()),
    ],
)
def test_a_private_name_is_found_wherever_it_stands(source: str, found: set[str]) -> None:
    assert private_names(list(ast.walk(ast.parse(source))), {"_ours"}) == found
