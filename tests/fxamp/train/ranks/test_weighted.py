"""Micro-batches of several ranks that have weights: the gradient is that of all of them together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import fxamp
from tests.support.ranks import shard
from tests.support.small import X, blocks, step_of
from tests.support.workers import Workers

SIZES = ((1, 3), (2, 6))  # rows of the micro-batches of each rank


def batches(rank: int) -> list[Tensor]:
    first = sum(sum(sizes) for sizes in SIZES[:rank])
    rows = X.flatten(0, 1)
    out = []
    for size in SIZES[rank]:
        out.append(rows[first : first + size])
        first += size
    return out


def of_all() -> Tensor:
    return torch.cat([batch for rank in (0, 1) for batch in batches(rank)])


def gradients(how: str, as_tensor: bool, flush: bool) -> list[Tensor]:
    """Return the gradients of one window as an optimizer sees them."""
    view = fxamp.convert(blocks(), policy="O0")
    model: Any = DistributedDataParallel(view) if how == "replicas" else shard(view)
    seen: list[Any] = []
    step = step_of(
        model, loss_fn=lambda output: output.square().mean(), optimizer=SGD(model.parameters(), lr=0.1),
        accumulate_steps=3 if flush else 2, on_gradients=lambda ps: seen.extend(p.grad.clone() for p in ps),
    )  # fmt: skip
    for batch in batches(dist.get_rank()):
        step(batch, weight=torch.tensor(float(len(batch))) if as_tensor else len(batch))
    if flush:
        step.flush()
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in seen]


@pytest.mark.parametrize(
    ("how", "as_tensor", "flush"),
    [("replicas", False, False), ("replicas", True, True), ("shards", False, False), ("shards", True, False)],
)
def test_gradients_of_unequal_micro_batches_on_two_ranks_are_those_of_all_rows_together(
    two: Workers, how: str, as_tensor: bool, flush: bool
) -> None:
    whole = fxamp.convert(blocks(), policy="O0")
    whole(of_all()).square().mean().backward()
    expected = torch.cat([p.grad.flatten() for p in whole.parameters()])
    for ours in two(gradients, how, as_tensor, flush):
        found = torch.cat([g.flatten() for g in ours])
        assert (found - expected).norm() / expected.norm() < 1e-6
