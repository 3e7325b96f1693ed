"""Groups of ranks that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.workers import Workers


@pytest.fixture(scope="session")
def two() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.end()


@pytest.fixture(scope="session")
def four() -> Iterator[Workers]:
    workers = Workers(4)
    yield workers
    workers.end()
