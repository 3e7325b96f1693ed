from __future__ import annotations

import pytest

from passes.contract.errors import FxampError
from reports.timing import Timing, interleaved


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


def test_a_ratio_is_taken_round_by_round_so_that_slow_rounds_do_not_widen_its_interval() -> None:
    steady = Timing(2.0, 0.0, tuple([2.0] * 20 + [8.0]))
    other = Timing(1.0, 0.0, tuple([1.0] * 20 + [4.0]))
    assert steady.over(other) == (2.0, 0.0)

    few_slow = Timing(2.0, 0.0, tuple([2.0] * 18 + [9.0, 9.0, 9.0]))
    assert few_slow.over(other) == (2.0, 0.0)
    wide = Timing(2.0, 0.0, tuple(range(1, 22)))
    assert wide.over(Timing(1.0, 0.0, (1.0,) * 21)) == (11, 8)
