"""One thread: the models are tiny, and threads that wait for each other are slower than none.

Tests that look at the same captured model run in the same process, which captures it once.
"""

from __future__ import annotations

import os
import re

import pytest
import torch

from reports.zoo import BY_NAME

os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
torch.set_num_threads(1)


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Leave addresses out of ids, which are the same in every process then."""
    text = str(val)
    return re.sub(r" at 0x[0-9a-f]+", "", text) if callable(val) and " at 0x" in text else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests of each model of the zoo, and those of each spelling in a file (`--dist loadgroup`)."""
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        named = [v for v in parameters.values() if isinstance(v, str) and v in BY_NAME]
        spelled = [f"{item.path.stem} {parameters[p]}" for p in ("spelling",) if p in parameters]
        for group in (named or spelled)[:1]:
            item.add_marker(pytest.mark.xdist_group(group))
