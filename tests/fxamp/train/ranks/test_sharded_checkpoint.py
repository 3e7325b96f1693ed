"""Checkpoints of ranks: resumed on another number of them, sharded or not, and after one was killed in a step."""

from __future__ import annotations

import copy
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save as save_any
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

import fxamp
from tests.fxamp.train.ranks.test_replicas import mine
from tests.support.ranks import shard
from tests.support.small import BF16, FP16, INF, SCALER, X, converted, loss_of, step_of, weights_of
from tests.support.workers import Workers

WINDOW = 4  # micro-batches of all ranks together
BATCHES = X[: 6 * WINDOW].clone()
BATCHES[2] = BATCHES[3 * WINDOW + 1] = INF  # so that the scale falls before the checkpoint, and after it
HALF = 3 * WINDOW


def made(how: str, policy: str = FP16, **settings: Any) -> fxamp.TrainStep:
    """Return a step of a model "alone", in "replicas", or "sharded"."""
    model: nn.Module = converted(policy)
    if how == "sharded":
        shard(model)
    if how == "replicas":
        model = DistributedDataParallel(model)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    settings = {"scaler": SCALER, "accumulate_steps": WINDOW // ranks, **settings}
    return step_of(model, optimizer=optimizer, scheduler=StepLR(optimizer, 2), **settings)


def share(batches: Tensor) -> Tensor:
    return mine(batches, WINDOW // dist.get_world_size()) if dist.is_initialized() else batches


def outcome(step: fxamp.TrainStep, batches: Tensor) -> list[Any]:
    results = [r for r in map(step, share(batches)) if r.reason != "accumulating"]
    rates = [group["lr"] for group in step.optimizers[0].param_groups]
    return [[r.scale for r in results], [r.skipped for r in results], step.windows, rates, weights_of(step.model)]


def save(how: str, folder: str) -> None:
    step = made(how)
    outcome(step, BATCHES[:HALF])
    torch.manual_seed(7 + dist.get_rank())
    fxamp.save_checkpoint(step, folder)


def resume(how: str, folder: str, seeds: bool = False) -> list[Any]:
    step = made(how)
    torch.manual_seed(0)
    fxamp.load_checkpoint(step, folder)
    if seeds:
        assert torch.initial_seed() == 7 + dist.get_rank()
    return outcome(step, BATCHES[HALF:])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {how: str(tmp_path_factory.mktemp(how)) for how in ("replicas", "sharded")}


@pytest.fixture(scope="module")
def saved(two: Workers, folders: dict[str, str]) -> dict[str, str]:
    for how, folder in folders.items():
        two(save, how, folder)
    return folders


@pytest.fixture(scope="module")
def unbroken() -> list[Any]:
    step = made("alone")
    outcome(step, BATCHES[:HALF])
    return outcome(step, BATCHES[HALF:])


def assert_same(got: list[Any], unbroken: list[Any]) -> None:
    assert got[:4] == unbroken[:4]
    assert got[1] == [True, False, False]
    torch.testing.assert_close(got[4], unbroken[4], rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", ["replicas", "sharded"])
def test_as_many_ranks_go_on(two: Workers, saved: dict[str, str], unbroken: list[Any], how: str) -> None:
    for rank in two(resume, how, saved[how], True):
        assert_same(rank, unbroken)


@pytest.mark.parametrize(
    ("how", "then"),
    [("replicas", "sharded"), ("sharded", "replicas"), pytest.param("sharded", "sharded", marks=pytest.mark.matrix)],
)
def test_more_ranks_go_on(four: Workers, saved: dict[str, str], unbroken: list[Any], how: str, then: str) -> None:
    for rank in four(resume, then, saved[how]):
        assert_same(rank, unbroken)


@pytest.mark.parametrize("how", ["replicas", "sharded"])
def test_one_process_goes_on(saved: dict[str, str], unbroken: list[Any], how: str) -> None:
    assert_same(resume("alone", saved[how]), unbroken)


def refused(folder: str) -> str:
    step = made("sharded")
    outcome(step, BATCHES[:WINDOW])
    before = weights_of(step.model), copy.deepcopy(step.optimizers[0].state_dict()), step.scaler.state_dict()
    with pytest.raises(fxamp.PolicyError) as error:
        fxamp.load_checkpoint(step, folder)
    after = weights_of(step.model), step.optimizers[0].state_dict(), step.scaler.state_dict()
    assert str(before) == str(after)
    return str(error.value)


def test_a_shard_that_one_rank_cannot_read_is_refused_on_all(
    two: Workers, saved: dict[str, str], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved["sharded"], tmp_path / "c"))
    shard = folder / "__1_0.distcp"  # which rank 1 alone reads
    shard.write_bytes(bytes(shard.stat().st_size))
    for error in two(refused, str(folder)):
        assert f"'{shard}' cannot be loaded: it is damaged" in error


def save_and_be_killed(how: str, folder: str) -> None:
    step = made(how)
    outcome(step, BATCHES[:HALF])
    fxamp.save_checkpoint(step, folder)
    step.loss_fn = killed
    outcome(step, BATCHES[HALF:])


def killed(output: Tensor) -> Tensor:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss_of(output)


def test_a_rank_that_is_killed_in_a_step_leaves_a_checkpoint_that_all_go_on_from(
    two: Workers, unbroken: list[Any], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError):
        two(save_and_be_killed, "sharded", str(tmp_path))
    for rank in two(resume, "sharded", str(tmp_path)):
        assert_same(rank, unbroken)


def test_a_checkpoint_from_before_the_first_step_is_that(tmp_path: Path) -> None:
    fxamp.save_checkpoint(made("alone"), tmp_path)
    step, fresh = made("alone"), made("alone")
    step(X[0])
    step.flush()
    fxamp.load_checkpoint(step, tmp_path)
    assert outcome(step, X[:8])[:4] == outcome(fresh, X[:8])[:4]
    assert all(map(torch.equal, weights_of(step.model), weights_of(fresh.model)))


def test_what_no_other_number_of_ranks_could_go_on_with_is_refused(tmp_path: Path, saved: dict[str, str]) -> None:
    step = made("alone", accumulate_steps=2)
    step(X[0])
    with pytest.raises(fxamp.PolicyError, match="save at the end of a window, or call flush"):
        fxamp.save_checkpoint(step, tmp_path)
    before = weights_of(step.model)
    with pytest.raises(fxamp.PolicyError, match="saved with loss scaling 'dynamic', and here it is 'none'"):
        fxamp.load_checkpoint(made("alone", BF16, scaler="auto"), saved["sharded"], allow=["policy"])
    other = nn.Sequential(nn.Linear(16, 3))
    alike = step_of(other, optimizer=AdamW(other.parameters(), lr=1e-2), scaler=SCALER)
    with pytest.raises(fxamp.PolicyError, match=r"with parameters .* make the TrainStep as it was"):
        fxamp.load_checkpoint(alike, saved["sharded"])
    with pytest.raises(FileNotFoundError):
        fxamp.load_checkpoint(step, tmp_path)
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        save_any({"x": X}, checkpoint_id=tmp_path)
    with pytest.raises(fxamp.PolicyError, match=r"does not hold a checkpoint that fxamp\.save_checkpoint wrote"):
        fxamp.load_checkpoint(step, tmp_path)
    assert all(map(torch.equal, before, weights_of(step.model)))
