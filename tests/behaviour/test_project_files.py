"""The files that a host of repositories reads: a workflow over what is claimed, issue forms, hooks."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.shards import Shard

yaml: Any = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def test_the_workflow_runs_ci_for_the_versions_that_are_claimed() -> None:
    job = read(GITHUB / "workflows" / "ci.yml")["jobs"]["run"]
    runs = [(version(run["python"]), version(run["torch"])) for run in job["strategy"]["matrix"]["include"]]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    claimed = [version(v) for v in re.findall(r'"Programming Language :: Python :: (\d\.\d+)"', project)]
    least = [re.search(pattern, project) for pattern in (r'requires-python = ">=([\d.]+)"', r'"torch>=([\d.]+),')]
    assert sorted(python for python, _ in runs) == sorted(claimed)
    assert min(runs) == tuple(version(found[1]) for found in least if found)
    pinned = re.search(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert version(pinned[1]) in [torch for _, torch in runs]
    assert ".ci/run" in [step.get("run") for step in job["steps"]]


def test_every_week_the_workflow_runs_each_part_of_the_tests_that_ci_leaves_out() -> None:
    found = read(GITHUB / "workflows" / "rest.yml")
    assert found[True]["schedule"]  # YAML takes the key `on` for a boolean
    left_out = {"matrix", "trial"}
    assert found["jobs"].keys() == left_out
    tests = list(range(503))
    for marker in left_out:
        job = found["jobs"][marker]
        assert job["steps"][-1]["run"] == f"python -m pytest -m {marker} --shard ${{{{ matrix.shard }}}}"
        parts = [Shard.parse(text) for text in job["strategy"]["matrix"]["shard"]]
        assert [(part.number, part.of) for part in parts] == [(at + 1, len(parts)) for at in range(len(parts))]
        assert [test for part in parts for test in tests[part.slice(len(tests))]] == tests


def test_a_release_is_of_the_version_that_its_tag_names() -> None:
    steps = [step.get("run", "") for step in read(GITHUB / "workflows" / "release.yml")["jobs"]["publish"]["steps"]]
    (check,) = [step for step in steps if "GITHUB_REF_NAME" in step]
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    for tag, status in ((f"v{version[1]}", 0), ("v9.9.9", 1)):
        run = subprocess.run(["bash", "-c", check], cwd=ROOT, env={**os.environ, "GITHUB_REF_NAME": tag}, check=False)
        assert run.returncode == status


def test_on_macos_and_windows_the_workflow_runs_what_needs_no_compiler() -> None:
    job = read(GITHUB / "workflows" / "ci.yml")["jobs"]["eager"]
    assert job["strategy"]["matrix"]["os"] == ["macos-latest", "windows-latest"]
    commands = " ".join(step.get("run", "") for step in job["steps"])
    assert "fxamp demo" in commands
    assert ".ci/installed.py" in commands
    assert "pytest" not in commands  # tests compile with Inductor
    conversions = re.findall(r"fxamp\.(?:convert|compile)\(.*\)", (ROOT / ".ci" / "installed.py").read_text())
    assert conversions == ['fxamp.convert(model, (x,), backend="eager")']


@pytest.mark.parametrize("form", sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda p: p.stem)
def test_an_issue_form_asks_questions_with_names_of_their_own(form: Path) -> None:
    found = read(form)
    assert {"name", "description", "body"} <= found.keys()
    fields = [field for field in found["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)


def test_hooks_run_tools_that_the_dev_extra_brings() -> None:
    hooks = [hook for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert [hook["id"] for hook in hooks] == ["ruff", "ruff-format", "mypy"]
    extra = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("\ndev = [")[2].partition("\n]")[0]
    for hook in hooks:
        tool = re.match(r"python -m (\w+)", hook["entry"])
        assert tool is not None
        assert f'"{tool[1]}>=' in extra
