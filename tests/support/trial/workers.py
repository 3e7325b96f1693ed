"""Run many cases in a few processes, each of which may die, or hang, without ending the run; keep what they found.

A record is a file of JSON lines, one for each case. A run goes on where the record ends.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 20  # how much longer than its processor time a case may take, where other programs run too
CASES = 300  # that a process runs before another takes its place: torch's caches grow
Found = dict[str, Any]  # what a case came to, as plain data


def code() -> str:
    """Return a short name of the code that is tried: it is another one after every change of `fxamp` or `passes`."""
    files = sorted(p for part in ("fxamp", "passes") for p in ROOT.joinpath(part).rglob("*.py"))
    return hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()[:10]


class Record:
    """The cases that were run, on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.found: dict[str, Found] = {entry["case"]: entry for entry in map(json.loads, lines)}

    def forget(self, which: str | None, failed: Callable[[Found], bool]) -> None:
        """Forget the cases that are to be run anew: those that "failed", or those that are "outdated"."""
        now = code()
        if which == "outdated":
            self.found = {case: e for case, e in self.found.items() if e["code"] == now}
        if which == "failed":
            self.found = {case: e for case, e in self.found.items() if not failed(e)}

    def add(self, entry: Found) -> None:
        """Keep what a case came to."""
        self.found[entry["case"]] = entry
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def run_all(
    cases: Iterable[str], work: Callable[[str], Found], record: Record, *, processes: int = 2, seconds: float = 120,
    until: float | None = None, name: str = "cases",
) -> None:  # fmt: skip
    """Run every case that the record does not have, and record it; `work` gives what it found, without the case.

    A case that ends its process, or takes longer than `seconds` of processor time, or PATIENCE times as long by the
    clock, is recorded as `{"died": why}`. Ends early at `until`, a time as `time.monotonic` gives it.
    """
    waiting = [case for case in cases if case not in record.found]
    if not waiting:
        return
    version = code()
    for case, found in tqdm(_results(waiting, work, processes, seconds, until), total=len(waiting), desc=name):
        record.add({"case": case, "code": version, **found})


def _results(
    cases: list[str], work: Callable[[str], Found], processes: int, seconds: float, until: float | None
) -> Iterator[tuple[str, Found]]:
    context = multiprocessing.get_context("fork")  # torch and the models are loaded once, here
    waiting, workers = list(reversed(cases)), dict[Connection, _Worker]()
    while waiting or workers:
        late = until is not None and time.monotonic() > until
        while waiting and not late and len(workers) < processes:
            worker = _Worker(context, work, seconds)
            worker.send(waiting.pop())
            workers[worker.connection] = worker
        if not workers:
            return
        ready = wait(list(workers), timeout=1)
        for connection, worker in list(workers.items()):
            found: Found | None = None
            if connection in ready:
                found = worker.received()
            elif time.monotonic() - worker.since > PATIENCE * seconds:
                found = {"died": f"took longer than {PATIENCE * seconds:.0f} s by the clock"}
            if found is None:
                continue
            yield worker.case, found
            if "died" in found or late or not waiting or worker.count >= CASES:
                worker.end()
                del workers[connection]
            else:
                worker.send(waiting.pop())


class _Worker:
    """A process that runs one case after another."""

    def __init__(self, context: Any, work: Callable[[str], Found], seconds: float) -> None:
        self.connection, other = context.Pipe()
        self.seconds = seconds
        self.process = context.Process(target=_serve, args=(other, work, seconds), daemon=True)
        self.process.start()
        other.close()
        self.case, self.since, self.count = "", 0.0, 0

    def send(self, case: str) -> None:
        """Give it a case to run."""
        self.case, self.since, self.count = case, time.monotonic(), self.count + 1
        self.connection.send(case)

    def received(self) -> Found:
        """Return what it found, or that it died."""
        try:
            found: Found = self.connection.recv()
        except EOFError:
            self.process.join()
            if self.process.exitcode == -signal.SIGPROF:
                return {"died": f"took longer than {self.seconds:.0f} s"}
            return {"died": f"its process ended with {self.process.exitcode}"}
        return found

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection, work: Callable[[str], Found], seconds: float) -> None:
    torch.set_num_threads(1)  # how a sum is shared out decides how it rounds
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, seconds)  # which ends the process
        try:
            found = work(case)
        except Exception as e:
            found = {"harness": f"{type(e).__name__}: {e}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send({**found, "seconds": round(time.process_time() - start, 2)})
