"""`fxamp init TARGET`: write the table of a target into pyproject.toml, for `fxamp check`."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

from .output import DONE, write, write_file
from .targets import parsed, tables_of
from .usage import POLICY, TARGET, UsageError

SUMMARY = "Write the table of a target into pyproject.toml, for `fxamp check`."
FORMATS = ("text",)
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("target", metavar="TARGET", help=TARGET)
    parser.add_argument("--name", help="the name of the target; by default that of its file or module")
    parser.add_argument("--policy", help=POLICY)
    parser.add_argument("--plan", metavar="FILE", help="where the plan will be; NAME.plan.json by default")
    parser.add_argument("--census", metavar="FILE", help="where the census of a step will be; none by default")


def run(args: argparse.Namespace) -> int:
    """Write the table; nothing of the target is imported."""
    where, colon, function = args.target.rpartition(":")
    if not (where and colon and function):
        raise UsageError(f"{args.target!r} is not a target; TARGET is {TARGET}")
    if where.endswith(".py") and not Path(where).is_file():
        raise UsageError(f"there is no file {where!r} here: nothing was written")
    name = args.name or Path(where).stem.rpartition(".")[2]
    file = next((f / "pyproject.toml" for f in (Path.cwd(), *Path.cwd().parents) if (f / "pyproject.toml").is_file()),
                Path.cwd() / "pyproject.toml")  # fmt: skip
    if file.exists() and name in tables_of(file):
        raise UsageError(f"{file.name} has a target {name!r} already: change its table, or give another --name")
    text = file.read_bytes().decode() if file.exists() else ""  # with its own ends of lines
    # Paths of a table are relative to its file.
    target = f"{_beside(file, where)}:{function}" if where.endswith(".py") else args.target
    settings = {"target": target, "policy": args.policy or "O1,dtype=bf16"}
    settings["plan"] = _beside(file, args.plan or f"{name}.plan.json")
    if args.census:
        settings["census"] = _beside(file, args.census)
    key = name if _BARE.fullmatch(name) else json.dumps(name)
    lines = [f"[tool.fxamp.targets.{key}]", *(f"{k} = {json.dumps(v)}" for k, v in settings.items())]
    space = "" if not text else "\n" if text.endswith("\n") else "\n\n"
    added = (space + "\n".join(lines) + "\n").replace("\n", "\r\n" if "\r\n" in text else "\n")
    try:
        parsed(text + added)
    except ValueError as error:
        inside = ", ".join(f"{k} = {json.dumps(v)}" for k, v in settings.items())
        raise UsageError(
            f"{file.name} has [tool.fxamp] or its targets in braces or by dotted keys, which no table can follow: "
            f"nothing was written; add {key} = {{{inside}}} to its targets, or delete them if they are empty"
        ) from error
    write_file(file, text + added)
    write(args, text=lambda: f"wrote [tool.fxamp.targets.{key}] to {file.name}; next: fxamp check --update")
    return DONE


def _beside(file: Path, path: str) -> str:
    return Path(os.path.relpath(path, file.parent)).as_posix()
