"""The C++ part: whether a GPU can be feigned here, and the library that does it, compiled once for each torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from filelock import FileLock
from platformdirs import user_cache_path

from ...errors import MeasureError

SOURCE = Path(__file__).with_name("device.cpp")
_WITHOUT = "kernels for a GPU that is not there cannot be counted here"


def refuse() -> None:
    """Raise if a GPU cannot be feigned here.

    Raises:
        MeasureError: Not on Linux, torch is not its CPU build, or there is no C++ compiler or no Triton.
    """
    if sys.platform != "linux":
        raise MeasureError(f"{_WITHOUT}: that takes Linux, and this is {sys.platform}; run it in a Linux container")
    if built := torch.version.cuda or torch.version.hip:
        raise MeasureError(
            f"{_WITHOUT}: that takes torch's CPU build, and this is torch {torch.__version__}, which is built for a "
            f"real GPU ({built}); install the CPU build in an environment of its own"
        )
    if compiler() is None:
        raise MeasureError(
            f"{_WITHOUT}: that takes a C++ compiler; install g++, or name another one in the variable CXX"
        )
    if importlib.util.find_spec("triton") is None:
        raise MeasureError(
            f"{_WITHOUT}: that takes Triton, in which Inductor writes kernels; `python -m pip install triton`"
        )


def compiler() -> str | None:
    """Return the path of the C++ compiler, None if there is none."""
    return shutil.which(os.environ.get("CXX") or "g++")


def device_library() -> Path:
    """Return the compiled library for this torch, from the user's cache folder if it is there.

    Raises:
        MeasureError: It cannot be compiled, or written.
    """
    digest = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {sys.version_info[:2]}".encode()).hexdigest()
    file = user_cache_path("fxamp", appauthor=False) / f"fake-cuda-{digest[:16]}.so"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            if not file.exists():
                _compile(file)
    except OSError as error:
        raise MeasureError(f"{_WITHOUT}: {error.strerror or error}: {error.filename or file}") from error
    return file


def _compile(file: Path) -> None:
    folder = Path(torch.__file__).parent
    partial = file.with_suffix(".partial")
    command = [str(compiler()), "-O1", "-shared", "-fPIC", "-std=c++20", str(SOURCE), "-o", str(partial)]
    command += [f"-I{folder / 'include'}", f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
        raise MeasureError(
            f"{_WITHOUT}: {command[0]} cannot compile {SOURCE.name} for torch {torch.__version__}: {first}"
        )
    partial.replace(file)
