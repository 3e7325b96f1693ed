"""The command as a process: how soon it answers, what a target may do to it, and how it is ended."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fxamp.cli.main import main

ROOT = Path(__file__).parents[3]
TARGETS = """
import atexit, os, sys, time, torch
from torch import nn


def good():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.randn(2, 4),)


def in_target():
    os._exit(0)


class Ends(nn.Linear):
    def forward(self, x):
        os._exit(0)


def in_forward():
    return Ends(4, 4), (torch.randn(2, 4),)


def at_exit():
    atexit.register(os._exit, 0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Tanh()), (torch.randn(2, 4),)


def noisy():
    atexit.register(print, "last words", file=sys.stderr)
    raise ValueError("my own error")


def elsewhere():
    os.chdir("..")
    return good()


def closes():
    print("before", flush=True)
    sys.stdout.close()
    sys.stderr.close()
    return good()


def waits():
    open("waiting", "w").close()
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("t.py").write_text(TARGETS, encoding="utf-8")
    return folder


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fxamp", *words], capture_output=True, text=True, check=False)


def test_help_answers_at_once_and_without_torch() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    helped = command("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert helped.returncode == 0
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime <= 0.4
    code = "import sys; from fxamp.cli.main import main; main(['check', '--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_target_that_ends_the_process_does_not_pass() -> None:
    assert command("check", "t.py:good", "--plan", "p.json", "--update").returncode == 0
    for name, status in (("in_target", 2), ("in_forward", 2), ("at_exit", 1)):
        done = command("check", f"t.py:{name}", "--plan", "p.json")
        assert done.returncode == status, (name, done)
        assert ("ended with exit status 0 before it had an answer" in done.stderr) == (status == 2), (name, done)


def test_the_reason_of_a_failed_target_is_its_own_error() -> None:
    Path("pyproject.toml").write_text(
        '[tool.fxamp.targets.a]\ntarget = "t.py:noisy"\nbudget = ["casts=1"]\n'
        '[tool.fxamp.targets.b]\ntarget = "t.py:in_target"\nbudget = ["casts=1"]\n',
        encoding="utf-8",
    )
    done = command("check", "--jobs=2")
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert "ValueError: my own error" in first
    assert first.startswith("fxamp: error: a: ")
    assert "b: its process ended with exit status 0" in second
    done = command("check", "a")
    assert [line for line in done.stderr.splitlines() if "my own error" in line] == [first], "said once"


def test_a_target_that_changes_the_directory_moves_no_file(here: Path) -> None:
    assert main(["check", "--here", "t.py:elsewhere", "--plan", "sub/plan.json", "--update", "-o", "out.txt"]) == 0
    assert main(["report", "t.py:elsewhere", "--save-plan", "own.json", "-o", "report.txt"]) == 0
    assert {p.name for p in here.rglob("*.json")} == {"plan.json", "own.json"}
    assert {p.name for p in here.glob("*.txt")} == {"out.txt", "report.txt"}
    assert Path.cwd() == here


def test_a_target_that_closes_its_streams_closes_none_of_ours() -> None:
    done = command("report", "t.py:closes")
    assert done.returncode == 0, done
    assert "Totals" in done.stdout
    assert done.stderr == "before\n"


def test_closed_and_full_outputs_have_words_of_their_own() -> None:
    shell = f"{sys.executable} -m fxamp rules softmax"
    for redirection, said in (
        (">&-", "standard output is closed"),
        (">/dev/full", "standard output cannot be written"),
    ):
        done = subprocess.run(f"{shell} {redirection}", shell=True, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
        assert said in done.stderr


@pytest.mark.parametrize(
    ("number", "status", "said"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
@pytest.mark.parametrize("verb", [["report"], ["check", "--budget=casts=1"]])
def test_a_signal_ends_it_without_a_traceback(verb: list[str], number: int, status: int, said: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "fxamp", *verb, "t.py:waits"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        for _ in range(600):
            if Path("waiting").exists():
                break
            time.sleep(0.1)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does it
        else:
            process.send_signal(number)
        _, error = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == status, error
    assert "Traceback" not in error
    assert f"fxamp: {said}" in error
    assert not list(Path.cwd().glob(".fxamp-*"))
