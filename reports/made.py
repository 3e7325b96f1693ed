"""Where a report was made, which stands below its title: its commit, the machine, and what else the machine did."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch

from passes.ops.facts import this_machine

ROOT = Path(__file__).parents[1]
BUSY = 0.5  # load per core above which times are those of a busy machine


class Made(TypedDict):
    """What a report says of its own making."""

    commit: str
    machine: str
    torch: str
    cores: int
    threads: int
    load: float | None


def made(device: str = "cpu") -> Made:
    """Return the commit ("+" behind it: with changes), the machine, and its load before anything is measured."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "commit": _commit(), "machine": str(this_machine(device)).partition(",")[0], "torch": str(torch.__version__),
        "cores": os.cpu_count() or 1, "threads": torch.get_num_threads(), "load": load and round(load, 1),
    }  # fmt: skip


def sentence(found: Made) -> str:
    """Write one sentence for the head of a report; a busy machine is named, since its clock tells little.

    Example:
        >>> sentence({"commit": "4a11625", "machine": "cpu AVX512", "torch": "2.13.0", "cores": 2, "threads": 1,
        ...           "load": 0.1})
        'Made at commit 4a11625, on cpu AVX512 with torch 2.13.0, 1 of 2 cores, at a load of 0.1.'
    """
    load = "an unknown load" if found["load"] is None else f"a load of {found['load']:g}"
    busy = found["load"] is not None and found["load"] > BUSY * found["cores"]
    return (
        f"Made at commit {found['commit']}, on {found['machine']} with torch {found['torch']}, {found['threads']} of "
        f"{found['cores']} cores, at {load}{': the machine was busy, and times by the clock are too long' * busy}."
    )


def headed(text: str, data: Mapping[str, Any]) -> str:
    """Return a report with a sentence on its making below its title, where the data have it."""
    title, _, rest = text.partition("\n\n")
    return f"{title}\n\n{sentence(data['made'])}\n\n{rest}" if "made" in data else text


def write(folder: Path, name: str, data: Mapping[str, Any], text: str) -> str:
    """Write a report as `name.json` and `name.md`; return the latter."""
    text = headed(text, data)
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath(f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    folder.joinpath(f"{name}.md").write_text(text, encoding="utf-8")
    return text


def _commit() -> str:
    """Return the short hash of the commit that is checked out."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return (git("rev-parse", "--short=7", "HEAD") or "unknown") + "+" * bool(git("status", "--porcelain"))
