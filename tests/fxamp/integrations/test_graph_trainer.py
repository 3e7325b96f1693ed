"""The graph pass for GraphTrainer, on forward, loss and backward traced as one graph."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import fxamp
from fxamp.integrations import graph_trainer
from fxamp.trust.distance import distance
from passes.contract.errors import FxampError, PolicyError

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(6, 5, 8, generator=GENERATOR), torch.randint(4, (6,), generator=GENERATOR)
LOW = "O1,dtype=bf16"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.qkv, self.down = (
            nn.Linear(8, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 48),
            nn.Linear(16, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(F.gelu(self.up(x)))).chunk(3, -1)
        attended = torch.softmax(q @ k.mT / 4, -1) @ v
        out: Tensor = self.down(attended.mean(1))
        return out


def traced() -> tuple[Any, Any, list[Tensor]]:
    """Return the graph of a step, the model, and what both are called with: weights, inputs and targets."""
    torch.manual_seed(0)
    model = Net()
    names = [name for name, _ in model.named_parameters()]

    def step(*given: Tensor) -> Any:
        *weights, x, y = given
        loss = F.cross_entropy(functional_call(model, dict(zip(names, weights, strict=True)), (x,)), y)
        return loss, *torch.autograd.grad(loss, weights)

    given = [*model.parameters(), X, Y]
    return make_fx(step, tracing_mode="fake")(*given), model, given


def apart(got: Any, reference: Any) -> float:
    return distance(dict(enumerate(got)), dict(enumerate(reference)))  # type: ignore[arg-type]


def test_off_changes_nothing() -> None:
    graph, _, given = traced()
    converted = graph_trainer.graph_pass(graph, given, policy="O0")
    assert all(torch.equal(a, b) for a, b in zip(converted(*given), graph(*given), strict=True))


def test_the_loss_is_autocasts_and_gradients_are_as_exact() -> None:
    graph, model, given = traced()
    converted = graph_trainer.graph_pass(graph, given, policy=LOW)
    loss, *gradients = converted(*given)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(model(X), Y)
    assert torch.equal(loss, expected)
    assert {g.dtype for g in gradients} == {torch.float32}
    theirs = torch.autograd.grad(expected, list(model.parameters()))
    exact = graph(*given)[1:]
    assert apart(gradients, exact) <= 1.1 * apart(theirs, exact)
    decisions = fxamp.plan_of(converted).decisions
    products = [d for d in decisions if d.op in ("mm", "addmm", "bmm")]
    assert {d.colour for d in products} == {"bfloat16"}
    assert len(products) > 10, "those of the backward too"
    assert {d.colour for d in decisions if "nll_loss" in d.op or "_log_softmax" in d.op} == {"float32"}
    changed = graph_trainer.graph_pass(graph, given, policy=f"{LOW},ops.addmm=fp32")
    assert not torch.equal(changed(*given)[0], loss)


def test_on_cuda_what_autocast_runs_in_fp32_stays_in_fp32() -> None:
    graph, _, _ = traced()
    plan = fxamp.plan_of(graph_trainer.graph_pass(graph, policy=f"{LOW},device=cuda"))
    wide = {d.op for d in plan.decisions if d.colour == "float32"}
    assert {"_softmax", "_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward"} <= wide


def test_a_pipeline_is_registered_by_the_protocol_of_graph_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry of torchtitan, and how it runs passes, written down: torchtitan need not be installed."""
    registered: dict[str, Any] = {}
    registry = ModuleType("torchtitan.experiments.graph_trainer.registry")
    registry.register_pass_pipeline = lambda name: lambda made: registered.setdefault(name, made)  # type: ignore[attr-defined]
    passes = ModuleType("torchtitan.experiments.graph_trainer.passes")
    seen = []

    def theirs(gm: Any, example_inputs: Any, **_: Any) -> Any:
        seen.append(type(gm).__name__)
        return gm

    passes.construct_default_graph_passes = lambda result, config: [theirs]  # type: ignore[attr-defined]
    with pytest.raises(FxampError, match="install torchtitan"):
        graph_trainer.register()
    for name in ("torchtitan", "torchtitan.experiments", "torchtitan.experiments.graph_trainer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setitem(sys.modules, passes.__name__, passes)
    graph_trainer.register("mixed", LOW)
    gm, _, given = traced()
    for run in registered["mixed"](SimpleNamespace(gm=gm), SimpleNamespace()):
        gm = run(gm, tuple(given), compile_config=None)
    assert seen
    assert fxamp.plan_of(gm).casts > 0
    with pytest.raises(PolicyError, match="nearest name"):
        graph_trainer.register("mixed", "o1")
