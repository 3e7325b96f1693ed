"""Random runs of a TrainStep: neither kept casts nor compilation change a bit, whatever happens in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import fxamp
from fxamp.train.weights import Mode
from tests.support.helpers import saved

SEEDS = 200
QUICK = (44, 7)  # with a weight that is read twice, and a layer that is called twice
WAYS: tuple[tuple[Mode, Any], ...] = (("per_step", False), ("per_use", "aot_eager"), ("per_step", "aot_eager"))
OPTIMIZERS: tuple[Callable[[Any], Optimizer], ...] = (
    lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: AdamW(parameters, lr=0.01),
    lambda parameters: AdamW(parameters, lr=0.01, fused=True),
)
EVENTS = {
    "micro-batch": 10, "flush": 1, "save and load": 1, "evaluate": 1, "edit a weight": 1, "freeze or thaw": 1,
    "new learning rate": 1, "overflow": 1,
}  # fmt: skip
WORDS, WIDTH = 12, 16


class Net(nn.Module):
    """A small language model, in which weights are read once, by two layers, or as they are and in 16 bits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.kind = kind
        if kind == "tied":
            self.head.weight = self.words.weight
        if kind == "shared":
            self.down = self.up

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        x = x + F.gelu(self.up(self.norm(x)))
        if self.kind == "read twice":
            x = x + 0.1 * (x @ self.up.weight)
        return self.head(x + F.relu(self.down(x)))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Run:
    """One run: all that is random in it comes from the seed, and is the same in every way to run it."""

    def __init__(self, seed: int, weights: Mode, compile: Any) -> None:
        torch.compiler.reset()
        torch.manual_seed(seed)
        self.seed, self.random = seed, random.Random(seed)
        choose = self.random.choice
        self.model = Net(choose(["plain", "tied", "shared", "read twice"]))
        low, level = choose(["bf16", "fp16"]), choose(["O1", "O2"])
        self.converted = fxamp.convert(self.model, (self.words_of(0),), policy=f"{level},dtype={low}")
        losses = [loss_of, self.with_a_penalty, self.of_two_forwards]
        self.optimizer = choose(OPTIMIZERS)(self.model.parameters())
        self.scaled = low == "fp16"
        self.step = fxamp.TrainStep(
            self.converted, choose(losses), self.optimizer, weights=weights, compile=compile,
            scaler=fxamp.LossScaler(init_scale=2.0**10, growth_interval=2) if self.scaled else None,
            accumulate_steps=choose([1, 2, 3]), max_grad_norm=choose([None, 0.3]),
            scheduler=choose([None, LambdaLR(self.optimizer, lambda epoch: 1 / (1 + epoch))]),
        )  # fmt: skip
        self.within = False  # whether a window is open

    def with_a_penalty(self, output: Tensor, target: Tensor) -> Tensor:
        return loss_of(output, target) + 1e-3 * self.model.head.weight.square().sum()

    def of_two_forwards(self, output: Tensor, target: Tensor) -> Tensor:
        return loss_of(output, target) + 0.1 * loss_of(self.converted(target), target)

    def words_of(self, index: int) -> Tensor:
        return torch.randint(WORDS, (3, 5), generator=torch.Generator().manual_seed(100 * self.seed + index))

    def shown(self) -> list[Any]:
        """Let events happen, and return what they show, and the parameters at the end."""
        events = self.random.choices(list(EVENTS), list(EVENTS.values()), k=self.random.randint(6, 14))
        seen = [(event, self.happens(event, 2 * index)) for index, event in enumerate(events)]
        return [*seen, *((name, p.detach().clone()) for name, p in self.model.named_parameters())]

    def happens(self, event: str, index: int) -> Any:
        ids, target = self.words_of(index), self.words_of(index + 1)
        if event == "micro-batch" or (event == "overflow" and self.scaled and not self.within):
            result = self.step(ids, target, scale=2.0**60 if event == "overflow" else None)
            self.within = result.reason == "accumulating"
            return result.loss, result.stepped, result.scale
        if event == "flush":
            self.within = False
            return self.step.flush().stepped
        if event == "save and load":
            self.step.load_state_dict(saved(self.step.state_dict(), weights_only=True))
        elif event == "evaluate":
            with torch.no_grad():
                return self.converted(ids)
        elif event == "edit a weight":
            with torch.no_grad():
                self.random.choice([self.model.up, self.model.down]).weight.mul_(0.9)
        elif event == "freeze or thaw" and not self.within:
            weight = self.random.choice([self.model.up.weight, self.model.norm.weight])
            weight.requires_grad_(not weight.requires_grad)
        elif event == "new learning rate":
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"].fill_(0.05) if isinstance(group["lr"], Tensor) else 0.05
        return None


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in QUICK else pytest.mark.trial) for seed in range(SEEDS)]
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # where the first step is skipped
def test_a_random_run_has_the_same_bits_in_every_way(seed: int) -> None:
    expected = Run(seed, "per_use", False).shown()
    for weights, compile in WAYS:
        found = Run(seed, weights, compile).shown()
        assert len(found) == len(expected)
        for a, b in zip(expected, found, strict=True):
            assert equal(a, b), f"{b[0]} differs with weights={weights!r}, compile={compile!r}"
