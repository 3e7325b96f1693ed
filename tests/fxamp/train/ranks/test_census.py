"""A census on two ranks: views inside DistributedDataParallel and FSDP2 run as planned, or the line is named."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fxamp
from tests.support.ranks import shard
from tests.support.workers import Workers

LOW = "O1,dtype=bf16"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x).relu())
        return out


def wrapped(how: str, model: nn.Module) -> Any:
    if how == "DDP":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(fxamp.convert(model, policy=LOW))
    if how == "FSDP2 of a view":
        return shard(fxamp.convert(model, policy=LOW))
    shard(model)
    return fxamp.convert(model, policy=LOW)


def taken(how: str, by_hand: bool, as_step: bool) -> tuple[bool, float, str, bool]:
    torch.manual_seed(0)
    model = Net()
    used, x = wrapped(how, model), torch.randn(6, 8)
    before = [p.detach().clone() for p in used.parameters()]

    def loss(out: torch.Tensor) -> torch.Tensor:
        return out.float().sum() + (model.first(x).sum() if by_hand else 0)

    if as_step:
        step = fxamp.TrainStep(used, loss, torch.optim.SGD(used.parameters(), 0.1))
        found = fxamp.census(step, x)
    else:
        found = fxamp.census(used, x, loss=loss)
    same = all(torch.equal(a, b.detach()) for a, b in zip(before, used.parameters(), strict=True))
    return bool(found), found.share or 0.0, "\n".join(map(str, found.differences)), same


def test_replicas_run_as_planned(two: Workers) -> None:
    for as_step in (False, True):
        assert two(taken, "DDP", False, as_step) == [(True, 1.0, "", True)] * 2


def test_what_runs_outside_of_a_replica_is_named(two: Workers) -> None:
    for fine, share, said, same in two(taken, "DDP", True, False):
        assert not fine
        assert share < 1
        assert same
        assert "addmm in float32" in said
        assert "test_census.py" in said


def test_sharded_models_run_as_planned(two: Workers) -> None:
    for how in ("FSDP2 of a view", "view of FSDP2"):
        for fine, _, said, same in two(taken, how, False, False):
            assert fine, said
            assert same


class PlantedError(Exception):
    """An error that nothing but this test raises."""


def raised(where: str) -> tuple[bool, bool, bool, str]:
    torch.manual_seed(0)
    used, x = wrapped("DDP", Net()), torch.randn(6, 8)
    optimizer = torch.optim.AdamW(used.parameters(), 0.1)
    step = fxamp.TrainStep(used, lambda out: out.float().sum(), optimizer)
    step(x)

    def state() -> list[torch.Tensor]:
        moments = [v for s in optimizer.state.values() for v in s.values()]
        return [t.detach().clone() for t in (*used.parameters(), *moments, torch.get_rng_state())]

    def fails(*_: object, **__: object) -> None:
        raise PlantedError

    before, counts = state(), (step.windows, step.steps)
    owner: Any = optimizer if where == "step" else type(step)
    real = getattr(owner, where)
    setattr(owner, where, fails)
    try:
        fxamp.census(step, x)
        error = ""
    except PlantedError:
        error = "planted"
    finally:
        setattr(owner, where, real)
    same = all(map(torch.equal, before, state())) and counts == (step.windows, step.steps)
    none = all(p.grad is None for p in used.parameters())
    return same, none, step(x).reason == "stepped", error


def test_a_census_that_fails_half_way_leaves_each_rank_as_it_was(two: Workers) -> None:
    for where in ("step", "_count", "_result"):
        assert two(raised, where) == [(True, True, True, "planted")] * 2
