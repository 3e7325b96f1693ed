"""DistributedDataParallel: one exchange of gradients a window, and what else it can be asked for."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import fxamp
from fxamp.train import window as window_file
from tests.support.small import BF16, FP16, INF, SCALER, X, blocks, converted, loss_of, step_of, weights_of
from tests.support.training import WeightCasts
from tests.support.workers import Workers, refused

SMALL_BUCKETS = 0.001  # MB: every layer has one of its own


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def count_exchanges(replica: DistributedDataParallel) -> list[int]:
    exchanges: list[int] = []

    def hook(_: object, bucket: Any) -> Any:
        exchanges.append(bucket.buffer().numel())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    hook.__annotations__ = {}  # torch does not understand them as text
    replica.register_comm_hook(None, hook)
    return exchanges


def mine(x: Tensor, accumulate_steps: int) -> Tensor:
    """Return the micro-batches of this rank: each window of one process is shared out among the ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    return x.unflatten(0, (-1, world, accumulate_steps))[:, rank].flatten(0, 1)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("weights", "compile"),
    [
        *(("per_use", False), ("per_step", False), ("per_step", "aot_eager")),
        pytest.param("per_use", "aot_eager", marks=pytest.mark.matrix),
    ],
)
def test_a_window_exchanges_gradients_once(weights: Any, compile: bool | str) -> None:
    model, alone = converted(BF16), converted(BF16)
    replica = DistributedDataParallel(model)
    exchanges = count_exchanges(replica)
    step = step_of(replica, accumulate_steps=4, weights=weights, compile=compile)
    other = step_of(alone, accumulate_steps=4)
    for x in X[:8]:
        step(x)
        other(x)
    assert len(exchanges) == 2
    assert all(map(torch.equal, model.parameters(), alone.parameters()))


@pytest.mark.usefixtures("one_rank")
def test_a_window_of_ones_own_exchanges_gradients_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_file, "exchange", lambda *_: pytest.fail("exchanged after backward"))
    model, alone = converted(BF16), converted(BF16)
    replica = DistributedDataParallel(model)
    exchanges = count_exchanges(replica)
    step, other = step_of(replica, accumulate_steps=2), step_of(alone, accumulate_steps=2)
    for x in X[:4]:
        with step.window() as window:
            step.backward(loss_of(step.model(x)))
        other(x)
        if window.position == 2:
            step.update()
    assert len(exchanges) == 2
    assert all(map(torch.equal, model.parameters(), alone.parameters()))


def window_by_hand(x: Tensor) -> list[Tensor]:
    """Train with windows of one's own, of which no forward exchanges gradients, and which all end with `update`."""
    replica = DistributedDataParallel(converted(BF16))
    step = step_of(replica, accumulate_steps=2)
    own = mine(x, 2)
    for first, second in zip(own[::2], own[1::2], strict=True):
        with step.window():
            step.backward(loss_of(step.model(first)))
            step.backward(loss_of(step.model(second)))
        step.update()
    return weights_of(replica)


def test_a_window_of_ones_own_whose_backwards_exchange_nothing_does_so_at_its_end(two: Workers) -> None:
    first, second = two(window_by_hand, X[:8])
    assert all(map(torch.equal, first, second))
    expected = alone(X[:8], 2, policy=BF16, accumulate_steps=2)[3]
    for ours, theirs in zip(first, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def loop(x: Tensor, once: bool) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Train in a loop of one's own, with windows of two; return losses, weights, and casts of weights by step."""
    model = converted(BF16)
    replica = DistributedDataParallel(model)
    optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
    losses: list[Tensor] = []
    own = mine(x, 2)
    scope: Any = fxamp.cast_once(replica) if once else contextlib.nullcontext()
    with scope, WeightCasts(model) as casts:
        for first, second in zip(own[::2], own[1::2], strict=True):
            with replica.no_sync():
                losses.append(loss_of(replica(first)))
                losses[-1].backward()
            losses.append(loss_of(replica(second)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return [loss.detach() for loss in losses], weights_of(replica), casts.by_step


def test_a_loop_on_two_ranks_casts_each_weight_once_a_step_and_trains_to_the_same_bits(two: Workers) -> None:
    for (expected, trained, per_use), (losses, weights, casts) in zip(
        two(loop, X[:16], False), two(loop, X[:16], True), strict=True
    ):
        assert all(map(torch.equal, losses, expected))
        assert all(map(torch.equal, weights, trained))
        assert per_use == [20] * 4
        assert casts[1:] == [10] * 3


def train(x: Tensor, wrap: dict[str, Any], settings: dict[str, Any]) -> list[Any]:
    """Train on this rank's share; return scales, which steps were skipped, how many were kept, and the weights."""
    policy = settings.pop("policy", BF16)
    compiled = wrap.pop("compiled", False)
    model: Any = fxamp.compile(blocks(), policy=policy, backend="eager") if compiled else converted(policy)
    replica = DistributedDataParallel(model, **wrap)
    step = step_of(replica, **settings)
    results = [step(one) for one in mine(x, settings.get("accumulate_steps", 1))]
    results = [r for r in results if r.reason != "accumulating"]
    return [[r.scale for r in results], [r.skipped for r in results], [r.kept for r in results], weights_of(replica)]


def alone(x: Tensor, world: int, **settings: Any) -> list[Any]:
    """Train as one process that takes the micro-batches of all ranks."""
    model = converted(settings.pop("policy", BF16))
    settings["accumulate_steps"] = world * settings.get("accumulate_steps", 1)
    step = step_of(model, **settings)
    results = [r for r in map(step, x) if r.reason != "accumulating"]
    return [[r.scale for r in results], [r.skipped for r in results], [r.kept for r in results], weights_of(model)]


def assert_as_alone(ranks: list[Any], one: list[Any]) -> None:
    for rank in ranks:
        assert rank[:3] == one[:3]
        torch.testing.assert_close(rank[3], one[3], rtol=0, atol=1e-6)
        assert all(map(torch.equal, rank[3], ranks[0][3]))


def with_overflow(at: int) -> Tensor:
    x = X[:24].clone()
    x[at] = INF
    return x


OVERFLOWS = with_overflow(10)  # of the second rank alone, in the third window of two ranks with two micro-batches


@pytest.mark.parametrize("weights", ["per_use", "per_step"])
def test_two_ranks_train_as_one_that_takes_their_batches_as_micro_batches(two: Workers, weights: str) -> None:
    settings = {"policy": FP16, "scaler": SCALER, "accumulate_steps": 2, "max_grad_norm": 0.05, "weights": weights}
    ranks = two(train, OVERFLOWS, {}, settings)
    one = alone(OVERFLOWS, 2, **settings)
    assert one[1] == [False, False, True, False, False, False]
    assert one[0][2] == 2 * one[0][3]
    assert_as_alone(ranks, one)


ASKED_FOR: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"gradient_as_bucket_view": True, "bucket_cap_mb": SMALL_BUCKETS}, {"accumulate_steps": 2, "max_grad_norm": 0.05}),
    ({"find_unused_parameters": True}, {"accumulate_steps": 2, "weights": "per_step"}),
    ({"compiled": True}, {"accumulate_steps": 2, "max_grad_norm": 0.05}),
    ({"static_graph": True}, {"weights": "per_step"}),
    ({"broadcast_buffers": False}, {"accumulate_steps": 2, "compile": "aot_eager", "max_grad_norm": 0.05}),
]


@pytest.mark.parametrize(("wrap", "settings"), ASKED_FOR, ids=[next(iter(wrap)) for wrap, _ in ASKED_FOR])
def test_what_replicas_are_asked_for_changes_no_result(
    two: Workers, wrap: dict[str, Any], settings: dict[str, Any]
) -> None:
    settings = {"policy": FP16, "scaler": SCALER, **settings}
    one = {k: v for k, v in settings.items() if k != "compile"}
    assert_as_alone(two(train, OVERFLOWS, wrap, dict(settings)), alone(OVERFLOWS, 2, **one))


class Half(nn.Module):
    """Uses one of two layers, by the sign of what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = nn.Linear(16, 2), nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if x.sum() > 0 else self.second(x)


def train_by_halves(signs: list[list[int]], flushed: bool) -> list[Tensor | None]:
    torch.manual_seed(0)
    model = Half()
    replica = DistributedDataParallel(model, find_unused_parameters=True)
    step = step_of(replica, accumulate_steps=len(signs[0]) + flushed)
    before = weights_of(model)
    for sign in signs[dist.get_rank()]:
        step(sign * X[0].abs())
    if flushed:
        step.flush()
    after = weights_of(model)
    return [None if torch.equal(old, new) else new for old, new in zip(before, after, strict=True)]


@pytest.mark.parametrize("flushed", [False, True])
def test_a_parameter_that_some_rank_uses_is_trained_on_all_and_no_other(two: Workers, flushed: bool) -> None:
    # In backward, torch exchanges what the last micro-batch has used on some rank.
    first, second = two(train_by_halves, [[1, -1], [1, 1]] if flushed else [[1, 1], [1, -1]], flushed)
    assert [p is not None for p in first] == [True] * 4 + [False] * 2
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def flush(counts: list[int]) -> list[Any]:
    replica = DistributedDataParallel(converted(FP16))
    step = step_of(replica, accumulate_steps=4, scaler=SCALER)
    rank = dist.get_rank()
    results = []
    for window in range(2):
        for x in X[4 * window :][sum(counts[:rank]) :][: counts[rank]]:
            step(x)
        results.append(step.flush())
    empty = step.flush()
    assert (empty.reason, empty.kept, step.windows) == ("no_gradients", 0, 2)
    return [[r.scale for r in results], [r.skipped for r in results], [r.kept for r in results], weights_of(replica)]


@pytest.mark.parametrize("counts", [[1, 3], [3, 0]], ids=str)
def test_the_last_micro_batches_of_an_epoch_may_be_more_on_one_rank(two: Workers, counts: list[int]) -> None:
    model = converted(FP16)
    step = step_of(model, accumulate_steps=4, scaler=SCALER)
    for window in range(2):
        for x in X[4 * window :][: sum(counts)]:
            step(x)
        step.flush()
    for rank in two(flush, counts):
        assert rank[1:3] == [[False] * 2, [sum(counts)] * 2]
        torch.testing.assert_close(rank[3], weights_of(model), rtol=0, atol=1e-6)


def note_exchanges(replica: DistributedDataParallel) -> list[str]:
    """Return where it is noted that a bucket is ready to be exchanged."""
    events: list[str] = []

    def hook(_: object, bucket: Any) -> Any:
        events.append(f"exchange {bucket.index()}")
        return default_hooks.allreduce_hook(replica.process_group, bucket)

    hook.__annotations__ = {}  # torch does not understand them as text
    replica.register_comm_hook(None, hook)
    return events


def note_gradients(replica: DistributedDataParallel, events: list[str]) -> None:
    for name, p in replica.module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))


def order_of_events(weights: str) -> list[str]:
    """Return in which order layers have their gradients, and buckets are ready to be exchanged."""
    replica = DistributedDataParallel(converted(BF16), bucket_cap_mb=SMALL_BUCKETS)
    events = note_exchanges(replica)
    step = step_of(replica, accumulate_steps=2, weights=weights)
    assert step.weights.mode == weights
    for x in X[:4]:
        step(x)
    note_gradients(replica, events)
    step(X[4])
    del events[:]
    step(X[5])
    return events


def test_casts_that_are_kept_let_buckets_go_while_backward_goes_on(two: Workers) -> None:
    kept, cast = two(order_of_events, "per_step"), two(order_of_events, "per_use")
    assert kept == cast
    first = kept[0].index("exchange 0")
    assert len([event for event in kept[0] if event.startswith("exchange")]) > 3
    assert any(event.startswith("0.") for event in kept[0][first:]), kept[0]


@functools.cache
def converted_wide() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 600), nn.GELU(), nn.Linear(600, 600), nn.GELU(), nn.Linear(600, 600), nn.Linear(600, 2)]
    return fxamp.convert(nn.Sequential(*layers), (X[0],), policy=BF16, check=False)


def wide(compile: bool | str, weights: str) -> list[Any]:
    """Train a model that torch splits into several graphs, so that each can exchange gradients when it is done."""
    replica = DistributedDataParallel(copy.deepcopy(converted_wide()), bucket_cap_mb=1)
    events = note_exchanges(replica)
    step = step_of(replica, accumulate_steps=2, compile=compile, weights=weights)
    for x in mine(X[:12], 2):
        step(x)
    note_gradients(replica, events)
    step(X[0])
    del events[:]
    step(X[1])
    return [step.weights.mode, events, weights_of(replica)]


def test_a_compiled_replica_exchanges_gradients_while_backward_goes_on(two: Workers) -> None:
    plain = two(wide, False, "auto")[0]
    mode, events, trained = two(wide, "aot_eager", "auto")[0]
    assert mode == "per_use"
    assert events.index("exchange 0") < events.index("2.weight")
    torch.testing.assert_close(trained, plain[2], rtol=0, atol=0)
    _, _, trained = two(wide, "aot_eager", "per_step")[0]  # torch has split the graph, so that nothing is kept
    torch.testing.assert_close(trained, plain[2], rtol=0, atol=0)


def compressing() -> list[Any]:
    replica = DistributedDataParallel(converted(FP16))
    replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
    step = step_of(replica, accumulate_steps=2)
    results = [r for r in map(step, mine(X, 2)) if r.reason != "accumulating"]
    return [[r.scale for r in results], [r.skipped for r in results], weights_of(replica)]


def test_a_hook_that_compresses_gradients_finds_a_scale_that_fits(two: Workers) -> None:
    first, second = two(compressing)
    assert first[:2] == second[:2]
    assert not all(first[1])
    assert not first[1][-1]
    assert all(map(torch.equal, first[2], second[2]))


def apart(on_rank: int) -> tuple[list[bool], list[float], str]:
    """Train replicas whose hook exchanges nothing; one rank overflows."""
    replica = DistributedDataParallel(converted(FP16))
    count_exchanges(replica)
    step = step_of(replica, accumulate_steps=2, scaler=SCALER)
    results = [step(INF if i == 2 and dist.get_rank() == on_rank else x) for i, x in enumerate(X[:6])][1::2]
    return [r.skipped for r in results], [r.scale for r in results], step.scaler.history[1].culprit


def test_ranks_whose_hook_exchanges_nothing_skip_a_step_together(two: Workers) -> None:
    first, second = two(apart, 1)
    assert first[0] == second[0] == [False, True, False]
    assert first[1] == second[1]


def power_sgd(settings: dict[str, Any]) -> list[Tensor]:
    replica = DistributedDataParallel(converted(settings.pop("policy")))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    step = step_of(replica, accumulate_steps=2, **settings)
    for x in mine(X, 2):
        step(x)
    return weights_of(replica)


def test_a_hook_that_keeps_what_compression_loses_trains_without_loss_scaling(two: Workers) -> None:
    first, second = two(power_sgd, {"policy": BF16})
    assert all(map(torch.equal, first, second))
    assert all(p.isfinite().all() for p in first)
    said = "'powerSGD_hook' carries its compression error into the next step.* stays NaN"
    refused(two, power_sgd, {"policy": FP16}, match=said)
