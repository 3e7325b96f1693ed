"""Replicas whose step has company: optimizers that evaluate the loss, averages of weights, two low dtypes, Inductor."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxamp
from tests.fxamp.train.ranks.test_replicas import OVERFLOWS, alone, assert_as_alone, mine, train
from tests.support.small import BF16, FP16, INF, SCALER, X, blocks, converted, step_of, weights_of
from tests.support.workers import Workers


def by_lbfgs(x: Tensor, counts: list[int], search: str | None) -> list[Any]:
    """Train by LBFGS on this rank's share of each window; where shares are not even, windows are flushed."""
    model: Any = converted(FP16)
    rank = 0
    if len(counts) > 1:
        model, rank = DistributedDataParallel(model), dist.get_rank()
    optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=search)
    even = len({*counts}) == 1
    step = step_of(model, optimizer=optimizer, scaler=SCALER, accumulate_steps=counts[0] + (not even))
    results = []
    for window in x.split(sum(counts)):
        for one in window[sum(counts[:rank]) :][: counts[rank]]:
            result = step(one)
        results.append(result if even else step.flush())
    evaluated = optimizer.state[optimizer._params[0]]["func_evals"]
    seen = [[r.scale for r in results], [r.skipped for r in results], [r.kept for r in results], evaluated]
    return [*seen, weights_of(model)]


@pytest.mark.parametrize(
    ("counts", "search"), [([2, 2], None), ([2, 2], "strong_wolfe"), ([3, 1], "strong_wolfe"), ([2, 0], None)], ids=str
)
def test_ranks_evaluate_the_loss_of_all_as_often_as_one_process(
    two: Workers, counts: list[int], search: str | None
) -> None:
    total = sum(counts)
    x = X[: 3 * total].clone()
    x[total] = INF if counts == [2, 2] else x[total]  # on the first rank alone
    one = by_lbfgs(x, [total], search)
    assert one[1] == [False, counts == [2, 2], False]
    for rank in (ranks := two(by_lbfgs, x, counts, search)):
        assert rank[:4] == one[:4]
        torch.testing.assert_close(rank[4], one[4], rtol=0, atol=1e-5)
        assert all(map(torch.equal, rank[4], ranks[0][4]))


def averaged(x: Tensor, accumulate_steps: int, wrapped: bool) -> list[Any]:
    model: Any = DistributedDataParallel(converted(FP16)) if wrapped else converted(FP16)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    swa = AveragedModel(model.module if wrapped else model)
    step = step_of(model, scaler=SCALER, accumulate_steps=accumulate_steps, ema=[ema, swa])
    for one in mine(x, accumulate_steps) if wrapped else x:
        step(one)
    return [int(ema.n_averaged), *weights_of(ema), *weights_of(swa)]


def test_averages_take_in_the_steps_that_all_ranks_took(two: Workers) -> None:
    first, second = two(averaged, OVERFLOWS, 2, True)
    one = averaged(OVERFLOWS, 4, False)
    assert first[0] == one[0] == 5  # of six windows
    torch.testing.assert_close(first, one, rtol=0, atol=1e-6)
    assert all(map(torch.equal, first[1:], second[1:]))


@functools.cache
def of_two_dtypes() -> nn.Module:
    parts = [
        fxamp.convert(part, (X[0],), policy=policy, check=False)
        for part, policy in zip(blocks(), (FP16, BF16, FP16), strict=True)
    ]
    return nn.Sequential(*parts)


def by_two_dtypes(x: Tensor, accumulate_steps: int, wrapped: bool, compile: bool | str) -> list[Any]:
    model: Any = copy.deepcopy(of_two_dtypes())
    model = DistributedDataParallel(model) if wrapped else model
    step = step_of(model, scaler=SCALER, accumulate_steps=accumulate_steps, max_grad_norm=0.05, compile=compile)
    results = [step(one) for one in (mine(x, accumulate_steps) if wrapped else x)]
    results = [r for r in results if r.reason != "accumulating"]
    return [[r.scale for r in results], [r.skipped for r in results], [r.kept for r in results], weights_of(model)]


@pytest.mark.parametrize("compile", [False, pytest.param("aot_eager", marks=pytest.mark.matrix)])
def test_blocks_of_two_low_dtypes_share_one_scale(two: Workers, compile: bool | str) -> None:
    one = by_two_dtypes(OVERFLOWS, 4, False, compile=False)
    assert one[1] == [False, False, True, False, False, False]
    assert_as_alone(two(by_two_dtypes, OVERFLOWS, 2, True, compile), one)


def by_inductor(settings: dict[str, Any]) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modules that torch imports
        return train(OVERFLOWS, {}, {**settings, "compile": True})


@pytest.mark.matrix  # which builds kernels
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of a module that torch imports
@pytest.mark.parametrize("weights", ["per_use", "per_step"])
def test_a_replica_compiled_by_inductor_trains_as_one_process(two: Workers, weights: str) -> None:
    settings = {"policy": FP16, "scaler": SCALER, "accumulate_steps": 2, "max_grad_norm": 0.05, "weights": weights}
    one = alone(OVERFLOWS, 2, **settings, compile=True)
    assert one[1] == [False, False, True, False, False, False]
    assert_as_alone(two(by_inductor, settings), one)
