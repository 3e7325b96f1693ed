"""A compiled training step is the step that is not compiled, in few graphs that are compiled once."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import fxamp
from fxamp.train.step import TrainStep

VOCABULARY, TOKENS = 61, 12


@pytest.fixture(autouse=True)
def _forget_other_sizes() -> None:
    """Let Dynamo begin with fixed sizes: for code that it has seen with several, it goes on with symbols."""
    torch.compiler.reset()


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    # Of a dropout in a low dtype AOTAutograd computes the backward by another kernel, with or without fxamp.
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=48, **small, **none))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    small = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48, "bos_token_id": 0, "eos_token_id": 0}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, use_cache=False, **small, **none))


def ids_of(seed: int, rows: int = 4) -> Tensor:
    return torch.randint(VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))


def loss_fn(output: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), ids.flatten())


@functools.cache
def _converted(name: str, policy: str) -> fxamp.ConvertedModule:
    torch.manual_seed(0)
    model = {"bert": _bert, "gpt2": _gpt2}[name]().train()
    return fxamp.convert(model, kwargs={"input_ids": ids_of(0)}, policy=policy)


def converted(name: str, policy: str = "O1,dtype=bf16") -> fxamp.ConvertedModule:
    return copy.deepcopy(_converted(name, policy))


def train(name: str, policy: str, windows: int, accumulate: int = 1, **settings: Any) -> tuple[TrainStep, list[Any]]:
    """Train with clipping and a scheduler; the last window is of smaller batches. Returns what a run shows."""
    model = converted(name, policy)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    step = TrainStep(
        model, loss_fn, optimizer, accumulate_steps=accumulate, max_grad_norm=1.0,
        scheduler=LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 4)), **settings,
    )  # fmt: skip
    shown: list[Any] = []
    torch.manual_seed(1)
    for window in range(windows):
        for micro in range(accumulate):
            ids = ids_of(window * accumulate + micro, 4 if window + 1 < windows else 3)
            result = step({"input_ids": ids}, ids)
        shown.append((result.loss.item(), result.scale, result.stepped, result.grad_norm.item()))  # type: ignore[union-attr]
    return step, [shown, [p.detach().clone() for p in model.parameters()]]


# ------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("name", "policy"), [("bert", "O1,dtype=bf16"), ("gpt2", "O2,dtype=fp16")])
def test_a_traced_step_gives_the_bits_of_the_eager_one(name: str, policy: str, accumulate: int) -> None:
    step, (shown, parameters) = train(name, policy, 6, accumulate, compile="aot_eager")
    _, (expected, theirs) = train(name, policy, 6, accumulate)
    assert shown == expected
    assert all(map(torch.equal, parameters, theirs))
    assert step.compiled is not None
    assert step.weights.mode == "per_step"
    assert not step.compiled.loss.breaks
    assert not step.compiled.loss.fallbacks
    assert step.compiled.loss.frames == 2  # the second for the smaller batch
