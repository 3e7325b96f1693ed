"""The demo: two small models trained on real digits, in FP32, under `torch.autocast`, and by fxamp.

Every variant starts from the same weights and sees the same batches. Their steps take turns, so that the times compare.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

from passes.errors import FxampError

from .convert import convert
from .measure import StepCounts, Timing, interleaved, step_counts
from .train import TrainStep

BATCH = 64
TEST_IMAGES = 597  # a third of the 1,797; the rest is trained on
FP32, AUTOCAST, O1, O2 = VARIANTS = ("FP32", "torch.autocast", "fxamp O1", "fxamp O2")


class LeNet5(nn.Module):
    """LeCun's digit classifier, for digits of 8x8 enlarged to 16x16."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 2 * 2, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Give the logits of the ten digits."""
        x = F.interpolate(x, scale_factor=2.0)
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        logits: Tensor = self.fc3(F.relu(self.fc2(x)))
        return logits


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention, then a perceptron, to the tokens."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(attended)
        tokens_out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return tokens_out


class VisionTransformer(nn.Module):
    """A vision transformer over the sixteen 2x2 patches of a digit."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.positions = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Give the logits of the ten digits."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(x)).mean(dim=1))
        return logits


@dataclass(frozen=True)
class Task:
    """A model of the demo and how long and how fast it learns."""

    name: str
    build: Callable[[], nn.Module]
    steps: int
    learning_rate: float


TASKS = (Task("LeNet-5", LeNet5, 600, 4e-3), Task("vision transformer", VisionTransformer, 600, 2e-3))


@dataclass(frozen=True)
class Row:
    """One row of the demo's table; accuracies are in percent, one per seed."""

    model: str
    variant: str
    accuracies: tuple[float, ...]
    time_ratio: float
    counts: StepCounts

    @property
    def accuracy(self) -> float:
        """Give the mean over the seeds."""
        return statistics.mean(self.accuracies)


@dataclass(frozen=True)
class Digits:
    """Scikit-learn's handwritten digits, on the device."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Give random batches for ever, each moved by up to a pixel, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self.train_x), generator=generator)
            for rows in order.split(BATCH):
                down, right = torch.randint(3, (2,), generator=generator).tolist()
                if len(rows) == BATCH:
                    rows = rows.to(self.train_x.device)
                    padded = F.pad(self.train_x[rows], (1, 1, 1, 1))
                    yield padded[..., down : down + 8, right : right + 8].contiguous(), self.train_y[rows]


@dataclass(frozen=True)
class Trainee:
    """A model in training, one variant of it: what a step does, the loss of a batch, the logits of a batch."""

    step: Callable[[], object]
    loss: Callable[[Tensor, Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    model: nn.Module
