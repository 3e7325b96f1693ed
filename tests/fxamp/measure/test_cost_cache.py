"""Measured costs are kept between processes, by machine; a cache that cannot be used costs a warning."""

from __future__ import annotations

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fxamp.measure import cost_cache
from tests.support.processes import in_another_process


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fxamp"


def test_what_was_saved_is_loaded_and_added_to() -> None:
    assert cost_cache.load("cpu") == {}
    cost_cache.save("cpu", {"add": 3})
    cost_cache.save("cpu", {"mul": 4})
    assert cost_cache.load("cpu") == {"add": 3, "mul": 4}


def test_the_file_lies_in_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert cost_cache.path("cpu").parent == folder
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cost_cache.path("cpu").parent == Path("/home/me/.cache/fxamp")


def test_another_torch_or_number_of_threads_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cost_cache.save("cpu", {"add": 3})
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert cost_cache.load("cpu") == {}
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert cost_cache.load("cpu") == {}


def test_the_precision_of_products_that_a_program_sets_is_part_of_the_machine() -> None:
    """`torch.get_float32_matmul_precision` raises where it is set by backend."""
    backend: Any = torch.backends.mkldnn
    before = cost_cache.machine("cpu")
    old = backend.matmul.fp32_precision
    backend.matmul.fp32_precision = "bf16"
    try:
        assert cost_cache.machine("cpu") != before
    finally:
        backend.matmul.fp32_precision = old
    assert cost_cache.machine("cpu") == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 1, "machine": "?", "nanoseconds": 3}'])
def test_a_corrupt_file_costs_a_warning_and_is_replaced(text: str) -> None:
    file = cost_cache.path("cpu")
    file.parent.mkdir(parents=True)
    file.write_text(text.replace("?", cost_cache.machine("cpu")))
    with pytest.warns(UserWarning, match=r"cannot read the measured costs in .*costs-cpu-.*: they are measured again"):
        assert cost_cache.load("cpu") == {}
    cost_cache.save("cpu", {"add": 3})
    assert cost_cache.load("cpu") == {"add": 3}


def test_the_file_of_another_format_is_not_read() -> None:
    cost_cache.save("cpu", {"add": 3})
    file = cost_cache.path("cpu")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 0}))
    assert cost_cache.load("cpu") == {}


def test_a_folder_that_cannot_be_written_costs_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.warns(UserWarning, match="cannot keep the measured costs in .*: the next conversion measures them"):
        cost_cache.save("cpu", {"add": 3})


def test_nothing_is_left_beside_the_file(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cost_cache.save("cpu", {"add": 3})
    file = cost_cache.path("cpu")
    assert sorted(folder.iterdir()) == [file, file.with_name(f"{file.name}.lock")]


NONSENSE = {
    "infinity": "Infinity", "too long": "1e300", "negative": "-5", "zero": "0", "truth": "true", "deep": "[" * 5000,
    "digits": "1" * 5000, "text": '"3"',
}  # fmt: skip


@pytest.mark.parametrize("value", NONSENSE.values(), ids=NONSENSE)
def test_a_time_that_can_be_none_is_not_believed(value: str) -> None:
    cost_cache.save("cpu", {"add": 3})
    file = cost_cache.path("cpu")
    file.write_text(file.read_text().replace('"add": 3', f'"add": {value}'))
    with pytest.warns(UserWarning, match="cannot read the measured costs in .*: they are measured again"):
        assert cost_cache.load("cpu") == {}
    cost_cache.save("cpu", {"mul": 4})
    assert cost_cache.load("cpu") == {"mul": 4}


def add(process: int) -> None:
    for i in range(20):
        cost_cache.save("cpu", {f"process {process}-{i}": 1})


def test_threads_and_processes_keep_what_the_others_write() -> None:
    torch.set_num_threads(1)  # as the processes have it: times on other numbers lie in another file
    with ThreadPoolExecutor(10) as pool:
        jobs = [pool.submit(in_another_process, add, i) for i in range(2)]
        jobs += [pool.submit(cost_cache.save, "cpu", {f"thread {i}": 1}) for i in range(64)]
    assert [job.exception() for job in jobs] == [None] * 66
    expected = {f"thread {i}" for i in range(64)} | {f"process {i}-{j}" for i in range(2) for j in range(20)}
    assert cost_cache.load("cpu").keys() == expected
