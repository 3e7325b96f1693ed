"""`step.compiled.counts`: what Inductor made of a step, on the device of its user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import fxamp
from fxamp.measure.inductor import Counts
from tests.fxamp.measure.test_inductor import upcast_first_product
from tests.support.front_ends import FRESH

pytestmark = [
    pytest.mark.slow,
    *FRESH,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:dynamo_pgo force:UserWarning"),
]


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=500, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    ids = torch.randint(500, (2, 16))
    return BertForMaskedLM(config).train(), {"input_ids": ids, "labels": ids}


def net() -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), (torch.randn(16, 32),)


def step_of(model: nn.Module, loss: Any = None, compile: Any = True, **given: Any) -> fxamp.TrainStep:
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    return fxamp.TrainStep(view, loss, AdamW(model.parameters(), **given), compile=compile)


def counts_of(step: fxamp.TrainStep) -> Counts:
    assert step.compiled is not None
    assert step.compiled.counts is not None
    return step.compiled.counts


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def test_counts_of_bert_are_those_of_inductor_itself() -> None:
    from torch._inductor import compile_fx, config, metrics

    model, batch = bert()
    step = step_of(model, fused=True)
    metrics.reset()
    log = mock.patch.object(compile_fx.inductor_metrics_log, "isEnabledFor", return_value=True)
    with config.patch(force_disable_caches=True), log:
        step(batch)
    found = counts_of(step)
    assert found.moved_bytes == metrics.num_bytes_accessed > 0
    assert found.kernels == sum(elements > 0 for _, elements in metrics.nodes_num_elem) > 20
    assert 0 < found.cast_kernels < found.kernels
    assert 0 < found.saved_bytes < found.peak


def test_counts_are_of_what_the_last_call_ran() -> None:
    model, (x,) = net()
    step = step_of(model, square, compile={"dynamic": False}, fused=True)
    assert step.compiled is not None
    assert step.compiled.counts is None
    step(x)
    first = counts_of(step)
    step(torch.cat([x, x]))
    assert counts_of(step).moved_bytes > first.moved_bytes
    step(x)
    assert counts_of(step) == first


def test_a_compiled_update_is_counted() -> None:
    model, batch = net()
    step = step_of(model, square)
    step(batch)
    loss = counts_of(step)
    step(batch)  # before, the optimizer has no state
    parameters = sum(p.numel() for p in model.parameters())
    assert counts_of(step).moved_bytes >= loss.moved_bytes + 28 * parameters


def test_counts_are_known_of_kernels_out_of_a_cache() -> None:
    found: list[Counts] = []
    for _ in range(2):
        torch.compiler.reset()
        model, batch = net()
        step = step_of(model, square, fused=True)
        step(batch)
        found.append(counts_of(step))
    assert found[0] == found[1]
    assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] >= 2


def test_a_pass_that_upcasts_a_product_changes_them() -> None:
    found: list[Counts] = []
    for options in ({}, {"post_grad_custom_pre_pass": upcast_first_product}):
        torch.compiler.reset()
        model, batch = net()
        step = step_of(model, square, compile={"options": options}, fused=True)
        step(batch)
        found.append(counts_of(step))
    assert found[1].moved_bytes > found[0].moved_bytes
    assert found[1] != found[0]


@pytest.mark.parametrize(
    "compile", ["aot_eager", {"options": {"_post_fusion_custom_pass": lambda nodes: nodes}}], ids=["backend", "pass"]
)
def test_without_a_record_there_are_none(compile: Callable[..., Any] | str | dict[str, Any]) -> None:
    model, batch = net()
    step = step_of(model, square, compile=compile, fused=True)
    step(batch)
    assert step.compiled is not None
    assert step.compiled.counts is None
