"""One thread, unless OMP_NUM_THREADS says how many: the models are tiny, and threads that wait are slower than none.

The tests of a file, and those of the models of the zoo, run in one process, which captures a model once. What a file
left behind is not looked at again: collecting garbage, and looking for a loss scaler, go through all live objects.
"""

from __future__ import annotations

import gc
import os
import re
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadFileScheduling

from reports.zoo import BY_NAME

if "OMP_NUM_THREADS" not in os.environ:  # torch has read it, as the processes that tests start do
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
OF_ZOO = re.compile(rf"/report/(page/|test_graphs|test_record)|::.*[\[-]({'|'.join(BY_NAME)})[\]-]")


class Shares(LoadFileScheduling):  # type: ignore[misc]  # has no types
    """Gives a process whole files, all those of ranks, or all tests of models of the zoo."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "zoo" if OF_ZOO.search(nodeid) else "ranks" if "ranks" in file else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Shares:
    """Say which tests a process gets, for `-n`."""
    return Shares(config, log)


@pytest.fixture(scope="module", autouse=True)
def _nothing_old_is_looked_at() -> None:
    gc.collect()
    gc.freeze()


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Leave addresses out of ids, which are the same in every process then."""
    text = str(val)
    return re.sub(r" at 0x[0-9a-f]+", "", text) if callable(val) and " at 0x" in text else None
