"""Every command of README and guides runs in an empty folder, with the files that its page shows or links before it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from fxamp.cli.main import main
from tests.support.processes import in_another_process, printed

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDES = sorted(ROOT.glob(".github/docs/*.md"))
PAGES = [p for p in (README, *GUIDES) if re.search("^```sh$", p.read_text(encoding="utf-8"), re.MULTILINE)]
# A block of a file or of commands, a command within a sentence, a link to the block of another page.
PARTS = re.compile(
    r"^```(?P<language>\w+)\n(?P<block>.*?)^```$|`(?P<command>fxamp\s[^`]*\w\.py:\w[^`]*)`|"
    r"\[(?P<file>\w+\.\w+)\]\((?P<page>[\w./]+\.md)#[\w-]+\)",
    re.DOTALL | re.MULTILINE,
)
ELSEWHERE = {  # what is not run here, and what runs it
    'python -m pip install -c constraints.txt -e ".[test]" && python -m pytest': "a stage of .ci/run",
    "python -m pip install -c constraints.txt . && fxamp demo": "a stage of .ci/run installs; test_demo.py",
    "python -m pip install git+https://github.com/fxamp/fxamp": "nothing: it needs the network",
    "torchrun --standalone --nproc-per-node 2 train.py": "test_readme.py, which compares the losses",
}
FINDS = ("python -m pytest --update-precision-plans",)  # exit status 1: the plan was missing
ENVIRONMENT = {
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": str(ROOT),
    "GITHUB_STEP_SUMMARY": "summary.md",
}


def files(text: str) -> dict[str, str]:
    """Return the files that a page shows: blocks that begin with their name in a comment."""
    return {
        name: block
        for _, name, block in re.findall(r"^```(\w+)\n# (\w+\.\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    }


def parts(page: Path) -> Iterator[tuple[str | None, str]]:
    """Return the files of a page by name, and its commands by None, in the order in which it shows them."""
    for part in PARTS.finditer(page.read_text(encoding="utf-8")):
        if part["file"] is not None:
            yield part["file"], files((page.parent / part["page"]).read_text(encoding="utf-8"))[part["file"]]
        elif part["command"] is not None:
            yield None, " ".join(part["command"].split())
        elif part["language"] == "sh":
            yield from ((None, line.partition("  #")[0].strip()) for line in part["block"].splitlines())
        elif part["language"] == "yaml":
            yield from (
                (None, line.partition("  #")[0]) for line in re.findall(r"^- run: (.*)$", part["block"], re.MULTILINE)
            )
        else:
            yield from files(part[0]).items()


def run(line: str) -> tuple[int, str, str]:
    """Return exit status and output of a command."""
    verb, *words = shlex.split(os.path.expandvars(line))
    if verb == "fxamp":  # in a process that has imported torch: half of the time of the commands
        return cast("tuple[int, str, str]", in_another_process(printed, main, words))
    done = subprocess.run([verb, *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.stem, marks=() if page == README else pytest.mark.slow) for page in PAGES]
)
def test_the_commands_of_a_page_run_in_an_empty_folder(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable, value in ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    for name, text in parts(page):
        if name is not None:
            there = Path(name)
            assert not there.exists() or there.read_text(encoding="utf-8") == text, f"{page.name}: another {name}"
            there.write_text(text, encoding="utf-8")
        elif text not in ELSEWHERE:
            status, out, err = run(text)
            assert status == (text in FINDS), f"{page.name}: {text}\n{out}{err}"
            written = re.findall(r"(?:-o |--save-plan |--plan |--census |--output [\w-]+=)([\w.$]+)", text)
            assert all(Path(os.path.expandvars(file)).stat().st_size for file in written)
            assert written or out, f"{page.name}: {text} says nothing"


def test_what_is_run_elsewhere_is_a_command_of_a_page() -> None:
    assert set(ELSEWHERE) <= {text for page in PAGES for name, text in parts(page) if name is None}
