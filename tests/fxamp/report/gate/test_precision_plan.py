"""The pytest plugin: plans beside tests, and nothing at all for tests that do not ask."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxamp
from fxamp.report.gate.precision_plan import file_name
from passes.contract.plan import Plan

pytest_plugins = ("pytester",)

ROOT = Path(fxamp.__file__).parent.parent
UPDATE = "--update-precision-plans"
NET = """
import torch
from torch import nn

def net(activation=nn.ReLU):
    return nn.Sequential(nn.Linear(6, 6), activation(), nn.Linear(6, 2))

X = (torch.randn(3, 6),)
"""
TEST = (
    NET
    + """
def test_net(precision_plan):
    precision_plan.check(net(), X, policy="O1,dtype=bf16")
"""
)
Run = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def everything_is_imported() -> None:
    """Import what a conversion does, for pytester takes what is imported inside out again, which torch cannot bear."""
    fxamp.convert(nn.Sequential(nn.Linear(6, 6)), (torch.randn(3, 6),))


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    return lambda *words: pytester.runpytest_inprocess("-p", "fxamp.pytest_plugin", *words)


def test_a_plan_is_written_on_demand_and_then_compared(pytester: pytest.Pytester, run: Run) -> None:
    test = pytester.makepyfile(test_it=TEST)
    plan = pytester.path / "test_it" / "test_net.plan.json"
    missing = run()
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines([f"*there is no test_it/test_net.plan.json yet*{UPDATE}*"])
    assert not plan.exists()
    wrote = run(UPDATE)
    wrote.assert_outcomes(failed=1)
    wrote.stdout.fnmatch_lines(["*wrote test_it/test_net.plan.json*"])
    assert Plan.load(plan).totals
    before = plan.read_bytes()
    run().assert_outcomes(passed=1)
    run(UPDATE).assert_outcomes(passed=1)
    assert plan.read_bytes() == before
    test.write_text(TEST.replace("net(), X", "net(nn.Softplus), X"))
    changed = run()
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(["*+ 1/softplus#0*", f"*{UPDATE}*"])
    assert plan.read_bytes() == before
    run(UPDATE).assert_outcomes(failed=1)
    run().assert_outcomes(passed=1)


def test_a_step_that_does_not_run_as_planned_fails(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(
        test_it=NET
        + """
import fxamp

def test_fine(precision_plan):
    precision_plan.run(net(), X[0], policy="O1,dtype=bf16")
    precision_plan.run(fxamp.convert(net(), policy="O2,dtype=bf16"), X)

def test_by_hand(precision_plan):
    view = fxamp.convert(net(), policy="O1,dtype=bf16")
    precision_plan.run(view, X, loss=lambda out: out.float().sum() + view[0](X[0]).sum())

def test_fp32(precision_plan):
    model = net()
    step = fxamp.TrainStep(model, lambda out: out.sum(), torch.optim.SGD(model.parameters(), 0.1))
    precision_plan.run(step, X[0])
"""
    )
    result = run()
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*Sequential did not run as planned:", "*module 0: ran addmm in float32*by hand*"])
    result.stdout.fnmatch_lines(["*nothing of this TrainStep is converted: give it a view*"])


def test_a_plan_that_is_damaged_fails_and_is_written_anew(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(test_it=TEST)
    plan = pytester.path / "test_it" / "test_net.plan.json"
    plan.parent.mkdir()
    plan.write_text("{")
    result = run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*not JSON, or cut short*", f"*{UPDATE}*"])
    run(UPDATE).assert_outcomes(failed=1)
    run().assert_outcomes(passed=1)


def test_two_checks_of_one_file_are_refused_by_name(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makepyfile(
        test_it=NET
        + """
import fxamp, pytest

CONVERTED = fxamp.convert(net(), X, policy="O2,dtype=bf16")

@pytest.mark.parametrize("size", ["1-2", "1_2"])
def test_net(precision_plan, size):
    precision_plan.check(CONVERTED)

def test_NET(precision_plan):
    precision_plan.check(CONVERTED, basename="test_net_1_2_")

def test_twice(precision_plan):
    precision_plan.check(CONVERTED)
    precision_plan.check(CONVERTED, basename="second")
    precision_plan.check(CONVERTED)
"""
    )
    for _ in range(2):
        run(UPDATE)  # which fails at the first plan that it writes
    result = run()
    result.assert_outcomes(passed=1, failed=3)
    plans = sorted(p.name for p in (pytester.path / "test_it").iterdir() if p.suffix == ".json")
    assert plans == ["second.plan.json", "test_net_1_2_.plan.json", "test_twice.plan.json"]
    said = "test_net_1_2_.plan.json is the plan of two checks, here and in test_it.py::test_net[[]1-2[]]: *basename*"
    result.stdout.fnmatch_lines([said, said, "test_twice.plan.json is the plan of two checks, here and in this test*"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_net[3-wide]", "test_net_3_wide_"),
        ('a<b>:"/\\|?*. ', "a_b__________"),
        ("../../up", "______up"),
        ("nul", "nul_"),
        ("COM1", "COM1_"),
        ("console", "console"),
        ("", "_"),
        ("e\u0301", "\u00e9"),
    ],
)
def test_a_file_name_is_one_that_windows_takes(name: str, expected: str) -> None:
    assert file_name(name) == expected


def test_long_names_stay_apart() -> None:
    names = {file_name("é" * 200 + end) for end in ("a", "b")}
    assert len(names) == 2
    assert all(len(name.encode()) <= 120 for name in names)


def python(script: str, *path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


PLAIN_RUN = """
import pathlib, pytest, sys, tempfile
file = pathlib.Path(tempfile.mkdtemp(), "test_plain.py")
file.write_text("def test_plain(tmp_path): pass")
sys.exit(pytest.main(["-q", "-p", "fxamp.pytest_plugin", "-p", "no:cacheprovider", str(file)])
         or sorted({"torch", "passes"} & set(sys.modules)) or 0)
"""


def test_a_run_that_does_not_ask_imports_nothing(tmp_path: Path) -> None:
    assert "1 passed" in python(PLAIN_RUN)
    (tmp_path / "passes.py").write_text("raise RuntimeError")  # of that name, somebody's own
    assert "1 passed" in python(PLAIN_RUN, tmp_path)


def test_importing_fxamp_imports_neither_torch_nor_the_compiler() -> None:
    assert python("import fxamp, sys; print({'torch', 'passes'} & set(sys.modules), fxamp.__version__)") == (
        f"set() {fxamp.__version__}\n"
    )


def test_public_names_are_functions_whatever_file_was_imported_before() -> None:
    script = """
import fxamp.convert, fxamp.report.diff.diff
from fxamp.report.record import record
from fxamp import *
import fxamp
assert callable(fxamp.convert) and callable(fxamp.report) and convert is fxamp.convert
assert report.__name__ == "report" and rules() and "softmax" in {r.name for r in rules()}
try:
    fxamp.covnert
except AttributeError as e:
    print(e)
"""
    assert python(script) == "module 'fxamp' has no attribute 'covnert'\n"


def test_type_checkers_are_told_the_names_that_are_loaded() -> None:
    tree = ast.parse(Path(fxamp.__file__).read_text(encoding="utf-8"))
    checked = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    told = {
        (("fxamp." if n.level else "") + str(n.module), alias.asname)
        for n in checked.body if isinstance(n, ast.ImportFrom) for alias in n.names
    }  # fmt: skip
    assert told == {(module, name) for module, names in fxamp._FOUND_IN.items() for name in names}
    assert {name for _, name in told} <= set(dir(fxamp))
    assert all(getattr(fxamp, name or "").__name__ == name for _, name in told)


def test_the_plugin_is_an_entry_point() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'\[project\.entry-points\.pytest11\]\n"fxamp\.pytest_plugin" = "fxamp\.pytest_plugin"', text)
