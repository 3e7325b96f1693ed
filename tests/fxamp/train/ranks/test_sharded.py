"""FSDP2: converted or compiled blocks sharded one by one, a model converted as a whole at its root, low dtypes."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import AdamW

import fxamp
from fxamp.train.describe import describe
from passes.contract.errors import PolicyError
from tests.fxamp.train.ranks.test_replicas import OVERFLOWS, alone, assert_as_alone, mine
from tests.support.ranks import shard
from tests.support.small import BF16, FP16, SCALER, X, blocks, converted, step_of, weights_of
from tests.support.workers import Workers, refused

WINDOW: dict[str, Any] = {"scaler": SCALER, "accumulate_steps": 2, "max_grad_norm": 0.05}
LOW: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
LOW_AS_IT_IS = {**LOW, "cast_forward_inputs": False}


def convert(model: nn.Module, policy: str) -> nn.Module:
    return fxamp.convert(model, policy=policy)


@functools.cache
def converted_blocks(policy: str) -> list[nn.Module]:
    return [convert(part, policy) for part in blocks()]


def sharded(how: str, policy: str = FP16, low: dict[str, Any] | None = None) -> Any:
    """Return the model sharded, "whole" or by blocks that were converted or compiled; or one "without norms"."""
    given: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(**low)} if low else {}
    if how == "without norms":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 2))
        return shard(convert(model, policy), **given)
    if how == "whole":
        return shard(converted(policy), **given)
    parts: list[nn.Module] = list(blocks())
    if how == "converted":
        parts = copy.deepcopy(converted_blocks(policy))
    if how == "compiled":
        parts = [fxamp.compile(part, policy=policy, backend="eager") for part in parts]
    for part in parts:
        shard(part, **given)
    return shard(nn.Sequential(*parts), **given)


def train(model: dict[str, Any], x: Tensor, settings: dict[str, Any]) -> list[Any]:
    replica = sharded(**model)
    step = step_of(replica, **settings)
    results = [r for r in map(step, mine(x, settings.get("accumulate_steps", 1))) if r.reason != "accumulating"]
    ranks_of_all = [2 * r.kept for r in results]
    culprits = [event.culprit for event in step.scaler.history if event.skipped]
    return [[r.scale for r in results], [r.skipped for r in results], ranks_of_all, weights_of(replica), culprits]


@pytest.mark.parametrize(
    ("how", "compile"),
    [
        ("converted", False), ("whole", "aot_eager"),
        *(
            pytest.param(*way, marks=pytest.mark.matrix)
            for way in (("compiled", False), ("whole", False), ("converted", "aot_eager"))
        ),
    ],
)  # fmt: skip
def test_shards_train_as_one_process_that_takes_their_batches_as_micro_batches(
    two: Workers, how: str, compile: bool | str
) -> None:
    ranks = two(train, {"how": how}, OVERFLOWS, {**WINDOW, "compile": compile})
    assert_as_alone(ranks, alone(OVERFLOWS, 2, policy=FP16, **WINDOW))
    assert ranks[0][4] == ranks[1][4]
    assert ranks[0][4][0].endswith("norm.weight (NaN)")


def train_fused(skip: bool) -> list[Any]:
    model = sharded("converted")
    step = step_of(model, optimizer=AdamW(model.parameters(), lr=1e-3, fused=True), scaler=SCALER)
    x = mine(OVERFLOWS if skip else X[:24], 1)
    results = [step(one) for one in x]
    return [[r.scale for r in results], [r.skipped for r in results], weights_of(model)]


def test_a_fused_optimizer_skips_a_step_on_all_ranks(two: Workers) -> None:
    first, second = two(train_fused, True)
    assert first[1] == second[1]
    assert first[1] == [i == 5 for i in range(12)]
    assert all(map(torch.equal, first[2], second[2]))


def test_shards_may_be_gathered_in_the_low_dtype_where_the_graph_reads_no_other(two: Workers) -> None:
    model = {"how": "without norms", "policy": "O1,dtype=bf16"}
    full, low = (two(train, {**model, "low": low}, X[:24], {"accumulate_steps": 2}) for low in (None, LOW_AS_IT_IS))
    torch.testing.assert_close(low[0][3], full[0][3], rtol=0, atol=0)


def make_step(model: dict[str, Any], settings: dict[str, Any]) -> None:
    step_of(sharded(**model), **settings)


@pytest.mark.parametrize(
    ("model", "settings", "match"),
    [
        ({"how": "converted"}, {"weights": "per_step"}, r"gathers weights again .* To cast each shard once"),
        (
            {"how": "whole", "low": LOW}, {"weights": "per_step"},
            r"FSDP2 casts each shard once before it gathers, by param_dtype=torch.bfloat16. Leave weights at 'auto'",
        ),
        ({"how": "whole", "low": LOW}, {}, "FSDP2 casts the inputs of the model.* set cast_forward_inputs=False"),
    ],
    ids=["per_step", "per_step in a low dtype", "inputs"],
)  # fmt: skip
def test_what_shards_cannot_be_asked_for(
    two: Workers, model: dict[str, Any], settings: dict[str, Any], match: str
) -> None:
    refused(two, make_step, model, settings, match=match)


def shard_inside() -> list[Any]:
    model: Any = converted()
    shard(model[0])
    shard(model)
    step = step_of(model, **{**WINDOW, "scaler": fxamp.LossScaler(**SCALER)})
    results = [r for r in map(step, mine(OVERFLOWS, 2)) if r.reason != "accumulating"]
    return [[r.scale for r in results], [r.skipped for r in results], [2 * r.kept for r in results], weights_of(model)]


def test_a_part_of_a_model_that_was_converted_as_a_whole_may_be_sharded_by_itself(two: Workers) -> None:
    assert_as_alone(two(shard_inside), alone(OVERFLOWS, 2, policy=FP16, **WINDOW))


def reduce(how: str, x: Tensor) -> tuple[list[Tensor], list[bool], str]:
    """Train with windows of two; return weights, whether there are reduced gradients within each, and texts."""
    replica = sharded("whole", BF16)
    if how == "asked of FSDP":
        replica.set_requires_gradient_sync(False)
    step = step_of(replica, accumulate_steps=2, reduce="window" if how == "window" else "micro_batch")
    reduced = []
    for one in mine(x, 2):
        if not step(one).stepped:
            reduced.append(any(p.grad is not None for p in replica.parameters()))
    weights = weights_of(replica)
    step(mine(x, 2)[0])
    error = ""
    try:
        step.flush()
    except PolicyError as e:
        error = str(e)
    return weights, reduced, f"{dict(describe(step)).get('reduced', '')} {error}"


def test_gradients_are_reduced_in_each_micro_batch_or_once_a_window(two: Workers) -> None:
    (weights, each, text), *_ = two(reduce, "micro_batch", X[:8])
    assert (each, text.strip()) == ([True, True], "")
    for how in ("window", "asked of FSDP"):
        (other, once, text), *_ = two(reduce, how, X[:8])
        assert once == [False, False]
        assert "bytes of gradients of the whole model" in text
        assert "complete the window" in text
        for ours, theirs in zip(other, weights, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
