"""What was saved when files lay elsewhere loads: pickles name classes and functions by the file they were in."""

from __future__ import annotations

import importlib
import os
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.module.moved import MOVED
from tests.support.helpers import convert_fixed, example

NAMES = [(old, name) for old, (_, names) in MOVED.items() for name in names]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Recurrent(nn.Module):
    """Shared weights, a counter of batches and a recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.m, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.m.weight = self.l.weight
        self.rnn = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(self.norm(self.m(x))[None])[0]
        return self.l(out[0])


class Net(Recurrent):
    """It also has a region, a write, and a function of the user's."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.l(x)
        y = y.clone()
        y += Twice.apply(super().forward(x + y))  # type: ignore[no-untyped-call]
        return torch.softmax(y @ self.m.weight, -1)


@pytest.fixture(scope="module", params=["export", "fx"])
def converted(request: pytest.FixtureRequest) -> fxamp.ConvertedModule:
    torch.manual_seed(0)
    model: nn.Module = Net() if request.param == "export" else Recurrent()
    return convert_fixed(model, (example(),), policy="O1,dtype=bf16", capture=request.param)


def named(pickled: bytes) -> set[str]:
    return {str(arg) for op, arg, _ in pickletools.genops(pickled) if op.name == "GLOBAL"}


def by_old_paths(pickled: bytes) -> bytes:
    """Return a pickle as it was written when the files lay where `MOVED` says."""
    for old, (new, names) in MOVED.items():
        for name in names:
            pickled = pickled.replace(f"c{new}\n{name}\n".encode(), f"c{old}\n{name}\n".encode())
    return pickled


def outputs(module: nn.Module) -> list[Tensor]:
    out = []
    for mode in (True, False):
        torch.manual_seed(0)
        out.append(module.train(mode)(example()))
    return out


def test_a_module_saved_by_old_paths_computes_the_same(converted: fxamp.ConvertedModule) -> None:
    pickled = pickle.dumps(converted, protocol=2)  # which names globals as plain text
    before = by_old_paths(pickled)
    called = {
        "export": {"fxamp.modes count_", "fxamp.functions call_under_autocast"},
        "fx": {"fxamp.modes count_", "passes.rnn lstm", "passes.insert_casts cast_floating"},
    }
    assert {"fxamp.module _load", "fxamp.call CallSpec", *called[converted.plan.capture]} <= named(before)

    made = pickle.loads(before)

    assert made.plan == converted.plan
    assert named(pickle.dumps(made, protocol=2)) == named(pickled)
    assert all(map(torch.equal, outputs(made), outputs(pickle.loads(pickled))))


@pytest.mark.parametrize("converted", ["fx"], indirect=True)
def test_a_new_process_loads_it_before_it_has_imported_fxamp(converted: fxamp.ConvertedModule, tmp_path: Path) -> None:
    (tmp_path / "module").write_bytes(by_old_paths(pickle.dumps(converted, protocol=2)))
    script = "import pickle, sys; print(type(pickle.load(open(sys.argv[1], 'rb'))).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "module")],
        cwd=Path(fxamp.__file__).parent.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("ConvertedModule\n", 0), done.stderr


def test_all_that_a_saved_module_names_of_ours_is_in_the_table(converted: fxamp.ConvertedModule) -> None:
    known = {f"{new} {name}" for new, names in MOVED.values() for name in names}
    ours = {n for n in named(pickle.dumps(converted, protocol=2)) if n.startswith(("fxamp.", "passes."))}
    assert {n for n in ours if not n.startswith("passes.runtime.")} <= known


@pytest.mark.parametrize(("old", "name"), NAMES)
def test_an_old_name_is_what_it_was(old: str, name: str) -> None:
    assert getattr(importlib.import_module(old), name) is getattr(importlib.import_module(MOVED[old][0]), name)


@pytest.mark.parametrize("name", ["cast_floating", "cast_weight"])
def test_casts_are_found_in_the_pass_too_where_they_were_before_they_had_a_file_of_their_own(name: str) -> None:
    now = importlib.import_module("passes.runtime.casts")
    assert getattr(importlib.import_module("passes.casts.insert_casts"), name) is getattr(now, name)


@pytest.mark.parametrize("value", [fxamp.Policy("O2", dtype="fp16"), fxamp.backend("O1"), fxamp.LossScaler()])
def test_settings_pickled_by_old_paths_load(value: Any) -> None:
    pickled = pickle.dumps(value, protocol=2)
    made = pickle.loads(by_old_paths(pickled))
    assert by_old_paths(pickled) != pickled
    assert type(made) is type(value)
    assert pickle.dumps(made, protocol=2) == pickled


def test_nothing_else_of_an_old_file_is_found() -> None:
    with pytest.raises(AttributeError, match=r"module 'fxamp\.call' has no attribute 'both'"):
        importlib.import_module("fxamp.call").both  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("fxamp.preflight")


def test_another_package_called_passes_keeps_its_own_modules(tmp_path: Path) -> None:
    (tmp_path / "passes").mkdir()
    for name in ("__init__", "plan"):
        (tmp_path / "passes" / f"{name}.py").write_text("x = 1\n")
    script = "import sys, pytest, fxamp, passes.plan; print(passes.plan.x); import passes.policy"
    found = (str(tmp_path), str(Path(fxamp.__file__).parent.parent), os.environ.get("PYTHONPATH", ""))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))},
    )  # fmt: skip
    assert done.stdout == "1\n", done.stderr
    assert "No module named 'passes.policy'" in done.stderr
