"""Reinforcement learning in FP16: what generates and what is trained give the same log-probabilities, bit for bit.

A policy is sampled from without gradients and trained with them. Where the two disagree by rounding alone, the ratio of
their probabilities is not 1 before the first update, and training drifts.
"""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

import fxamp
from fxamp.train.step import TrainStep

VOCABULARY, WIDTH, HEADS, TOKENS = 13, 16, 2, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.blocks = nn.Sequential(Block())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.norm(self.blocks(self.embedding(ids))), self.embedding.weight)


def make(way: str, policy: str) -> Any:
    if way == "backend":
        return fxamp.compile(language_model(), policy=policy, backend="eager")
    converted = _converted(policy)
    if way == "replayed":
        plan = fxamp.Plan.from_json(fxamp.plan_of(converted).to_json())
        return fxamp.convert(language_model(), (prompts(),), plan=plan)
    return copy.deepcopy(converted)


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel()


@functools.cache
def _converted(policy: str) -> Any:
    return fxamp.convert(language_model(), (prompts(),), policy=policy)  # for other sizes too


@functools.cache
def prompts() -> Tensor:
    return torch.randint(VOCABULARY, (16, TOKENS), generator=torch.Generator().manual_seed(1))


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


@torch.no_grad()
def sample(policy: nn.Module, ids: Tensor, generator: torch.Generator) -> Tensor:
    for _ in range(3):
        chosen = torch.multinomial(policy(ids)[:, -1].softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, chosen], 1)
    return ids


WAYS = ("ahead of time", "replayed", "backend")


@pytest.mark.parametrize(
    ("way", "policy"),
    [
        ("ahead of time", "O1,dtype=fp16"),
        *(pytest.param(way, "O1,dtype=fp16", marks=pytest.mark.matrix) for way in ("replayed", "backend")),
        *(
            pytest.param(way, policy, marks=pytest.mark.matrix)
            for way, policy in itertools.product(WAYS, ("O2,dtype=fp16", "O2,dtype=bf16"))
        ),
    ],
)
def test_with_and_without_gradients_log_probabilities_are_the_same_to_the_bit(way: str, policy: str) -> None:
    torch._dynamo.reset()
    model = make(way, policy)
    with torch.no_grad():
        generating = log_probabilities(model.eval()(prompts()), prompts())
    training = log_probabilities(model.train()(prompts()), prompts())
    assert training.requires_grad
    assert torch.equal(generating, training.detach())
    with torch.inference_mode():
        assert torch.equal(log_probabilities(model(prompts()), prompts()), generating)


@pytest.mark.parametrize(
    ("way", "weights"),
    [
        ("ahead of time", "per_step"),
        pytest.param("backend", "auto", marks=pytest.mark.matrix),
        pytest.param("ahead of time", "per_use", marks=pytest.mark.matrix),
    ],
)
def test_the_first_ratio_of_every_update_is_one_while_a_policy_is_trained_in_fp16(way: str, weights: Any) -> None:
    torch._dynamo.reset()
    model = make(way, "O1,dtype=fp16")  # which is called with half a batch too
    if way == "backend":
        model(prompts())  # captured now, so that the loss scale is known from the first window on
    ratios: list[Tensor] = []

    def loss(logits: Tensor, target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ids, before, advantage = target
        ratio = (log_probabilities(logits, ids) - before).exp()
        ratios.append(ratio.detach())
        return -(ratio * advantage)[:, -3:].mean()

    optimizer = AdamW(model.parameters(), lr=0.03)
    step = TrainStep(model, loss, optimizer, accumulate_steps=2, weights=weights, max_grad_norm=1.0)
    generator = torch.Generator().manual_seed(2)
    rewards = []
    for _ in range(12):
        for half in prompts().split(8):
            ids = sample(model, half, generator)
            with torch.no_grad():
                before = log_probabilities(model(ids), ids)
            reward = (ids[:, -3:] % 2 == 0).float().mean(1, keepdim=True)
            rewards.append(reward.mean())
            result = step(ids, (ids, before, reward - reward.mean()))
    assert all(bool((ratio == 1).all()) for ratio in ratios)
    assert result.scale > 1
    assert len(ratios) == 24
    assert torch.stack(rewards[-8:]).mean() > torch.stack(rewards[:8]).mean()
