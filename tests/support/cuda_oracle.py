"""Dtypes that the real CUDA autocast kernels give, on fake tensors, without a GPU. Run in a process of its own.

    python -m tests.support.cuda_oracle MODEL...

prints one JSON line per model: {"name": ..., "rows": [[key, op, expected, autocast, got, code], ...], "unrun": [...]},
as `reports/trial/cuda.py` has them.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

from reports.subjects import converted, subject
from reports.trial.cuda import POLICY, dtypes_under_cuda


def compare(name: str) -> dict[str, Any]:
    """Run the oracle over one model and put its dtypes beside the plan's."""
    found = subject(name)
    rows, unrun = dtypes_under_cuda(converted(name, "O0"), converted(name, POLICY), found.args, found.kwargs)
    return {"name": name, "rows": rows, "unrun": unrun}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for model in sys.argv[1:]:
        print(json.dumps(compare(model)))
