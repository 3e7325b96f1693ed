"""Measured costs on disk: nanoseconds of every call that was ever timed on this machine.

One JSON file for each device, number of threads and torch version, in the user's cache directory. A lock
beside it is held while costs are added. Calls can be timed again, so a file that cannot be read or written only costs
a warning.
"""

from __future__ import annotations

import hashlib
import json
import platform
import reprlib
import warnings
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from platformdirs import user_cache_path

from passes.contract.plan_format import write_text

FORMAT_VERSION = 1
LONGEST = 10**12  # nanoseconds; no op takes a quarter of an hour
PATIENCE = 30.0  # seconds to wait for other writers


def machine(device: str) -> str:
    """Return all that a time depends on besides the call: device, threads, torch and the precision of FP32."""
    if device != "cpu":
        where = str(getattr(torch, device).get_device_name())
    else:
        where = f"{_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    backend: Any = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    # Not `torch.get_float32_matmul_precision`, which raises where a program has set this one.
    precision = backend.matmul.fp32_precision
    return f"{device}: {where}; torch {torch.__version__}; float32 matmul precision {precision}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def path(device: str) -> Path:
    """Return the file of this machine."""
    digest = hashlib.sha256(machine(device).encode()).hexdigest()[:16]
    return user_cache_path("fxamp", appauthor=False) / f"costs-{device}-{digest}.json"


def load(device: str) -> dict[str, int]:
    """Return the nanoseconds of each call known, by its key."""
    found, problem = _load(device)
    if problem:
        _warn(f"cannot read the measured costs in {path(device)} ({problem}): they are measured again")
    return found


def _load(device: str) -> tuple[dict[str, int], str]:
    """Return the known costs, and why they cannot be read; it does not warn, since threads share the filters."""
    try:
        found = json.loads(path(device).read_text(encoding="utf-8"))
        if found["version"] != FORMAT_VERSION or found["machine"] != machine(device):
            return {}, ""
        return {str(key): _nanoseconds(value) for key, value in found["nanoseconds"].items()}, ""
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return {}, _why(error)


def _nanoseconds(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < LONGEST:
        raise ValueError(f"{reprlib.repr(value)} is not a time in nanoseconds")
    return value


def save(device: str, nanoseconds: dict[str, int]) -> None:
    """Add costs to the file atomically; what another thread or process writes meanwhile is kept."""
    file = path(device)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=PATIENCE):
            merged = _load(device)[0] | nanoseconds
            data = {"version": FORMAT_VERSION, "machine": machine(device), "nanoseconds": merged}
            write_text(file, json.dumps(data, indent=1, sort_keys=True) + "\n")
    except (OSError, NotImplementedError) as error:  # the file system may have no locks
        _warn(f"cannot keep the measured costs in {file} ({_why(error)}): the next conversion measures them again")


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)
