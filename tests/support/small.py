"""One small model and its data, for ranks: without batch norm and dropout, so that ranks can be compared with one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

import fxamp

WIDTH = 16
X = torch.randn(48, 3, WIDTH, generator=torch.Generator().manual_seed(0))
INF = torch.full_like(X[0], math.inf)
SCALER: Any = {"init_scale": 2.0**10, "growth_interval": 4}  # one rank's gradients fit into FP16 at it, and it grows
FP16, BF16 = "O1,dtype=fp16", "O1,dtype=bf16"


class Block(nn.Module):
    """A layer with a norm, as blocks of a transformer have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


def blocks() -> nn.Sequential:
    """Return two blocks and a head, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2))


def converted(policy: str = FP16) -> Any:
    """Return the model converted as a whole, in a copy of its own."""
    return fxamp.convert(blocks(), policy=policy)


def loss_of(output: Tensor, factor: float = 1.0) -> Tensor:
    """Return a loss, of a size that a test can ask for."""
    return output.square().mean() * factor


def step_of(model: nn.Module, **settings: Any) -> fxamp.TrainStep:
    """Return a step with momentum, so that steps leave a trace; a scaler may be given as its settings."""
    if isinstance(settings.get("scaler"), dict):
        settings["scaler"] = fxamp.LossScaler(**settings["scaler"])
    optimizer = settings.pop("optimizer", None) or SGD(model.parameters(), lr=0.05, momentum=0.9)
    return fxamp.TrainStep(model, settings.pop("loss_fn", loss_of), optimizer, **settings)


def weights_of(model: nn.Module) -> list[Tensor]:
    """Return copies of a model's parameters, whole where they are spread over ranks."""
    found: list[Any] = [p.detach() for p in model.parameters()]
    return [p.full_tensor().clone() if hasattr(p, "full_tensor") else p.clone() for p in found]


class NormByHand(nn.Module):
    """A norm whose squares FP16 does not hold: `rsqrt` makes 0 of them, and every output is the bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, 4] for [n, 8]."""
        h = self.a(x) * 1000
        out: Tensor = self.b(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))
        return out
