from __future__ import annotations

import pytest

from passes.contract.errors import FxampError
from reports.timing import interleaved


def test_variants_take_turns_and_warm_up_is_not_counted() -> None:
    calls: list[str] = []

    timings = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 4)

    assert calls == ["a", "b"] * 4
    assert all(timing.median > 0 and timing.spread >= 0 for timing in timings.values())


def test_rounds_may_be_an_iterable() -> None:
    seen: list[int] = []

    timings = interleaved({"a": lambda: seen.append(1)}, iter(range(5)))

    assert len(seen) == 5
    assert set(timings) == {"a"}


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(FxampError, match="at least two more rounds"):
        interleaved({"a": lambda: None}, 2)
