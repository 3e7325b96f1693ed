"""The process that has a GPU that is not there: it builds a model, runs steps of it, and writes down the counts."""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from passes.contract.errors import FxampError

from ...errors import MeasureError, in_short
from ...target import load_callable
from . import device
from .model import build, moved
from .program import scheduled_alone
from .tally import FakeGpu


def main() -> None:
    """Count what the first argument asks for, and write counts or an error to the file that the second one names."""
    request, file = json.loads(sys.argv[1]), Path(sys.argv[2])
    try:
        answer: dict[str, Any] = {"counts": asdict(_counted(request))}
    except FxampError as error:
        answer = {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"a step of {request['build']!r} raised {in_short(error.__cause__ or error)}"}
    file.write_text(json.dumps(answer), encoding="utf-8")


def _counted(request: dict[str, Any]) -> Any:
    model, inputs = build(request["build"], request["build_options"])
    prepare = load_callable(request["run"])
    device.install()
    gpu = FakeGpu()
    model, (args, kwargs) = moved(gpu, model, inputs)
    with gpu, scheduled_alone(gpu):
        step = prepare(model, args, kwargs, **request["run_options"])
        for _ in range(request["steps"]):
            gpu.begin()
            step()
        found = gpu.breakdown()
    if not any((found.forward.kernels, found.backward.kernels, found.inference.kernels)):
        raise MeasureError(
            f"Inductor compiled nothing of {request['build']!r}: kernels are counted of what it compiles"
        )
    return found
