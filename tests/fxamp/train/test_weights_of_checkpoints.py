"""Weights that blocks under `torch.utils.checkpoint` read are cast once a window, for the first run and the second."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fxamp
from fxamp.train.step import TrainStep
from tests.support.training import WeightCasts

X = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(3))


class Blocks(nn.Module):
    """Blocks with a checkpoint each, and a head outside; the second block is read again behind the last."""

    def __init__(self, head: bool = True, again: bool = False, dropout: float = 0.1, **how: Any) -> None:
        super().__init__()
        self.how, self.again = {"use_reentrant": False, **how}, again
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16))
            for _ in range(3)
        )
        self.head = nn.Linear(16, 4) if head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *[self.blocks[1]] * self.again):
            x = x + checkpoint(block, x, **self.how)
        return self.head(x)


class InABranch(nn.Module):
    """A weight that is read in a branch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return torch.cond(x.sum() > 0, lambda v: self.second(v), lambda v: v.clone(), (x,))


def _selective() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


KINDS: dict[str, Callable[[], nn.Module]] = {
    "not reentrant": Blocks,
    "reentrant": functools.partial(Blocks, use_reentrant=True),
    "all inside": functools.partial(Blocks, head=False),
    "a block twice": functools.partial(Blocks, again=True),
    "selective": functools.partial(Blocks, context_fn=_selective),
}


def trained(
    kind: Callable[[], nn.Module], policy: str, weights: Any, **how: Any
) -> tuple[list[Tensor], int, TrainStep]:
    """Return losses and weights of two windows, how often a weight was cast in the second, and the step."""
    torch.manual_seed(0)
    model = kind()
    step = TrainStep(
        fxamp.convert(model, policy=policy), lambda y: y.square().mean(), AdamW(model.parameters(), lr=0.01),
        accumulate_steps=4, weights=weights, **how,
    )  # fmt: skip
    x = X.clone().requires_grad_()  # which a reentrant checkpoint needs
    results = [step(each).loss for each in x]
    with WeightCasts(model) as casts:
        results += [step(each).loss for each in x]
    return [*results, *model.parameters()], casts.count, step


@pytest.mark.default_case(policy="O2,dtype=bf16")
@pytest.mark.parametrize("policy", ["O1,dtype=bf16", "O2,dtype=bf16"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_weight_inside_a_checkpoint_is_cast_once_a_window(kind: Callable[[], nn.Module], policy: str) -> None:
    kept, casts, step = trained(kind, policy, "per_step")
    cast, each, _ = trained(kind, policy, "per_use")
    assert all(map(torch.equal, kept, cast))
    assert casts == len(step.weights.copies) == len(step.weights.kept) >= 6
    assert each > 4 * casts
    assert not step.weights.per_use


def test_auto_counts_both_runs_of_a_checkpoint() -> None:
    model = Blocks(head=False)
    view = fxamp.convert(model, (X[0],), policy="O1,dtype=bf16")
    step = TrainStep(view, lambda y: y.mean(), SGD(model.parameters(), lr=0.1))
    assert (step.weights.mode, step.weights.times) == ("per_step", 2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step_keeps_them_too(backend: str) -> None:
    kind = functools.partial(Blocks, dropout=0.0)  # a counter cannot look into ops that keep states of generators
    kept, casts, step = trained(kind, "O1,dtype=bf16", "per_step", compile=backend)
    cast, _, _ = trained(kind, "O1,dtype=bf16", "per_use", compile=backend)
    assert all(map(torch.equal, kept, cast))
    assert step.compiled is not None
    assert casts == len(step.compiled.leaves) == 14


def test_cast_once_and_frozen_keep_them() -> None:
    torch.manual_seed(0)
    model = Blocks()
    view, optimizer = fxamp.convert(model, (X[0],), policy="O1,dtype=bf16"), AdamW(model.parameters(), fused=True)
    counts = []
    with fxamp.cast_once(view):
        for _ in range(3):
            with WeightCasts(model) as casts:
                for x in X:
                    view(x).square().mean().backward()
            counts.append(casts.count)
            optimizer.step()
            optimizer.zero_grad()
    assert counts[1:] == [14, 14]
    view.eval()
    with torch.no_grad():
        expected = view(X[0])
        with fxamp.frozen(view), WeightCasts(model) as casts:
            assert torch.equal(view(X[0]), expected)
    assert casts.count == 0


def test_a_census_of_a_step_with_checkpoints_is_as_planned() -> None:
    *_, step = trained(Blocks, "O1,dtype=bf16", "per_step")
    found = fxamp.census(step, X[0])
    assert found, found.differences


def test_a_weight_that_is_cast_in_a_branch_is_named() -> None:
    model = InABranch()
    step = TrainStep(
        fxamp.convert(model, policy="O1,dtype=bf16"), lambda y: y.mean(), SGD(model.parameters(), lr=0.1),
        accumulate_steps=2,
    )  # fmt: skip
    step(X[0])
    assert set(step.weights.kept) == {"first.weight", "first.bias"}
    assert step.weights.per_use["second.weight"] == "is cast inside cond, which may run often, or not at all"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*checkpoint")  # of transformers, of its own settings and names
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_transformers_recompute_is_cast_once_a_window(reentrant: bool) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=40, num_hidden_layers=1, num_attention_heads=2, hidden_size=32, intermediate_size=64, use_cache=False
    )
    ids = torch.arange(16).view(2, 8)
    ran = []
    for weights in ("per_step", "per_use"):
        torch.manual_seed(0)
        model = BertForMaskedLM(config).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        view = fxamp.convert(model, policy="O1,dtype=bf16")
        step = TrainStep(view, None, AdamW(model.parameters()), accumulate_steps=4, weights=weights)
        losses = [step({"input_ids": ids, "labels": ids}).loss for _ in range(4)]
        with WeightCasts(model) as casts:
            losses += [step({"input_ids": ids, "labels": ids}).loss for _ in range(4)]
        ran.append(([*losses, *model.parameters()], casts.count))
        inside = sum(".layer." in path for path in step.weights.kept)
    assert all(map(torch.equal, ran[0][0], ran[1][0]))
    assert (ran[0][1], inside) == (len(step.weights.kept), 12)
    assert ran[1][1] == 4 * (len(step.weights.kept) + inside)  # blocks run twice
