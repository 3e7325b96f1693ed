"""What ranks are refused: on all of them, by name, and before one waits for what never comes."""

from __future__ import annotations

import datetime
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxamp
from fxamp._torch import store_of_ranks
from tests.support.small import BF16, FP16, X, blocks, converted, step_of
from tests.support.workers import Workers, refused


def take_one(wrap: dict[str, Any], settings: dict[str, Any]) -> None:
    step_of(DistributedDataParallel(blocks(), **wrap), **settings)(X[0])


def test_a_static_graph_with_a_backward_that_exchanges_nothing(two: Workers) -> None:
    settings = {"accumulate_steps": 2}
    refused(two, take_one, {"static_graph": True}, settings, match="static_graph=True.* Leave static_graph out, or")


def shard_by_the_first() -> None:
    model = nn.Sequential(converted(BF16), nn.Linear(2, 2))
    step_of(FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True), max_grad_norm=0.1)


def test_the_first_fully_sharded_data_parallel(two: Workers) -> None:
    refused(two, shard_by_the_first, match="the model is a FullyShardedDataParallel.*fully_shard")


def take_one_forgotten() -> None:
    step_of(nn.Sequential(DistributedDataParallel(blocks()), nn.Linear(2, 2)))(X[0])


def test_a_trained_parameter_that_no_replica_holds(two: Workers) -> None:
    refused(two, take_one_forgotten, match="'1.weight' is trained, and no DistributedDataParallel exchanges")


def take_one_each(policies: list[str], settings: list[dict[str, Any]]) -> None:
    rank = dist.get_rank()
    replica = DistributedDataParallel(converted(policies[rank]))
    step_of(replica, **settings[rank])(X[0])


SCALERS: list[dict[str, Any]] = [{"scaler": fxamp.LossScaler(init_scale=2.0**k)} for k in (8, 9)]


@pytest.mark.parametrize(
    ("policies", "settings", "match"),
    [
        ([BF16, "O2,dtype=bf16"], [{}, {}], r"the policy is \['O1,dtype=bf16.*'\] on rank 0, \['O2.*'\] on rank 1"),
        ([FP16, FP16], SCALERS, r"the loss scaler is .*'scale': 256.0.* on rank 0, .*'scale': 512.0.* on rank 1"),
        ([FP16, FP16], [{}, {"scaler": None}], r"the loss scaler is .*dynamic.* on rank 0, .*none.* on rank 1"),
        ([BF16, BF16], [{}, {"accumulate_steps": 2}], "accumulate_steps is 1 on rank 0, 2 on rank 1"),
        ([BF16, BF16], [{}, {"max_skips": 3}], "max_skips is 20 on rank 0, 3 on rank 1"),
        ([BF16, BF16], [{"check_finite": False}, {}], "check_finite is False on rank 0, True on rank 1"),
        ([BF16, BF16], [{}, {"max_grad_norm": 1.0}], "max_grad_norm is None on rank 0, 1.0 on rank 1"),
    ],
    ids=["policy", "scale", "scaling", "accumulation", "skips", "checks", "clipping"],
)
def test_ranks_that_were_told_different_things(
    two: Workers, policies: list[str], settings: list[dict[str, Any]], match: str
) -> None:
    refused(two, take_one_each, policies, settings, match=match)


def take_one_loaded() -> None:
    step = step_of(DistributedDataParallel(converted(BF16)))
    state = step.state_dict()
    step(X[0])
    step(X[1])
    if dist.get_rank() == 0:
        step.load_state_dict(state)
    else:
        step.load_state_dict(step.state_dict())
    step(X[2])


def test_ranks_of_which_one_goes_on_from_another_checkpoint(two: Workers) -> None:
    refused(two, take_one_loaded, match="the number of finished windows is 0 on rank 0, 2 on rank 1")


def take_one_sharded(ranks: list[list[int]], first: int) -> str:
    """Take a step on a mesh of this rank's own, one rank before the other."""
    groups = [dist.new_group(some) for some in sorted(map(tuple, ranks))]  # of which all know
    group = groups[sorted(map(tuple, ranks)).index(tuple(ranks[dist.get_rank()]))]
    model: Any = fully_shard(converted(BF16), mesh=DeviceMesh.from_group(group, "cpu"))
    step = step_of(model)
    if dist.get_rank() != first:
        time.sleep(1)
    try:
        step(X[0])
    except fxamp.PolicyError as error:
        return str(error)
    return ""


SAID = "ranks disagree on which ranks train this model: rank 0 trains it with [0, 1], rank 1 trains it alone. Shard or"


def test_ranks_that_disagree_on_the_number_of_ranks(two: Workers) -> None:
    first, second = two(take_one_sharded, [[0, 1], [1]], 0)
    assert first.startswith(SAID)
    assert second == first
    first, second = two(take_one_sharded, [[0, 1], [1]], 1)
    two.end()  # they have taken different numbers of steps
    assert first.startswith(SAID)
    assert not second  # which trained on, and could know of no other


@pytest.mark.matrix  # which starts four processes, and ends them
def test_ranks_whose_groups_overlap(four: Workers) -> None:
    said = four(take_one_sharded, [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [1, 3]], 0)
    four.end()
    assert all(one.startswith("ranks disagree on which ranks train this model: rank ") for one in said)
    assert said[3].count("trains it with [1, 3]") == 1


def wait_for_the_other() -> str:
    store_of_ranks().set_timeout(datetime.timedelta(seconds=1))
    replica = DistributedDataParallel(converted(BF16))
    step = step_of(replica)
    if dist.get_rank() == 1:
        return ""
    try:
        step(X[0])
    except fxamp.PolicyError as error:
        return str(error)
    return ""


def test_a_rank_that_waits_for_one_that_takes_no_step(two: Workers) -> None:
    first, _ = two(wait_for_the_other)
    two.end()
    assert "rank 0 waited for rank 1, one of [0, 1], and that rank did not arrive within 0:00:01" in first


def fail_in_a_window(ranks: list[int]) -> str:
    """Have ranks give a micro-batch that raises, and go on; return what the next call of a step says."""
    store_of_ranks().set_timeout(datetime.timedelta(seconds=1))
    step = step_of(DistributedDataParallel(converted(BF16)), accumulate_steps=3)
    step(X[0])
    if dist.get_rank() in ranks:
        with pytest.raises(RuntimeError, match="shape"):
            step(X[1][:, :1])
    elif len(ranks) == 1:  # a third micro-batch would wait for the other rank
        return step(X[1]).reason
    return _said(step)


def switch_alone() -> str:
    store_of_ranks().set_timeout(datetime.timedelta(seconds=1))
    step = step_of(DistributedDataParallel(converted(BF16)))
    step(X[0])
    if dist.get_rank() == 0:
        return ""
    step.switch("O2,dtype=bf16")
    return _said(step)


def _said(step: fxamp.TrainStep) -> str:
    try:
        return step(X[2]).reason
    except fxamp.PolicyError as error:
        return str(error)


def test_a_rank_alone_in_an_error_within_a_window_or_in_another_policy(two: Workers) -> None:
    waited = "rank 1 waited for rank 0, .* after `load` and `switch`, and after an error in a window"
    first, last = two(fail_in_a_window, [1])
    two.end()  # they have taken different numbers of micro-batches
    assert first == "accumulating"
    assert re.search(waited, last)
    assert two(fail_in_a_window, [0, 1]) == ["accumulating", "accumulating"]
    first, last = two(switch_alone)
    two.end()
    assert re.search(waited, last)
