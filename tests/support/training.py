"""A small model converted once for each policy, and what tests of a training step compare of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp

X = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))
FP16, BF16 = "O1,dtype=fp16", "O2,dtype=bf16"
WEIGHTS = ("per_use", "per_step")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.norm(self.first(x))))


class Reads(TorchDispatchMode):
    """Counts reads of a tensor's numbers by the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def converted(policy: str = FP16, kind: Callable[[], nn.Module] = Net) -> Any:
    """Return a view of a new model, always with the same weights."""
    torch.manual_seed(0)
    return fxamp.convert(kind(), policy=policy)


def loss_times(output: Tensor, factor: float = 1.0) -> Tensor:
    return output.float().square().mean() * factor


def state(model: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)
