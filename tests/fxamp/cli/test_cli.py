"""What each verb prints, and the status it leaves with."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.cli.main import main
from fxamp.target import load_target
from passes.contract.errors import CaptureError, FxampError
from passes.contract.plan import Decision, Plan
from passes.contract.policy import Policy
from tests.support.processes import in_another_process, printed

ROOT = Path(__file__).parents[3]
LINEAR = Decision("fc/linear#0", 0, "linear", "fc", "net.py:12", "bfloat16", "bfloat16", "low", "autocast_low")
PLAN = Plan((LINEAR,), Policy("O1", dtype="bf16", device="cpu"))
OTHER = Plan((dataclasses.replace(LINEAR, colour="float32"),), Policy("O2", dtype="bf16", device="cpu"))

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder with two saved plans."""
    monkeypatch.chdir(tmp_path)
    PLAN.save("a.json")
    OTHER.save("b.json")
    return tmp_path


class Net(nn.Module):
    """A model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.fc(x)
        return made


@functools.cache
def converted() -> Any:
    module: Any = fxamp.convert(Net(), (torch.randn(2, 4),), policy="O2")
    return module


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Note what is to be converted, and convert a model of one layer instead."""
    calls: list[tuple[object, ...]] = []

    def to_read(model: object, args: object, kwargs: object, policy: object, *, replayed: object) -> Any:
        calls.append((model, args, kwargs, str(policy)))
        return converted()

    monkeypatch.setattr(importlib.import_module("fxamp.cli.target"), "to_read", to_read)
    return calls


def error_of(capsys: Capture) -> str:
    """Return the one line on standard error, checked to be one."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fxamp: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_equal_plans_leave_with_zero_and_different_ones_with_one_or_as_is_asked(here: Path, capsys: Capture) -> None:
    for other, words, status, said in (
        ("a.json", [], 0, "no difference"), ("b.json", [], 1, "! fc/linear#0  colour: bfloat16 -> float32"),
        ("b.json", ["--exit-zero"], 0, "!"), ("absent.json", ["--exit-zero"], 2, ""),
    ):  # fmt: skip
        assert main(["diff", "a.json", other, *words]) == status
        assert said in capsys.readouterr().out


def test_unreadable_plan_leaves_with_two(here: Path, capsys: Capture) -> None:
    (here / "a.json").write_text("{", encoding="utf-8")
    assert main(["diff", "a.json", "b.json"]) == 2
    assert "a.json:1: not JSON, or cut short" in error_of(capsys)


@pytest.mark.parametrize("verb", [["diff", "a.json", "b.json"], ["report", "a.json"], ["rules"], ["rules", "softmax"]])
def test_every_printing_verb_has_three_formats(here: Path, capsys: Capture, verb: list[str]) -> None:
    written = []
    for form in ("text", "markdown", "json"):
        main([*verb, "--output-format", form])
        written.append(capsys.readouterr().out)
    text, markdown, data = written
    assert len({text, markdown, data}) == 3
    assert "|" in markdown
    assert json.loads(data)


@pytest.mark.parametrize("verb", [["diff", "a.json", "b.json"], ["report", "a.json"], ["rules", "softmax"]])
def test_output_goes_to_the_file_instead(here: Path, capsys: Capture, verb: list[str]) -> None:
    status = main(verb)
    printed = capsys.readouterr().out
    assert main([*verb, "-o", "out.txt"]) == status
    assert capsys.readouterr().out == ""
    assert (here / "out.txt").read_text(encoding="utf-8") == printed


@pytest.mark.parametrize("option", ["-o", "--save-plan"])
def test_file_that_cannot_be_written_leaves_with_two(here: Path, capsys: Capture, option: str) -> None:
    assert main(["report", "a.json", option, "absent/out.txt"]) == 2
    message = error_of(capsys)
    assert "No such file or directory" in message
    assert "absent" in message


def test_saved_plan_is_reported(here: Path, capsys: Capture) -> None:
    assert main(["report", "a.json"]) == 0
    assert "· fc " in capsys.readouterr().out
    assert main(["report", "a.json", "--nodes"]) == 0
    assert "fc/linear#0" in capsys.readouterr().out


def test_graphs_are_printed_after_the_pass_that_is_asked_for(here: Path, capsys: Capture) -> None:
    (here / "net.py").write_text(
        "import torch\ndef build(): return torch.nn.Sequential(torch.nn.Linear(4, 4)), (torch.randn(2, 4),)\n"
    )
    asked = ["report", "net.py:build", "--print-after", "legalize", "--print-after", "eliminate-casts", "--edits"]
    assert main(asked) == 0
    shown = capsys.readouterr()
    printed = [line for line in shown.err.splitlines() if line.startswith("graph ")]
    assert printed[0].startswith("graph 0 after legalize: number 0, switch 0, field 0, ")
    assert printed[-1].startswith("graph 0 after eliminate-casts: no_op 0, round_trip 0, read 0, share 0")
    assert re.search(r"^  \w+: bfloat16 = linear\(to_dtype, ", shown.err, re.MULTILINE)
    assert "after" not in shown.out.partition("Modules")[2]
    assert "Rules that never fired: eliminate-casts/author, eliminate-casts/dtype_argument, " in shown.out
    assert main([*asked, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_only_passes_are_printed_after(here: Path, capsys: Capture) -> None:
    assert main(["report", "a.json", "--print-after", "annotate"]) == 2
    assert "leave out --print-after" in error_of(capsys)
    assert main(["report", "net.py:build", "--print-after", "anotate"]) == 2
    assert "there is no pass 'anotate'" in error_of(capsys)


def test_policy_beside_a_saved_plan_is_refused(here: Path, capsys: Capture) -> None:
    assert main(["report", "a.json", "--policy", "O2"]) == 2
    assert "leave out --policy" in error_of(capsys)


@pytest.mark.parametrize("target", ["net.py:build", "sub/net.py:build", "pkg.net:build"])
def test_target_is_found_from_the_current_directory(
    here: Path, planned: list[tuple[object, ...]], capsys: Capture, target: str
) -> None:
    for name in ("net.py", "sub/net.py", "pkg/net.py"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text("def build(): return 'model', (1,), {'x': 2}", encoding="utf-8")
    assert main(["report", target, "--nodes", "--policy", "O2", "--save-plan", "saved.json"]) == 0
    assert planned == [("model", (1,), {"x": 2}, "O2")]
    assert Plan.load("saved.json") == fxamp.plan_of(converted())
    assert "fc/linear#0" in capsys.readouterr().out


def test_path_is_restored_when_the_verb_is_done(here: Path, planned: list[tuple[object, ...]], capsys: Capture) -> None:
    before = list(sys.path)
    (here / "net.py").write_text("import sys\ndef build(): return sys.path[0]", encoding="utf-8")
    main(["report", "net.py:build"])
    assert planned[0][0] == str(here)
    assert sys.path == before


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ("'m'", ("m", None, None)),
        ("('m',)", ("m", None, None)),
        ("('m', (1,))", ("m", (1,), None)),
        ("('m', None, {'x': 1})", ("m", None, {"x": 1})),
    ],
)
def test_target_may_leave_out_inputs(here: Path, made: str, expected: tuple[object, ...]) -> None:
    (here / "net.py").write_text(f"def build(): return {made}", encoding="utf-8")
    assert load_target("net.py:build") == expected


def test_file_with_the_name_of_a_loaded_module_does_not_replace_it(here: Path) -> None:
    (here / "json.py").write_text("def build(): return __name__", encoding="utf-8")
    assert load_target("json.py:build")[0] != "json"
    assert sys.modules["json"] is json


def test_dataclass_in_a_target_file_works(here: Path) -> None:
    source = (
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass C:\n    x: int = 1\n"
    )
    (here / "config_of_net.py").write_text(source, encoding="utf-8")
    assert str(load_target("config_of_net.py:C")[0]) == "C(x=1)"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("net", "'net' is not a target; TARGET is package.module:callable or path/file.py:callable"),
        ("absent_package.net:build", "cannot import 'absent_package.net' .ModuleNotFoundError"),
        ("absent.py:build", "cannot import 'absent.py' .FileNotFoundError"),
        ("net.py:biuld", "'net.py' has no 'biuld'; the nearest name is 'build'"),
        ("net.py:number", "'net.py' has no callable 'number'"),
        ("net.py:fails", "'net.py:fails' raised ValueError: no data"),
        ("net.py:leaves", "'net.py:leaves' raised SystemExit: 0"),
        ("net.py:stops", "'net.py:stops' raised GeneratorExit"),
        ("net.py:four", "returned 4 things"),
        ("broken.py:build", "cannot import 'broken.py' .SyntaxError"),
        ("leaving.py:build", "cannot import 'leaving.py' .SystemExit: 0"),
    ],
)
def test_target_that_does_not_work_is_named(here: Path, target: str, message: str) -> None:
    (here / "net.py").write_text(
        "import sys\nnumber = 1\n"
        "def build(): return 'model'\n"
        "def four(): return 1, 2, 3, 4\n"
        "def fails(): raise ValueError('no data')\n"
        "def leaves(): sys.exit(0)\n"
        "def stops(): raise GeneratorExit\n",
        encoding="utf-8",
    )
    (here / "broken.py").write_text("def", encoding="utf-8")
    (here / "leaving.py").write_text("import sys; sys.exit(0)", encoding="utf-8")
    with pytest.raises(FxampError, match=message):
        load_target(target)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("raise KeyError('mine')", "KeyError at net.py:3: 'mine'"),
        ("return int('x')", "ValueError at net.py:3: invalid"),
    ],
)
def test_an_error_of_the_models_own_is_not_taken_for_one_of_fxamp(
    here: Path, capsys: Capture, body: str, error: str
) -> None:
    (here / "net.py").write_text(
        f"import torch\nclass Net(torch.nn.Module):\n    def forward(self, x): {body}\n"
        "def build(): return Net(), torch.ones(2, 2)\n",
        encoding="utf-8",
    )
    assert main(["report", "net.py:build"]) == 2
    said = error_of(capsys)
    assert f"the code of the target raised {error}" in said
    assert "please report it" not in said


@pytest.mark.parametrize(
    "error", [kind("two\nlines") for kind in (CaptureError, RuntimeError, SystemExit, GeneratorExit)]
)
def test_error_while_planning_is_one_line(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, error: BaseException
) -> None:
    def to_read(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(importlib.import_module("fxamp.cli.target"), "to_read", to_read)
    (here / "net.py").write_text("def build(): return 'model'", encoding="utf-8")
    assert main(["report", "net.py:build"]) == 2
    assert "two lines" in error_of(capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: VERB; see `fxamp --help`"),
        (["reprot"], "invalid choice: 'reprot'"),
        (["diff", "a.json"], "the following arguments are required: B; see `fxamp diff --help`"),
        (["diff", "a.json", "b.json", "--output-format", "yaml"], "invalid choice: 'yaml'"),
    ],
)
def test_wrong_usage_leaves_with_two(argv: list[str], message: str, capsys: Capture) -> None:
    assert main(argv) == 2
    assert message in error_of(capsys)


def test_rules_of_one_op_are_printed(capsys: Capture) -> None:
    assert main(["rules", "softmax"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["name", "softmax"] in lines


def test_rules_of_all_ops_are_printed(capsys: Capture) -> None:
    assert main(["rules", "--output-format", "json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert {"linear", "softmax", "add"} <= set(names)
    assert names == sorted(names)


def test_unknown_op_names_the_nearest(capsys: Capture) -> None:
    assert main(["rules", "softmx"]) == 2
    assert "no rule for the op 'softmx'; the nearest name is 'softmax'" in error_of(capsys)


def test_demo_is_given_a_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []
    demo = SimpleNamespace(run=lambda **settings: calls.append(settings))
    monkeypatch.setitem(sys.modules, "fxamp.demo", demo)
    assert main(["demo", "-o", "out.md"]) == 0
    assert main(["demo"]) == 0
    assert calls == [{"output": Path("out.md").absolute()}, {"output": None}]


@pytest.mark.parametrize(("option", "shown"), [("--version", "fxamp "), ("--help", "usage: fxamp")])
def test_version_and_help_leave_with_zero(option: str, shown: str, capsys: Capture) -> None:
    assert main([option]) == 0
    assert capsys.readouterr().out.startswith(shown)


def test_module_runs_as_the_command(here: Path) -> None:
    command = [sys.executable, "-m", "fxamp", "diff", str(here / "a.json"), str(here / "b.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "! fc/linear#0  colour: bfloat16 -> float32" in done.stdout
    assert done.stderr == ""


def without_a_reader(*words: str) -> int:
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    return main(words)


def test_reader_that_leaves_early_is_no_error() -> None:
    assert in_another_process(printed, without_a_reader, "rules") == (0, "", "")


def test_what_a_target_prints_does_not_mix_with_the_report(
    here: Path, capsys: Capture, planned: list[tuple[object, ...]]
) -> None:
    (here / "net.py").write_text("print('hello')\ndef build():\n    print('building')\n    return 'model'\n")
    assert main(["report", "net.py:build", "--output-format", "json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["plan"] == json.loads(fxamp.plan_of(converted()).to_json())
    assert captured.err == "hello\nbuilding\n"


def test_an_error_cannot_write_to_the_terminal(here: Path, capsys: Capture) -> None:
    (here / "net.py").write_text("def build(): raise ValueError('\\x1b[2Jgone \\u202e ##[error]x \\ud800')\n")
    assert main(["report", "net.py:build"]) == 2
    assert r"\x1b[2Jgone \u202e # #[error]x \ud800" in error_of(capsys)


@pytest.mark.parametrize("form", ["text", "markdown", "json"])
@pytest.mark.parametrize("verb", [["report", "odd.json"], ["diff", "a.json", "odd.json"]])
def test_names_in_a_plan_are_shown_and_not_obeyed(here: Path, capsys: Capture, verb: list[str], form: str) -> None:
    name = "::error::\x1b[2J\n::set-output x::<script>\x9b\u202e##vso[task]\ud800"
    odd = dataclasses.replace(LINEAR, key=f"{name}/linear#0", module_path=name, reason=name, source=name)
    dataclasses.replace(PLAN, decisions=(LINEAR, odd), notes=(name,)).save("odd.json")
    main([*verb, "--output-format", form])
    out = capsys.readouterr().out
    assert all(c.isprintable() for c in out.replace("\n", ""))
    assert not [line for line in out.splitlines() if line.lstrip().startswith("::")]
    assert "##vso[" not in out
    assert "<script>" not in out or form != "markdown"
    if form == "json":
        data = json.loads(out)
        shown = data["plan"]["notes"][0] if verb[0] == "report" else data["changes"][0]["key"].rpartition("/")[0]
        assert shown == name


NET = """
import torch

def make():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1)), (torch.ones(2, 4),)
"""


def test_one_target_is_compared_under_two_policies(here: Path, capsys: Capture) -> None:
    (here / "net.py").write_text(f"print('hello')\n{NET}\n")
    assert main(["diff", "net.py:make", "--policy", "O1,dtype=bf16,modules.0=fp32", "--policy", "O1,dtype=bf16"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "hello\n"
    assert captured.out.startswith("--- O1,dtype=bf16,device=cpu,modules.0=fp32  dynamo")
    assert "! 0/linear#0  casts: none -> float32 to bfloat16 (3)" in captured.out
    assert main(["diff", "net.py:make", "net.py:make", "--policy", "O1"]) == 0
    capsys.readouterr()
    assert main(["report", "net.py:make", "--policy", "O1,dtype=bf16", "--save-plan", "net.json"]) == 0
    assert main(["diff", "net.json", "net.py:make", "--policy", "O1,dtype=bf16"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["net.py:make", "--policy", "O1"], "or give one TARGET and two --policy"),
        (["a.json", "--policy", "O1", "--policy", "O2"], "or give one TARGET and two --policy"),
        (["a.json", "b.json", "--policy", "O1"], "'a.json' is a saved plan and has its own policy"),
        (["net.py:make", "b.json", "--policy", "O1", "--policy", "O2"], "'b.json' is a saved plan and has its own"),
        (["net.py:make", *["--policy", "O1"] * 3], "give --policy at most twice"),
        (["net.py:make", "--policy", "O1", "--policy", "O9"], "unknown level 'O9'"),
    ],
)
def test_policies_that_belong_to_nothing_are_refused(here: Path, capsys: Capture, words: list[str], said: str) -> None:
    assert main(["diff", *words]) == 2
    assert said in error_of(capsys)


def test_a_difference_is_coloured_on_terminals_alone(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["diff", "a.json", "b.json"])
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(["diff", "a.json", "b.json"])
    coloured = capsys.readouterr().out
    assert "\x1b[33m! fc/linear#0  colour: bfloat16 -> float32\x1b[0m\n" in coloured
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    main(["diff", "a.json", "b.json"])
    assert capsys.readouterr().out == plain


def test_a_difference_is_written_as_a_page(here: Path, capsys: Capture) -> None:
    assert main(["diff", "a.json", "b.json", "--output-format", "html"]) == 1
    page = capsys.readouterr().out
    assert page.startswith("<!doctype html>")
    assert "<td>fc/linear#0</td><td>colour</td><td>bfloat16</td><td>float32</td>" in page


def test_what_a_model_prints_by_other_ways_does_not_mix_with_the_report(here: Path) -> None:
    prints = "import os, subprocess\nos.write(1, b'raw')\nsubprocess.run(['echo', 'child'])\n"
    (here / "net.py").write_text(f"{prints}{NET}")
    _, out, err = in_another_process(printed, main, ["report", "net.py:make", "--output-format=json"])
    assert json.loads(out)["totals"]["nodes"] == 2
    assert "raw" in err
    assert "child" in err


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("3", "not int"),
        ("None", "not NoneType"),
        ("lambda x: x", "not function"),
        ("torch.nn.Linear", "not the class Linear: make an instance"),
        ("torch.nn.Linear(4, 4), torch.ones(2, 5)", "Linear rejects the example inputs"),
        ("torch.nn.Linear(4, 4), 3, 4, 5", "returned 4 things"),
    ],
)
@pytest.mark.parametrize("verb", ["report", "check", "diff"])
def test_what_is_no_model_is_named(here: Path, capsys: Capture, verb: str, made: str, said: str) -> None:
    (here / "net.py").write_text(f"import torch\ndef make(): return {made}")
    words = {"check": ["--here", "--budget=casts=1"], "diff": ["--policy=O1", "--policy=O2"]}.get(verb, [])
    assert main([verb, "net.py:make", *words]) == 2
    assert said in error_of(capsys)
