"""The graph pass for GraphTrainer, on forward, loss and backward traced as one graph."""

from __future__ import annotations

import copy
import functools
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
from passes.contract.errors import FxampError, PolicyError
from tests.support.baseline import distance

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(6, 5, 8, generator=GENERATOR), torch.randint(4, (6,), generator=GENERATOR)
LOW = "O1,dtype=bf16"


class Net(nn.Module):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.up, self.norm, self.qkv, self.down = (
            nn.Linear(8, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 48),
            nn.Linear(16, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(F.gelu(self.up(x)))).chunk(3, -1)
        q = q + 0 * q.sin()  # FP32, as positions that rotate make it
        torch._assert_async(q.isfinite().all(), "not finite")
        heads = (t.unsqueeze(1) for t in (q, k, v))
        fused = F.scaled_dot_product_attention(*heads).squeeze(1) if self.fused else None
        attended = torch.softmax(q @ k.mT / 4, -1) @ v if fused is None else fused
        out: Tensor = self.down(attended.mean(1))
        return out


def traced(fused: bool = False) -> tuple[Any, Any, list[Tensor]]:
    """Return the graph of a step, the model, and what both are called with: weights, inputs and targets."""
    torch.manual_seed(0)
    model = Net(fused)
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


@pytest.mark.parametrize("fused", [False, True])
def test_the_loss_is_autocasts_and_gradients_are_as_exact(fused: bool) -> None:
    graph, model, given = traced(fused)
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
    assert len(products) > (7 if fused else 10), "those of the backward too"
    attention = [d.colour for d in decisions if "dot_product" in d.op]
    assert attention == ["bfloat16"] * 2 * fused, "forward and backward"
    assert {d.colour for d in decisions if "nll_loss" in d.op or "_log_softmax" in d.op} == {"float32"}
    changed = graph_trainer.graph_pass(graph, given, policy=f"{LOW},ops.addmm=fp32")
    assert not torch.equal(changed(*given)[0], loss)


def test_a_model_of_torchtitan_by_its_own_tracer_has_autocasts_loss() -> None:
    """Its Llama, with the attention of torch: that of its language models is made for a GPU."""
    tracer = pytest.importorskip("torchtitan.experiments.graph_trainer.make_fx_tracer")
    apply = pytest.importorskip("torchtitan.experiments.graph_trainer.passes").apply_graph_passes
    attention = pytest.importorskip("torchtitan.models.common.attention").ScaledDotProductAttention
    config = copy.deepcopy(pytest.importorskip("torchtitan.models.llama3").model_registry("debugmodel").model)
    del config.layers[2:]
    for layer in config.layers:
        layer.attention.inner_attention = attention.Config()
    torch.manual_seed(0)
    model = config.build()
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    tokens, labels = torch.randint(2048, (2, 2, 32))
    given = (tokens, torch.arange(32).expand(2, 32), labels)

    def step(tokens: Tensor, positions: Tensor, labels: Tensor) -> list[Tensor]:
        loss = F.cross_entropy(model(tokens, positions).flatten(0, 1).float(), labels.flatten())
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    def converted(policy: str) -> list[Tensor]:
        result = tracer.minimal_fx_tracer(step, module=model)(*given)
        run = functools.partial(graph_trainer.graph_pass, policy=policy)
        result.gm = apply(result.gm, result.example_inputs, [run])
        outputs: list[Tensor] = tracer.run_traced(result, module=model)(*given)
        return outputs

    pipelines = pytest.importorskip("torchtitan.experiments.graph_trainer.registry").PASS_PIPELINE_REGISTRY
    assert graph_trainer.register("mixed", LOW) is pipelines["mixed"]
    exact = step(*given)
    assert all(torch.equal(a, b) for a, b in zip(converted("O0"), exact, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        loss, *theirs = step(*given)
    ours = converted(LOW)
    assert torch.equal(ours[0], loss)
    assert apart(ours[1:], exact[1:]) <= 1.01 * apart(theirs, exact[1:])


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
    monkeypatch.setitem(sys.modules, registry.__name__, None)
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
