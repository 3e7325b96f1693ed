"""A gate is not about sizes that change."""

from __future__ import annotations

import pytest

from fxamp.convert import to_read


@pytest.fixture(autouse=True)
def _for_the_sizes_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture for these sizes alone, which takes half the time."""
    assert to_read.__defaults__ == ("auto", "auto", None)
    monkeypatch.setattr(to_read, "__defaults__", ("auto", None, None))
