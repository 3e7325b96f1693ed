"""One thread, unless OMP_NUM_THREADS says how many: the models are tiny, and threads that wait are slower than none.

The tests of a file run in one process; so do those of the models of the zoo, for it captures a model once, and those
that start processes. What a file left behind is not looked at again: collecting garbage, and looking for a loss scaler,
go through all live objects.
"""

from __future__ import annotations

import functools
import gc
import getpass
import logging
import os
import random
import re
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadFileScheduling

from tests.support.guards import untimed_guards
from tests.support.shards import Shard
from tests.support.zoo import BY_NAME

if "OMP_NUM_THREADS" not in os.environ:  # torch has read it, as the processes that tests start do
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
if "ATEN_CPU_CAPABILITY" in os.environ:  # Inductor's cache does not know it: kernels for another one crash
    cache = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}_{os.environ['ATEN_CPU_CAPABILITY']}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
ROOT = Path(__file__).parents[1]
SLOW = re.compile(
    r"/(ranks|integrations|diagnose|census|error|ranges|choose|gate|cli|measure)/"
    r"|/test_(ranks|ecosystem|browser|demo|emitted_optimum|fastest|gpu|reports|trial|record)\.py"
    r"|/train/test_(low_leaves|compiled_\w+|at_rest|plans_of_steps)\.py"
    r"|/train/test_(random_\w+|hostile_checkpoints|weights\w*|windows_by_hand)\.py"
    r"|/view/test_(no_trace|cast_once|weights_of_a_call|constructs|after_conversion)\.py"
    r"|/behaviour/test_(o2_error|commands|jagged|reference|recurrent|attention|cuda)\.py"
)
OF_ZOO = re.compile(rf"/report/(page/|test_graphs|test_record)|::.*[\[-]({'|'.join(BY_NAME)})[\]-]")


class Shares(LoadFileScheduling):  # type: ignore[misc]  # has no types
    """Gives a process whole files, all those that start processes, or all tests of models of the zoo."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "zoo" if OF_ZOO.search(nodeid) else "processes" if _starts_processes(file) else file


@functools.cache
def _starts_processes(file: str) -> bool:
    """Say whether a file needs what starts warm processes, which takes five seconds to get warm itself."""
    return "ranks" in file or "tests.support.processes" in Path(ROOT, file).read_text(encoding="utf-8")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Shares:
    """Say which tests a process gets, for `-n`."""
    return Shares(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs a part of the tests."""
    parser.addoption("--shard", metavar="K/N", help="of the tests that are selected, run the Kth of N parts")


def pytest_configure(config: pytest.Config) -> None:
    """What importing leaves behind is not garbage; what torch says of each capture is not read."""
    if config.getoption("--shard"):
        config.pluginmanager.register(Shard.parse(config.getoption("--shard")))
    gc.disable()
    untimed_guards()
    logging.getLogger("torch").setLevel(logging.WARNING)


def pytest_collection_finish() -> None:
    """Nor is what has been collected; and a capture makes so many objects that garbage is collected more rarely."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Draw the data of a file by the file alone, not by what was collected before it."""
    if isinstance(collector, pytest.Module):
        _seed(collector.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Draw a test's data by the test alone, not by what its process has run before."""
    _seed(item.nodeid)


def _seed(name: str) -> None:
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(scope="module", autouse=True)
def _nothing_old_is_looked_at() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget what Dynamo compiled, and turn off the kernels that eager attention uses in eval mode alone."""
    torch._dynamo.reset()
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(fused)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the matrix the cases that a test does not name, and to the slow tests what takes long.

    A test that is tried by several front ends, at several levels or in several low dtypes names the case that is enough
    by default: `@pytest.mark.default_case(front_end="graph")`. Of the rest, what starts ranks, a browser, trainers of
    other libraries, searches or the scripts of reports/ is slow, and so are the files that take longest.
    """
    # No process may begin with a long file when the other has no more.
    items.sort(key=lambda item: not item.nodeid.startswith("tests/reports/"))
    for item in items:
        cases = [mark.kwargs for mark in item.iter_markers("default_case")]
        arguments = item.callspec.params if cases else {}  # type: ignore[attr-defined]
        if any(case.keys() - arguments.keys() for case in cases):
            raise pytest.UsageError(f"{item.nodeid}: its default_case names an argument that it does not have")
        if cases and not any(case.items() <= arguments.items() for case in cases):
            item.add_marker("matrix")
    for item in items:
        if SLOW.search(item.nodeid) and not any(map(item.get_closest_marker, ("matrix", "trial"))):
            item.add_marker("slow")


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Leave addresses out of ids, which are the same in every process then."""
    text = str(val)
    return re.sub(r" at 0x[0-9a-f]+", "", text) if callable(val) and " at 0x" in text else None
