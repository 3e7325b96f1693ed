"""Single ops are timed on the device at hand, once per machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fxamp.measure import cost_cache, timing
from fxamp.measure.costs import Call, Filler
from fxamp.measure.timing import ENOUGH, SWEEPS, OpTimer

X = Filler((2, 3), (3, 1), torch.float32, True)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Recorded:
    """An op that remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((*args, *kwargs.values()))
        return args[0] * 2 if isinstance(args[0], torch.Tensor) else args[0]


def call(key: str, function: Any, *args: Any, **kwargs: Any) -> Call:
    return Call(key, function, args, kwargs)


def test_a_call_is_timed_and_the_next_process_knows_it() -> None:
    op = Recorded()
    double = call("double", op, X)
    taken = OpTimer("cpu")([double])
    assert taken[double] > 0
    often = len(op.calls)
    assert often > SWEEPS
    cost_cache.save("cpu", {"double": 7})
    assert OpTimer("cpu")([double]) == {double: 7}
    assert len(op.calls) == often


def test_an_op_runs_on_tensors_of_its_shape_stride_and_dtype() -> None:
    op, columns = Recorded(), Filler((2, 3), (1, 2), torch.bfloat16, False)
    index, mask = Filler((4,), (0,), torch.int64, False), Filler((1,), (1,), torch.bool, False)
    OpTimer("cpu")([call("all", op, columns, [X, 5], at=index, where=mask)])
    value, (inside, number), at, where = op.calls[0]
    assert (value.shape, value.stride(), value.dtype, value.requires_grad) == ((2, 3), (1, 2), torch.bfloat16, False)
    assert (inside.dtype, inside.requires_grad, number) == (torch.float32, True, 5)
    assert (at.stride(), at.tolist(), where.tolist()) == ((0,), [0] * 4, [True])


def test_backward_runs_where_gradients_flow() -> None:
    seen: list[str] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append("forward")
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            seen.append("backward")
            return grads[0]

    with torch.no_grad():  # as convert may be called
        OpTimer("cpu")([call("watched", Watched.apply, X)])
    assert seen.count("backward") == seen.count("forward") - SWEEPS  # each sweep begins with the outputs alone
    seen.clear()
    OpTimer("cpu")([call("constant", Watched.apply, Filler((2,), (1,), torch.float32, False))])
    assert "backward" not in seen


def test_what_cannot_run_is_left_out() -> None:
    def rejects(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not implemented for 'BFloat16'")

    good, bad = call("good", Recorded(), X), call("bad", rejects, X)
    assert OpTimer("cpu")([bad, good]).keys() == {good}
    assert cost_cache.load("cpu").keys() <= {"good"}


@pytest.mark.parametrize(("times", "kept"), [([1000, 5000, 9000] * 9, False), ([1000, 1010, 1020] * 9, True)])
def test_a_time_that_did_not_settle_is_used_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, times: Sequence[int], kept: bool
) -> None:
    assert ENOUGH == 3
    samples: Iterator[Sequence[int]] = iter([times[:1], times[1:2], times[2:3]])
    monkeypatch.setattr(OpTimer, "_time", lambda self, run: list(next(samples)))
    monkeypatch.setattr(timing, "_waited", lambda start, end: False)
    once = call("once", Recorded(), X)
    assert OpTimer("cpu")([once]) == {once: 1000}
    assert cost_cache.load("cpu") == ({"once": 1000} if kept else {})


def test_a_time_that_was_taken_under_load_is_used_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpTimer, "_time", lambda self, run: [1000] * 5)
    monkeypatch.setattr(timing, "_waited", lambda start, end: True)
    once = call("once", Recorded(), X)
    assert OpTimer("cpu")([once]) == {once: 1000}
    assert cost_cache.load("cpu") == {}


def test_a_time_taken_without_load_is_believed_before_one_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, waited = iter([[900] * 5, [1000] * 5, [1000] * 5]), iter([True, False, False])
    monkeypatch.setattr(OpTimer, "_time", lambda self, run: next(samples))
    monkeypatch.setattr(timing, "_waited", lambda start, end: next(waited))
    once = call("once", Recorded(), X)
    assert OpTimer("cpu")([once]) == {once: 1000}
    assert cost_cache.load("cpu") == {"once": 1000}


def test_a_thread_waits_where_it_runs_for_less_than_the_time_that_passes() -> None:
    assert timing._waited((0, 0), (1000, 800))
    assert not timing._waited((0, 0), (1000, 950))


def test_the_random_state_is_left_alone_and_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.get_rng_state()
    OpTimer("cpu")([call("dropout", torch.nn.functional.dropout, X)])
    assert torch.equal(torch.get_rng_state(), state)
    assert "measuring ops: 100%" in capsys.readouterr().err
    OpTimer("cpu")([])
    assert capsys.readouterr().err == ""
