"""Gradient accumulation over ranks: one exchange of gradients a window, and the mean over all ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import fxamp
from fxamp.train.step import TrainStep
from tests.support.ranks import free_ports, leave_group

X = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(0))


def loss_times(output: Tensor, factor: float = 1.0) -> Tensor:
    return output.square().mean() * factor


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 1))


def make_step(model: nn.Module, **settings: Any) -> TrainStep:
    return TrainStep(model, loss_times, SGD(model.parameters(), lr=0.1), **settings)


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


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("weights", "compile"),
    [
        ("per_use", False),
        ("per_step", "aot_eager"),
        pytest.param("per_step", False, marks=pytest.mark.matrix),
        pytest.param("per_use", "aot_eager", marks=pytest.mark.matrix),
    ],
)
def test_a_window_exchanges_gradients_once(weights: Any, compile: bool | str) -> None:
    converted = fxamp.convert(make_model(), (X[0],), policy="O1,dtype=bf16", dynamic_shapes=None)
    model, alone = (copy.deepcopy(converted) for _ in range(2))
    replica = DistributedDataParallel(model)
    exchanges = count_exchanges(replica)
    step = make_step(replica, accumulate_steps=4, weights=weights, compile=compile)
    other = make_step(alone, accumulate_steps=4)
    for x in X:
        step(x)
        other(x)
    assert len(exchanges) == 2
    assert all(map(torch.equal, model.parameters(), alone.parameters()))


@pytest.mark.usefixtures("one_rank")
def test_micro_batches_that_may_be_left_out_are_exchanged_one_by_one() -> None:
    replica = DistributedDataParallel(make_model())
    exchanges = count_exchanges(replica)
    step = make_step(replica, accumulate_steps=4, on_overflow="skip_microbatch")
    for factor in (1.0, math.nan, 1.0, 1.0):
        result = step(X[0], factor)
    assert (len(exchanges), result.kept) == (4, 3)


def test_two_ranks_train_as_one_on_all_the_data(tmp_path: Path) -> None:
    spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]
    spawn(rank_main, (*free_ports(1), str(tmp_path)), 2)
    model = make_model()
    step = make_step(model, accumulate_steps=4)
    for x in X[:4]:
        step(x)
    for x in X[4:6]:
        step(x)
    step.flush()
    for rank in range(2):
        for ours, theirs in zip(model.parameters(), torch.load(tmp_path / f"{rank}.pt"), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt")))


def rank_main(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    # Not by a file: the store of the last rank to leave may wait for ever for a file that is gone.
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    train_every_other(rank, folder)
    leave_group()


def train_every_other(rank: int, folder: str) -> None:
    """Take every other micro-batch: a whole window of two, and a flushed one of one."""
    replica = DistributedDataParallel(make_model())
    step = make_step(replica, accumulate_steps=2)
    for x in X[rank:4:2]:
        step(x)
    step(X[4 + rank])
    step.flush()
    torch.save([p.detach() for p in replica.parameters()], f"{folder}/{rank}.pt")
