"""What overflows on one of two ranks runs in FP32 on both; they stay alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fxamp
from tests.support.workers import Workers

FP16 = "O1,dtype=fp16"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        grown = (self.first(x).tanh() + 2) * factor
        out: torch.Tensor = self.last(grown / factor)
        return out


def trained() -> tuple[list[str], list[tuple[int, str]], float, list[torch.Tensor]]:
    model = Net()
    rank, x = dist.get_rank(), torch.randn(8, 8)
    used: Any = DistributedDataParallel(fxamp.convert(model, policy=FP16))
    step = fxamp.TrainStep(
        used, lambda out: out.square().mean(), torch.optim.SGD(model.parameters(), lr=0.01),
        scaler=fxamp.LossScaler(init_scale=256.0, min_scale=1.0, max_skips=3),
    )  # fmt: skip
    factors = [1.0, 1.0] + [5e4 if rank == 1 else 1.0] * 6
    reasons: list[str] = []
    for factor in factors:
        try:
            reasons.append(step((x, torch.tensor(factor))).reason)
        except fxamp.ScaleCollapseError as e:
            reasons.append("overflow")
            step.switch(e.overflow.policy)
    return reasons, list(step.switches), step.scaler.get_scale(), [p.detach() for p in model.parameters()]


def test_ranks_recolour_together(two: Workers) -> None:
    first, second = two(trained)
    for reasons, switches, scale, _ in (first, second):
        assert reasons == ["stepped"] * 2 + ["overflow"] * 3 + ["stepped"] * 3
        assert [at for at, _ in switches] == [5]
        assert "ops./mul#0=fp32" in switches[0][1]
        assert scale == 32.0
    assert first[1] == second[1]
    assert all(torch.equal(a, b) for a, b in zip(first[3], second[3], strict=True))
