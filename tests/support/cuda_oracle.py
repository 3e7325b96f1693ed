"""Dtypes that the real CUDA autocast kernels give, on fake tensors, without a GPU: for a process of its own.

Fake CUDA tensors change torch's state for good.
"""

from __future__ import annotations

import warnings
from typing import Any

import fxamp
from tests.support.subjects import subject
from tests.support.trial.cuda import POLICY, dtypes_under_cuda
from tests.support.trial.judge import exported


def compare(names: list[str]) -> list[dict[str, Any]]:
    """Run the oracle over models of the zoo, and put its dtypes beside the plans'.

    Returns:
        For each model {"name": ..., "rows": [[key, op, expected, autocast, got, code], ...], "unrun": [...]}, as
        `tests/support/trial/cuda.py` has them.
    """
    warnings.simplefilter("ignore")
    return [_compare(name) for name in names]


def _compare(name: str) -> dict[str, Any]:
    found = subject(name)
    program = exported(found)
    plain, module = (fxamp.convert(program, policy=policy) for policy in ("O0", POLICY))
    rows, unrun = dtypes_under_cuda(plain, module, found.args, found.kwargs)
    return {"name": name, "rows": rows, "unrun": unrun}
