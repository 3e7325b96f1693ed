"""Converted blocks are sharded and trained by torch.distributed, and what cannot be is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxamp
from tests.support.front_ends import F32, FRESH, convert, one
from tests.support.helpers import Two, example
from tests.support.ranks import shard

pytestmark = FRESH


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_views_of_blocks_are_sharded_and_views_of_sharded_models_train() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(Two(), Two())
    model = nn.Sequential(*(convert(block, one()) for block in copy.deepcopy(eager)))
    for block in model:
        shard(block)
    shard(model)
    x = example()
    got = model(x)
    torch.testing.assert_close(got, eager(x), rtol=0.03, atol=0.03)
    got.sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F32}
    assert all(p.grad is not None for p in model.parameters())
    sharded = shard(nn.Sequential(Two()))
    view = convert(sharded, one())
    assert fxamp.plan_of(view).notes[0].startswith("not checked")
    view(x).sum().backward()
    assert {p.grad.dtype for p in sharded.parameters()} == {F32}


@pytest.mark.usefixtures("one_process")
def test_parameters_that_are_gathered_in_the_low_dtype_need_no_cast_and_that_is_noted() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def sharded(policy: Any) -> Any:
        block: Any = fxamp.compile(Two(), policy="O1,dtype=bf16", backend="eager")
        return shard(block, mp_policy=policy)

    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=F32, cast_forward_inputs=False)
    for policy in (low, MixedPrecisionPolicy()):
        model = sharded(policy)
        model(example()).sum().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F32}
        noted = any("FSDP2 gathers 4 trainable parameter(s)" in note for note in fxamp.plan_of(model).notes)
        assert noted is (policy is low)


@pytest.mark.default_case(front_end="graph")
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("front_end", ["view", "graph"])
def test_data_parallel_training_finds_every_parameter(front_end: str) -> None:
    model = Two()
    parallel = nn.parallel.DistributedDataParallel(convert(model, one(), front_end), find_unused_parameters=False)
    for _ in range(2):  # the second call fails where a parameter was not seen in the first backward
        parallel(*one()).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == F32 for p in model.parameters())
