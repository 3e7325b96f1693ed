"""A weight that is read several times has the gradient of casts at every use, to the bit, where its cast is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import fxamp
from fxamp.train.step import TrainStep


class Tied(nn.Module):
    """An embedding that is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.embedding(ids), self.embedding.weight)


IDS = torch.randint(13, (64,), generator=torch.Generator().manual_seed(0))


def gradient(model: nn.Module, weights: Any) -> Tensor:
    model = copy.deepcopy(model)
    weight = model.get_parameter("embedding.weight")

    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits, ids) + 0.1 * weight.square().sum()

    torch.compiler.reset()
    step = TrainStep(
        model, loss, SGD([weight], lr=0.1), weights=weights, accumulate_steps=2, scaler=None, compile="aot_eager"
    )
    step(IDS, IDS)
    assert weight.grad is not None
    return weight.grad


def test_a_weight_that_the_loss_reads_beside_two_others_sums_as_with_casts_at_every_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = fxamp.convert(Tied(), (IDS,), policy="O1,dtype=bf16")
    expected = gradient(model, "per_use")
    assert torch.equal(gradient(model, "per_step"), expected)
    monkeypatch.setattr("fxamp.train.compiled.compiled_step.keep_order_of_sums", lambda *_: None)
    assert not torch.equal(gradient(model, "per_step"), expected)
