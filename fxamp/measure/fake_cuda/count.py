"""Count what Inductor makes of a step on an H100, where there is none.

    count("net.py:make", "fxamp.report.gate.kernels:train", run_options={"policy": "O1,dtype=bf16"}).total

What is counted: kernels that Inductor generates, products and other kernels of libraries, and ops outside of compiled
graphs; bytes that these load and store; and memory. What is not: workspaces of libraries, fills of them, several
kernels of one convolution, rounding by the allocator, and what autotuning would choose.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from ...errors import MeasureError
from . import library
from .breakdown import Breakdown

STEPS = 3  # the first compiles, and makes an optimizer's state; the second compiles its update
# Before torch is imported: it asks once, and for good, what devices there are.
_START = """
import ctypes, sys
for library in sys.argv.pop(1), sys.argv.pop(1):
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
from fxamp.measure.fake_cuda.child import main
main()
"""


def count(
    build: str, run: str, *, build_options: Mapping[str, Any] | None = None,
    run_options: Mapping[str, Any] | None = None, steps: int = STEPS, folder: Path | None = None,
) -> Breakdown:  # fmt: skip
    """Count the last of a few steps, in a process of its own.

    Args:
        build: `package.module:callable` or `path/file.py:callable`, which makes a model on the CPU, and its inputs:
            (model, args) or (model, args, kwargs).
        run: The name of a function in the same form. It is called with model, args and kwargs on the GPU, under fake
            tensors, and returns a function that runs one step.
        build_options: Keyword arguments for `build`; plain data.
        run_options: The same for `run`.
        steps: How many steps to run, of which the last is counted.
        folder: Where names are looked up from; by default the current folder.

    Raises:
        MeasureError: It cannot be done here, or the step cannot be run without values: it reads one, say.
    """
    library.refuse()
    request = {
        "build": build, "build_options": dict(build_options or {}), "run": run, "run_options": dict(run_options or {}),
        "steps": steps,
    }  # fmt: skip
    libraries = [str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"), str(library.device_library())]
    with tempfile.TemporaryDirectory() as own:
        file = Path(own, "counts.json")
        done = subprocess.run(
            [sys.executable, "-c", _START, *libraries, json.dumps(request), str(file)],
            cwd=folder, capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
        if not file.exists():
            said = done.stderr.strip().splitlines() or [f"its process ended with exit status {done.returncode}"]
            raise MeasureError(f"a step of {build!r} cannot be counted: {said[-1]}")
        answer = json.loads(file.read_text(encoding="utf-8"))
    if "error" in answer:
        raise MeasureError(answer["error"])
    return msgspec.convert(answer["counts"], Breakdown)
