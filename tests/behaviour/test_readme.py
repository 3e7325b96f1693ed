"""The README and the guides: examples run, commands and printed output are real, links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fxamp
from fxamp.cli.main import VERBS, main
from fxamp.cli.output import outputs_of
from fxamp.cli.usage import UsageError, parser_of

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDES = ROOT / ".github" / "docs"
PAGES = [README, *sorted(ROOT.glob(".github/**/*.md"))]
OTHERS = ("trainers", "serving")  # which run other libraries, with warnings of their own
MOST_LINES = 200
SLOW = ("overflow", "error", "trainers", "serving")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run_examples(page: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the examples of a page one after the other, and return the names that they leave."""
    module = types.ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)  # Dynamo looks up the globals of a function there
    snippets = [b for b in blocks(text_of(page), "python") if not re.match(r"# \w+\.py\n", b)]  # no files of commands
    for number, block in enumerate(snippets):
        with warnings.catch_warnings():
            if page.stem in OTHERS:
                warnings.simplefilter("ignore")
            exec(compile(block, f"{page.name}, example {number}", "exec"), vars(module))
    return vars(module)


@pytest.mark.parametrize(
    "page",
    [
        # What they call is tested in tests/fxamp, by diagnostic, and integrations, on models that take less long.
        pytest.param(page, id=page.stem, marks=pytest.mark.slow if page.stem in SLOW else ())
        for page in (README, *sorted(GUIDES.glob("*.md")))
    ],
)
def test_the_examples_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_examples(page, monkeypatch)
    for name in {"bert", "digits", "compiled"} & names.keys():  # which run in 16 bits now
        assert "bfloat16" in {d.colour for d in fxamp.plan_of(names[name]).decisions}, name
    if page.stem == "trainers":  # the base of LoRA is low already
        assert f"# {names['plugin'].views['model']} ()" in text_of(page)
        base = [d for d in fxamp.plan_of(names["compiled"]).decisions if d.module_path == "base"]
        assert [(d.op, d.colour) for d in base] == [("linear", "bfloat16")]


@pytest.mark.slow
def test_the_script_for_many_ranks_runs_by_the_line_that_is_printed(tmp_path: Path) -> None:
    text = text_of(GUIDES / "ranks.md")
    launcher, *line = blocks(text, "sh")[0].split()
    assert launcher == "torchrun"
    (tmp_path / "train.py").write_text(blocks(text, "python")[0], encoding="utf-8")
    path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *line]
    run = subprocess.run(command, cwd=tmp_path, env={**os.environ, **path}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    losses = re.findall(r"tensor\(([\d.]+)\)", run.stdout)
    assert len(losses) == 2
    assert len(set(losses)) == 1


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len(text_of(README).splitlines()) <= MOST_LINES


def test_every_package_has_its_line_in_the_guide_for_contributors() -> None:
    described = re.findall(
        r"^- `((?:fxamp|passes)/\w+/)` \w", text_of(ROOT / ".github" / "CONTRIBUTING.md"), re.MULTILINE
    )
    folders = [p.parent for package in ("fxamp", "passes") for p in (ROOT / package).glob("*/__init__.py")]
    assert sorted(described) == sorted(f"{folder.relative_to(ROOT).as_posix()}/" for folder in folders)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    pattern = re.search(r"grep -m 1 '(.*)' README\.md", text_of(ROOT / ".ci" / "run"))
    assert pattern is not None
    assert re.findall(f"{pattern[1]}.*$", text_of(README), re.MULTILINE) == [
        'python -m pip install -c constraints.txt -e ".[test]" && python -m pytest'
    ]


def test_extras_in_commands_are_there() -> None:
    project = text_of(ROOT / "pyproject.toml").partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", project, re.MULTILINE))
    named = {extra for page in PAGES for extra in re.findall(r'install.*"(?:\.|fxamp)\[(\w+)\]"', text_of(page))}
    assert {"lightning", "test"} <= named <= extras


def test_no_page_installs_a_release_that_is_on_no_index() -> None:
    assert "There is no release on a package index yet" in text_of(README)
    assert [page.name for page in PAGES if re.search(r'pip install "?fxamp', text_of(page))] == []


def test_every_verb_has_its_function_beside_it() -> None:
    rows = re.findall(r"^\| (`fxamp \w+`.*) \| (.*) \|$", text_of(GUIDES / "checking.md"), re.MULTILINE)
    assert {verb for row, _ in rows for verb in re.findall(r"`fxamp (\w+)", row)} == set(VERBS)
    named = [name for _, row in rows for name in re.findall(r"`fxamp\.(\w+)`", row)]
    assert len(named) == 8
    assert all(callable(getattr(fxamp, name)) for name in named)


def test_files_that_are_named_are_there_and_diffs_have_been_made() -> None:
    text = text_of(ROOT / ".github" / "CONTRIBUTING.md")
    named = re.findall(r"`((?:passes|fxamp|tests|reports)/[\w/.]+)`", text)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []
    for block in blocks(text, "diff"):
        for name, lines in re.findall(r"^\+\+\+ b/(\S+)\n((?:\+.*\n)+?)(?=--- |\Z)", block, re.MULTILINE):
            assert re.sub(r"^\+", "", lines, flags=re.MULTILINE) in text_of(ROOT / name), name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_to_files(page: Path) -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page))]
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_every_report_is_linked_from_the_readme_or_a_page_that_it_links() -> None:
    pages = [README, *(README.parent / link for link in re.findall(r"\]\(([\w./]+\.md)", text_of(README)))]
    linked = {
        (page.parent / link).resolve() for page in pages for link in re.findall(r"\]\(([\w./]+\.md)", text_of(page))
    }
    assert {p.resolve() for p in ROOT.glob("reports/*.md")} <= linked


def commands() -> list[tuple[str, list[str]]]:
    """Return each command `fxamp ...` of a page, and its words."""
    found = []
    for page in PAGES:
        shown = [
            line.partition("  #")[0].strip() for block in blocks(text_of(page), "sh") for line in block.splitlines()
        ]
        shown += re.findall(r"^- run: (.*)$", text_of(page), re.MULTILINE)
        found += [(page.name, shlex.split(line)[1:]) for line in shown if line.startswith("fxamp ")]
    return found


def test_every_command_of_a_page_is_one() -> None:
    parser = parser_of(VERBS.items())
    assert len(commands()) > 25
    for page, words in commands():
        try:
            args = parser.parse_args(words)
        except UsageError as error:
            pytest.fail(f"{page}: fxamp {' '.join(words)}: {error}")
        outputs_of(args)


def test_every_message_that_has_advice_is_one_of_fxamp() -> None:
    joined = re.compile(r'"\s*\n\s*f?"')  # of a text over several lines
    sources = [p for package in ("fxamp", "passes") for p in (ROOT / package).rglob("*.py")]
    text = "".join(joined.sub("", source.read_text(encoding="utf-8")) for source in sources)
    rows = re.findall(r"^\| (`.*?`) \| .* \| .* \|$", text_of(GUIDES / "messages.md"), re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`(.*?)`", row)]
    assert len(messages) > 20
    assert [message for message in messages if message not in text] == []


def test_figures_of_the_readme_are_those_of_the_reports() -> None:
    said = re.search(r"BERT, ViT and GPT-2 cast ([\d.]+), ([\d.]+) and ([\d.]+) of the bytes", text_of(README))
    rows = json.loads(text_of(ROOT / "reports" / "casts.json"))["rows"]
    moved = {(r["model"], r["variant"]): r["counts"]["cast_bytes"] for r in rows}
    parts = [moved[m, "fxamp O2 per_step"] / moved[m, "torch.autocast"] for m in ("bert", "vit", "gpt2")]
    assert said is not None
    assert said.groups() == tuple(f"{part:.2f}" for part in parts)


def test_architectures_of_the_readme_are_counted_in_the_report() -> None:
    report = text_of(ROOT / "reports" / "exact_numerics.md")
    cells = re.search(r"^\| fxamp O1, eager +\|(.*)\|$", report, re.MULTILINE)
    assert cells is not None
    outputs, gradients, capture, code, _, _, _, failed, run = map(int, cells[1].split("|"))
    pattern = (
        r"of (\d+) architectures .*, (\d+) give its outputs and (\d+) its gradients .*\. Of the others, (\d+) differ "
        r"as they do under `torch.compile` without fxamp, and (\d+) at ops that their plans name"
    )
    readme = " ".join(text_of(README).split())
    told = re.search(pattern, readme)
    assert told is not None
    assert tuple(map(int, told.groups())) == (run - failed, outputs, gradients, capture, code)
    assert gradients + capture + code == run - failed
    drawn = [r for r in json.loads(text_of(ROOT / "reports" / "held_out.json"))["rows"] if r["front_end"] == "view"]
    more = re.search(r"Of (\d+) more, .*?, (\d+) give its outputs", readme)
    assert more is not None
    assert tuple(map(int, more.groups())) == (len(drawn), sum(r["equal"] for r in drawn))


def test_the_first_report_is_what_the_readme_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(README)
    exec(compile(blocks(text, "python")[0], "README.md, the first example", "exec"), {"__name__": "readme"})
    printed = re.sub(r"^(torch +).*$", rf"\g<1>{torch.__version__}", blocks(text, "text")[0], flags=re.MULTILINE)
    assert capsys.readouterr().out.rstrip() == printed.rstrip()


def test_the_gate_says_what_the_readme_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    net = next(block for block in blocks(text_of(GUIDES / "checking.md"), "python") if block.startswith("# net.py\n"))
    gate = text_of(README).partition("## Check decisions in CI")[2]
    # As the table of pyproject.toml says it, but in this process: a configured target has one of its own.
    told = dict(re.findall(r'^(\w+) = "(.*)"$', blocks(gate, "toml")[0], re.MULTILINE))
    check = ["check", "--here", told["target"], "--policy", told["policy"], "--plan", told["plan"]]
    Path("net.py").write_text(net, encoding="utf-8")
    assert main([*check, "--update"]) == 0
    assert main(check) == 0
    Path("net.py").write_text(net.replace("return self.down(x)", "return torch.softmax(self.down(x), -1)"))
    capsys.readouterr()
    assert main(check) == 1
    assert capsys.readouterr().out.replace("net.py:make:", "net:") == blocks(gate, "text")[0]
