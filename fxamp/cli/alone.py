"""Each target is checked in a process of its own: files of one name would clash, and a target may end its process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .targets import Target


@dataclass
class Processes:
    """The processes of a check.

    Attributes:
        folder: Paths of the targets are relative to it.
        options: Options of the command that hold for each target.
        jobs: How many run at once.
    """

    folder: Path
    options: Sequence[str]
    jobs: int
    _running: list[subprocess.Popen[str]] = field(default_factory=list)

    def check(self, targets: Sequence[Target]) -> list[dict[str, Any] | str]:
        """Return the outcome of each target as data, or why there is none.

        What a single target prints is shown on standard error, that of several is not.
        """
        pool = ThreadPoolExecutor(self.jobs)
        try:
            return list(pool.map(lambda target: self._one(target, aloud=len(targets) == 1), targets))
        finally:  # after Ctrl-C nothing of it goes on
            pool.shutdown(wait=False, cancel_futures=True)
            for process in self._running:
                if process.poll() is None:
                    process.terminate()

    def _one(self, target: Target, *, aloud: bool) -> dict[str, Any] | str:
        command = [sys.executable, "-m", "fxamp", "check", "--here", "--quiet", *target.arguments(), *self.options]
        with tempfile.TemporaryDirectory() as own:  # a file, since a model may print at any time, even at exit
            file = Path(own, "outcome.json")
            shown = sys.stderr if aloud and _has_descriptor(sys.stderr) else subprocess.PIPE
            process = subprocess.Popen(
                [*command, f"--output=json={file}"], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=shown,
                stderr=shown, text=True, errors="replace",
            )  # fmt: skip
            self._running.append(process)
            _, said = process.communicate()
            try:
                found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))[0]
                return found
            except (OSError, ValueError, LookupError, TypeError):
                last = f"; it said last: {said.strip().splitlines()[-1]}" if said and said.strip() else ""
                return f"{target.name}: its process ended {_how(process.returncode)} before it had an answer{last}"


def _has_descriptor(stream: Any) -> bool:
    try:
        return bool(stream.fileno() >= 0)
    except (AttributeError, OSError, ValueError):
        return False


def _how(status: int) -> str:
    if status >= 0:
        return f"with exit status {status}"
    try:
        return f"by {signal.Signals(-status).name}"
    except ValueError:
        return f"by signal {-status}"
