"""The targets of `fxamp check`: those of the command line, or those of the user's pyproject.toml.

[tool.fxamp.targets.classifier]
target = "net.py:make"
policy = "O1,dtype=bf16"
plan = "plans/classifier.json"
budget = ["casts=+0", "low_flops=-1%"]
census = "plans/classifier.census.json"
"""

from __future__ import annotations

import fnmatch
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .usage import TARGET, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FIELDS: dict[str, type[Any]] = {
    "target": str, "policy": str, "plan": str, "budget": list, "device": str, "run": bool, "census": str,
    "strict": bool,
}  # fmt: skip
TABLE = "[tool.fxamp.targets.NAME]"


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
    census: str | None = None
    strict: bool = False

    def arguments(self) -> list[str]:
        """Return the command line that checks only this target."""
        given = {"--policy": self.policy, "--plan": self.plan, "--device": self.device, "--census": self.census}
        words = [self.target, "--name", self.name, *["--run"] * self.run, *["--strict"] * self.strict]
        words += [f"{option}={value}" for option, value in given.items() if value is not None]
        return [*words, *(f"--budget={budget}" for budget in self.budgets)]

    def compares(self) -> bool:
        """Say whether there is anything that it is compared with."""
        return bool(self.plan or self.budgets or self.run or self.census)


def find_pyproject(start: Path) -> Path:
    """Return the nearest pyproject.toml, of a folder or one above it, that has targets; UsageError if none has."""
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        named = file.is_file() and "fxamp" in file.read_text(encoding="utf-8", errors="replace")
        if named and _settings(_data(file), file.name):
            return file
    raise UsageError(
        f"check: no TARGET was given, and no pyproject.toml here or above has {TABLE} with a target; `fxamp init "
        "TARGET` writes one"
    )


def parsed(text: str) -> dict[str, Any]:
    """Return what a text in TOML says.

    Raises:
        ValueError: It is not TOML.
    """
    return tomllib.loads(text)


def _data(file: Path) -> dict[str, Any]:
    try:
        return parsed(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as e:
        raise UsageError(f"{file.name} cannot be read: {e}") from e


def _settings(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the table [tool.fxamp], empty where there is none."""
    tool = _table(data.get("tool", {}), f"{name}: tool")
    return _table(tool.get("fxamp", {}), f"{name}: tool.fxamp")


def _table(value: Any, where: str) -> dict[str, Any]:
    """Return a table; UsageError if it is something else."""
    if isinstance(value, list):
        raise UsageError(f"{where} is a list of tables, written [[...]]: give each a name, as {TABLE}")
    if not isinstance(value, dict):
        raise UsageError(f"{where} is {value!r:.40}, and should be a table, such as {TABLE}")
    return value


def tables_of(file: Path) -> dict[str, Any]:
    """Return the tables of the targets of a pyproject.toml, by name; none where there are none.

    Raises:
        UsageError: The file cannot be read, or has another setting of fxamp's.
    """
    settings = _settings(_data(file), file.name)
    for key in settings:
        if key != "targets":
            raise UsageError(f"{file.name}: [tool.fxamp] has no setting {key!r}{_nearest(key, ['targets'])}")
    return _table(settings.get("targets", {}), f"{file.name}: tool.fxamp.targets")


def configured(file: Path, names: Sequence[str] = ()) -> list[Target]:
    """Read the targets of a pyproject.toml, all, or some by name or by a pattern such as "vit*".

    Raises:
        UsageError: One is not as it should be, or a name matches none.
    """
    tables = tables_of(file)
    if not tables:
        raise UsageError(f"{file.name} has no {TABLE}")
    for name in names:
        if not fnmatch.filter(tables, name):
            near = _nearest(name, tables) or f"; it has {', '.join(tables)}"
            raise UsageError(f"{file.name} has no target {name!r}{near}")
    targets = [_target(file, name, table) for name, table in tables.items()]
    _require_files_apart(file, targets)
    return [target for target in targets if not names or any(fnmatch.fnmatchcase(target.name, each) for each in names)]


def _require_files_apart(file: Path, targets: Sequence[Target]) -> None:
    """Raise UsageError where two settings name one file: with --update one would replace what the other wrote."""
    users: dict[str, str] = {}
    for target in targets:
        for key, path in (("plan", target.plan), ("census", target.census)):
            if path is None:
                continue
            user = f"[tool.fxamp.targets.{target.name}] {key}"
            other = users.setdefault(os.path.realpath(file.parent / path), user)
            if other != user:
                raise UsageError(f"{file.name}: {other} and {user} are one file, {path}: give each a file of its own")


def _target(file: Path, name: str, table: Any) -> Target:
    where = f"{file.name}: [tool.fxamp.targets.{name}]"
    if not isinstance(table, dict) or "target" not in table:
        raise UsageError(f"{where} needs a target, {TARGET}")
    for key, value in table.items():
        if key not in _FIELDS:
            raise UsageError(f"{where}: there is no setting {key!r}{_nearest(key, _FIELDS)}")
        if not isinstance(value, _FIELDS[key]) or (key == "budget" and not all(isinstance(v, str) for v in value)):
            kind = {list: "a list of strings", bool: "true or false"}.get(_FIELDS[key], "a string")
            raise UsageError(f"{where}: {key} must be {kind}")
    found = Target(
        name, budgets=tuple(table.get("budget", ())), **{key: value for key, value in table.items() if key != "budget"}
    )
    if not found.compares():
        raise UsageError(f"{where} has neither a plan, a budget nor a census, and no run = true: nothing to check")
    return found


def _nearest(name: str, candidates: Iterable[str]) -> str:
    """Point to the name that was meant; torch is imported for it, which an error may take."""
    from passes.contract.policy import nearest

    return nearest(name, candidates)
