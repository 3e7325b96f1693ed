"""Who adds an op or a device as CONTRIBUTING says has added it: what stands there is done here, word for word."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from passes.contract import devices
from passes.contract.errors import FxampError
from passes.ops import rules
from passes.ops.table.row import of
from tests.passes.assign import test_assign_precision
from tests.passes.contract import test_devices

TEXT = (Path(__file__).parents[2] / ".github" / "CONTRIBUTING.md").read_text("utf-8")


def blocks(heading: str, language: str) -> list[str]:
    """Return the blocks of code under a heading."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def defined(code: str, space: Mapping[str, Any]) -> Any:
    """Return the test function that a text defines among the names of a file of tests."""
    names = dict(vars(space) if not isinstance(space, Mapping) else space)
    before = set(names)
    exec(code, names)
    (test,) = names.keys() - before - {"__builtins__"} or {re.findall(r"def (test_\w+)", code)[0]}
    return names[test]


@pytest.fixture
def _fresh_lists() -> Iterator[None]:
    rules._unlisted.cache_clear()
    yield
    rules._unlisted.cache_clear()


@pytest.mark.usefixtures("_fresh_lists")
def test_a_stranger_adds_a_device_with_lists_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    row, code = blocks("Add a device", "python")
    test = defined(code, vars(test_devices))
    with pytest.raises((FxampError, KeyError)):
        test()
    (device,) = eval(f"({row})", vars(devices))
    monkeypatch.setitem(devices.DEVICES, device.name, device)
    test()


def test_a_stranger_adds_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    (diff,) = blocks("Add an op", "diff")
    added = [line[1:] for line in diff.splitlines() if re.match(r"\+(?!\+\+)", line)]
    entry, code = added[0], "\n".join(added[1:])
    names, columns = eval(entry.strip().rstrip(","), {"of": of})
    test = defined(code, vars(test_assign_precision))
    (variants,) = (mark.args[1] for mark in test.pytestmark if mark.name == "parametrize")

    def write(**unlike: Any) -> None:
        for name in names.split():
            plain = rules.Rule(name, rules.RULES[name].kinds, rules.RULES[name].reason)
            monkeypatch.setitem(rules._ALL, name, replace(plain, **{**columns, **unlike}))

    write(no_low_backward=False)
    for op in variants:
        with pytest.raises((RuntimeError, NotImplementedError, FxampError)):
            test(op)
    write()
    for op in variants:
        torch.manual_seed(0)
        test(op)
