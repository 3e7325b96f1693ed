"""One of several parts of the tests that are selected: tests that follow each other, about as many in each part."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Shard:
    """The part `number`, from 1 on, of `of` parts."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read "2/6"; UsageError if it is none."""
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise pytest.UsageError(f"--shard={text}: write K/N, such as 2/6, the second of six parts")
        return cls(int(found[1]), int(found[2]))

    def slice(self, length: int) -> slice:
        """Return which of so many tests are in this part."""
        return slice(length * (self.number - 1) // self.of, length * self.number // self.of)

    @pytest.hookimpl(trylast=True)  # after `-m` and `-k` have chosen
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the tests of the other parts."""
        mine = self.slice(len(items))
        config.hook.pytest_deselected(items=[*items[: mine.start], *items[mine.stop :]])
        items[:] = items[mine]
