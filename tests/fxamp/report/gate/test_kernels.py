"""Budgets of `fxamp check` on kernels, casts, bytes and peak: on a CPU, and for a GPU on a runner without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fxamp.report.gate.budget import Budget
from passes.contract.errors import PolicyError
from tests.fxamp.measure.fake_cuda.test_fake_cuda import counted

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        return self.body(x).square().mean()


class Uncompiled(Net):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


class Logits(Net):
    def forward(self, x):
        return self.body(x)


def make():
    return Net(), (torch.randn(32, 64),)


def uncompiled():
    return Uncompiled(), (torch.randn(32, 64),)


def logits():
    return Logits(), (torch.randn(32, 64),)


def asks():
    model = Net()
    return model.cuda() if torch.cuda.is_available() else model, (torch.randn(32, 64),)
"""
Check = Callable[..., "tuple[int, str, str]"]
CPU, CUDA = "--policy=O1,dtype=bf16,device=cpu", "--policy=O1,dtype=bf16,device=cuda"


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Run the command in a process of its own, as a compilation and its errors are there."""
    (tmp_path / "net.py").write_text(NET)

    def run(*words: str, **variables: str) -> tuple[int, str, str]:
        environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        done = subprocess.run(
            [sys.executable, "-m", "fxamp", "check", *words],
            cwd=tmp_path, capture_output=True, text=True, env=environment, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize("text", ["kernels=+0", "peak=+5%", "moved_bytes=-1", "cast_kernels=80%"])
def test_a_plan_has_no_counts_to_compare_with(text: str) -> None:
    with pytest.raises(PolicyError, match=f"a plan has no {text.partition('=')[0]} to compare with"):
        Budget.parse(text)


@pytest.mark.parametrize("policy", [CPU, pytest.param(CUDA, marks=counted)])
def test_a_budget_on_counts_holds_or_is_broken(check: Check, policy: str) -> None:
    kept = [f"--budget={key}=1000000000" for key in ("kernels", "cast_kernels", "moved_bytes", "peak")]
    assert check("net.py:make", policy, *kept)[0] == 0
    status, out, _ = check("net.py:make", policy, "--budget=kernels=1", "--budget=peak=1", "--budget=casts=1000")
    assert status == 1
    assert re.findall(r"over budget: (\w+) is [1-9]", out) == ["kernels", "peak"]


@counted
def test_budgets_of_targets_are_checked(check: Check, tmp_path: Path) -> None:
    table = f'[tool.fxamp.targets.net]\ntarget = "net.py:make"\npolicy = "{CUDA[9:]}"\nbudget = ["cast_kernels=0"]\n'
    (tmp_path / "pyproject.toml").write_text(table)
    status, out, _ = check()
    assert status == 1
    assert "cast_kernels is" in out


@counted
@pytest.mark.parametrize(
    ("target", "policy", "said"),
    [
        ("uncompiled", CPU, "Inductor does not compile 'net.py:uncompiled'"),
        ("uncompiled", CUDA, "Inductor compiled nothing of 'net.py:uncompiled'"),
        ("logits", CUDA, "loss"),
        ("asks", CUDA, "asks torch.cuda.is_available"),
    ],
)
def test_what_has_no_counts_is_no_answer(check: Check, target: str, policy: str, said: str) -> None:
    status, _, err = check(f"net.py:{target}", policy, "--budget=kernels=1")
    assert (status, said in err) == (2, True), err


@counted
def test_without_a_compiler_there_is_no_answer_for_a_gpu(check: Check) -> None:
    status, _, err = check("net.py:make", CUDA, "--budget=kernels=1", CXX="no-such-compiler")
    assert (status, "install g++" in err) == (2, True), err


@counted
def test_without_triton_there_is_no_answer_for_a_gpu(check: Check, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'triton' else find(name, *more)\n"
    )
    status, _, err = check("net.py:make", CUDA, "--budget=kernels=1")
    assert (status, "pip install triton" in err) == (2, True), err
