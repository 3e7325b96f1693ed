"""The targets of `fxamp check`: one of the command line, or those of the user's pyproject.toml.

[tool.fxamp.targets.classifier]
target = "net.py:make"
policy = "O1,dtype=bf16"
plan = "plans/classifier.json"
budget = ["casts=+0", "low_flops=-1%"]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from passes.contract.errors import FxampError
from passes.contract.policy import nearest

from .gate import UNKNOWN, Outcome

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FIELDS: dict[str, type[Any]] = {
    "target": str, "policy": str, "plan": str, "budget": list, "device": str, "run": bool,
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """One model to check, `package.module:callable` or `path/file.py:callable`; all else as the command takes it."""

    name: str
    target: str
    policy: str | None = None
    plan: str | None = None
    budgets: tuple[str, ...] = ()
    device: str | None = None
    run: bool = False

    def arguments(self) -> list[str]:
        """Return the command line that checks only this target."""
        given = {"--policy": self.policy, "--plan": self.plan, "--device": self.device}
        words = [self.target, "--name", self.name, *["--run"] * self.run]
        words += [f"{option}={value}" for option, value in given.items() if value is not None]
        return [*words, *(f"--budget={budget}" for budget in self.budgets)]


def find_pyproject(start: Path) -> Path:
    """Return the nearest pyproject.toml, of a folder or one above it, that has targets; FxampError if none has."""
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file() and "tool.fxamp" in file.read_text(encoding="utf-8", errors="replace"):
            return file
    raise FxampError(
        "check: no TARGET was given, and no pyproject.toml here or above has [tool.fxamp.targets.NAME] with a target"
    )


def configured(file: Path, names: Sequence[str] = ()) -> list[Target]:
    """Read the targets of a pyproject.toml, all or some by name; FxampError if one is not as it should be."""
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as e:
        raise FxampError(f"{file.name} cannot be read: {e}") from e
    tables: dict[str, Any] = data.get("tool", {}).get("fxamp", {}).get("targets", {})
    if not tables:
        raise FxampError(f"{file.name} has no [tool.fxamp.targets.NAME]")
    for name in names:
        if name not in tables:
            raise FxampError(f"{file.name} has no target {name!r}{nearest(name, list(tables))}")
    return [_target(file, name, table) for name, table in tables.items() if not names or name in names]


def _target(file: Path, name: str, table: Any) -> Target:
    where = f"{file.name}: [tool.fxamp.targets.{name}]"
    if not isinstance(table, dict) or "target" not in table:
        raise FxampError(f"{where} needs a target, package.module:callable or path/file.py:callable")
    for key, value in table.items():
        if key not in _FIELDS:
            raise FxampError(f"{where}: there is no setting {key!r}{nearest(key, list(_FIELDS))}")
        if not isinstance(value, _FIELDS[key]) or (key == "budget" and not all(isinstance(v, str) for v in value)):
            kind = {list: "a list of strings", bool: "true or false"}.get(_FIELDS[key], "a string")
            raise FxampError(f"{where}: {key} must be {kind}")
    budgets = tuple(table.get("budget", ()))
    if "plan" not in table and not budgets and not table.get("run"):
        raise FxampError(f"{where} has neither a plan nor a budget, and no run = true, so there is nothing to check")
    return Target(name, budgets=budgets, **{key: value for key, value in table.items() if key != "budget"})


def run_alone(target: Target, folder: Path, update: bool) -> Outcome:
    """Check one target, its paths relative to `folder`, in its own process: two files of one name would clash."""
    command = [sys.executable, "-m", "fxamp", "check", *target.arguments(), *(["--update"] if update else [])]
    with tempfile.TemporaryDirectory() as own:  # a file, since a model may print at any time, even at exit
        file = Path(own, "outcome.json")
        done = subprocess.run(
            [*command, "--output-format=json", f"--output={file}"],
            cwd=folder, capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
        text = file.read_text(encoding="utf-8") if file.exists() else "[]"
    try:
        return msgspec.convert(json.loads(text)[0], Outcome)
    except (ValueError, LookupError, msgspec.ValidationError):
        said = done.stderr.strip().splitlines() or [f"its process ended with exit status {done.returncode}"]
        return Outcome(target.name, UNKNOWN, f"{target.name}: {said[-1].removeprefix('fxamp: error: ')}")
