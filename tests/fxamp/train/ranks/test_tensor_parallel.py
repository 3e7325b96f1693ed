"""Parameters that are DTensors of tensor parallelism, alone and with FSDP2: one scale, one norm, one decision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxamp
from tests.support.small import FP16, INF, SCALER, X, blocks, converted, loss_of, step_of, weights_of
from tests.support.workers import Workers

WINDOW: dict[str, Any] = {"scaler": SCALER, "accumulate_steps": 2, "max_grad_norm": 0.05}
BATCHES = X[:12].clone()
BATCHES[6] = INF
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}  # of each block's two wide layers


def spread(how: str, mesh: Any) -> nn.Module:
    """Return the model with the wide layers of its blocks spread over a mesh, and the other parameters on each rank."""
    if how == "converted":  # which takes DTensors: its graph calls no layers that would make them
        model: nn.Module = converted(FP16)
        for path, p in list(model.named_parameters()):
            owner, _, name = path.rpartition(".")
            placement = Shard(0) if "up" in path else Shard(1) if "down.weight" in path else Replicate()
            part = nn.Parameter(distribute_tensor(p.detach(), mesh, [placement]))
            model.get_submodule(owner)._parameters[name] = part
        return model
    parts: list[nn.Module] = list(blocks())
    for block in parts[:2]:
        parallelize_module(block, mesh, PLAN)
    if how == "compiled":
        parts = [fxamp.compile(part, policy=FP16, backend="eager") for part in parts]
    return nn.Sequential(*parts)


def whole_loss(output: Any, factor: float = 1.0) -> Tensor:
    return loss_of(output.full_tensor() if hasattr(output, "full_tensor") else output, factor)


def seen(step: fxamp.TrainStep, batches: Any) -> list[Any]:
    """Return the scales, skipped steps, norms and the names of what overflowed."""
    results = [r for r in map(step, batches) if r.reason != "accumulating"]
    norms = [float(r.grad_norm) for r in results if r.grad_norm is not None]
    culprits = [event.culprit.removeprefix("0._orig_mod.").removeprefix("0.") for event in step.scaler.history]
    return [[r.scale for r in results], [r.skipped for r in results], norms, culprits]


def train(how: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = spread(how, mesh)
    step = step_of(model, loss_fn=whole_loss, **WINDOW)
    batches = [distribute_tensor(x, mesh, [Replicate()]) for x in BATCHES] if how == "converted" else BATCHES
    return [*seen(step, batches), weights_of(model)]


# Products are summed over ranks after each rank has rounded its own to FP16.
@pytest.mark.parametrize(("how", "bound"), [("plain", 1e-6), ("converted", 1e-5), ("compiled", 1e-5)])
def test_ranks_that_share_layers_train_as_one_that_has_them_whole(two: Workers, how: str, bound: float) -> None:
    model: nn.Module = blocks() if how == "plain" else converted(FP16)
    one = [*seen(step_of(model, **WINDOW), BATCHES), weights_of(model)]
    for rank in two(train, how):
        assert rank[:2] == one[:2]
        assert rank[1] == [False, False, False, True, False, False]
        assert rank[2] == pytest.approx(one[2], rel=1e-3, nan_ok=True)
        assert rank[3] == one[3]
        torch.testing.assert_close(rank[4], one[4], rtol=0, atol=bound)


def batches_of_many_sizes(_: str) -> list[bool]:
    model = blocks()
    for block in list(model)[:2]:
        parallelize_module(block, init_device_mesh("cpu", (dist.get_world_size(),)), PLAN)
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    equal = []
    for batch in (X.flatten(0, 1)[:size] for size in (8, 5, 3, 8)):
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(batch).float()
        equal.append(torch.equal(view(batch), expected))
    return equal


def test_a_view_of_layers_that_ranks_share_takes_batches_of_many_sizes(two: Workers) -> None:
    assert two(batches_of_many_sizes, "") == [[True] * 4] * 2


def overflow(p: Any) -> None:
    p.grad.to_local()[0].fill_(math.inf)


def overflow_in_a_part(clip: float | None) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    model = spread("plain", mesh)
    if dist.get_rank() == 1:
        model.get_parameter("1.up.weight").register_post_accumulate_grad_hook(overflow)
    before = weights_of(model)
    step = step_of(model, scaler={"init_scale": 4.0, "max_skips": 2}, max_grad_norm=clip)
    result = step(X[0])
    with pytest.raises(fxamp.ScaleCollapseError, match=r"First bad parameters: 1.up.weight \("):
        step(X[1])
    same = all(map(torch.equal, before, weights_of(model)))
    return [result.skipped, same, [(e.scale, e.culprit) for e in step.scaler.history]]


# What is clipped to an infinite norm is NaN.
@pytest.mark.parametrize(("clip", "kind"), [(None, "inf"), (1.0, "NaN")])
def test_an_overflow_in_the_part_that_one_rank_has_skips_the_step_on_all(
    two: Workers, clip: float | None, kind: str
) -> None:
    for rank in two(overflow_in_a_part, clip):
        assert rank == [True, True, [(4.0, f"1.up.weight ({kind})"), (2.0, f"1.up.weight ({kind})")]]


def train_on_a_grid() -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = spread("plain", mesh["tensor"])
    for block in model.children():
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    step = step_of(model, **WINDOW)
    # Each half of the ranks has one half of every window.
    mine = X[:24].clone()
    mine[13] = INF
    return [*seen(step, mine.unflatten(0, (-1, 2, 2))[:, mesh.get_local_rank("data")].flatten(0, 1)), weights_of(model)]


def test_a_grid_of_shards_and_shared_layers_trains_as_one_process(four: Workers) -> None:
    model = blocks()
    batches = X[:24].clone()
    batches[13] = INF
    one = [*seen(step_of(model, **{**WINDOW, "accumulate_steps": 4}), batches), weights_of(model)]
    for rank in four(train_on_a_grid):
        assert rank[:2] == one[:2]
        assert rank[2] == pytest.approx(one[2], rel=1e-5, nan_ok=True)
        assert rank[3] == one[3]
        torch.testing.assert_close(rank[4], one[4], rtol=0, atol=1e-6)
