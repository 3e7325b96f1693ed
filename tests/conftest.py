"""One thread: the models are tiny, and threads that wait for each other are slower than none."""

from __future__ import annotations

import os
import re

import pytest
import torch

os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
torch.set_num_threads(1)


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Leave addresses out of ids, which are the same in every process then."""
    text = str(val)
    return re.sub(r" at 0x[0-9a-f]+", "", text) if callable(val) and " at 0x" in text else None
