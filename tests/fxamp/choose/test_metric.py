"""A metric of the user's is brought under a bound by few nodes in FP32, in few runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from passes.contract.errors import PolicyError

BF16 = "O1,dtype=bf16"
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


class Deep(nn.Module):
    """A deep net with one layer whose roundings are amplified."""

    def __init__(self, layers: int = 4, culprit: int = 2) -> None:
        super().__init__()
        self.layers, self.culprit = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers)), culprit

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            made = layer(x)
            x = torch.tanh(50 * made if i == self.culprit else made)
        return x


class Metric:
    """The distance of a view's output from the model's, and how often it was asked for."""

    def __init__(self, model: nn.Module) -> None:
        with torch.no_grad():
            self.exact = model(X)
        self.asked = 0

    def __call__(self, view: Any) -> Tensor:
        self.asked += 1
        with torch.no_grad():
            return (view(X) - self.exact).norm() / self.exact.norm()


def fp32_of(plan: fxamp.Plan) -> list[str]:
    return [key for key, colour in plan.policy.ops if colour == "fp32"]


def test_few_nodes_are_found_in_few_runs_and_hold_when_the_plan_is_replayed() -> None:
    model = Deep(8, 5)
    metric = Metric(model)
    low = float(metric(fxamp.convert(model, policy=BF16)))
    metric.asked = 0
    plan = fxamp.tune(model, X, loss=lambda out: out.square().mean(), metric=metric, bound=low / 2, policy=BF16)
    nodes = len(plan.decisions)
    assert metric.asked <= math.log2(nodes) + 8
    assert any(key.startswith("layers.5") for key in fp32_of(plan))
    assert len(fp32_of(plan)) <= nodes / 2
    assert float(metric(fxamp.convert(model, plan=plan))) <= low / 2
    assert any(note.startswith("tune: the metric is") for note in plan.notes)


def test_a_bound_that_is_kept_already_needs_no_node_and_one_run() -> None:
    model = Deep()
    metric = Metric(model)
    plan = fxamp.tune(fxamp.convert(model, policy=BF16), X, metric=metric, bound=1.0)
    assert (fp32_of(plan), metric.asked) == ([], 1)


def test_a_model_without_a_loss_is_searched_in_the_order_of_its_nodes() -> None:
    model = Deep()
    metric = Metric(model)
    plan = fxamp.tune(model, X, metric=metric, bound=1e-4, policy=BF16)
    assert float(metric(fxamp.convert(model, plan=plan))) <= 1e-4


def test_what_the_metric_does_to_the_model_is_undone() -> None:
    model = Deep()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def metric(view: Any) -> float:
        view(X).sum().backward()
        with torch.no_grad():
            model.get_parameter("layers.0.bias").add_(1)
        return 0.0

    fxamp.tune(model, X, metric=metric, bound=0.0, policy=BF16)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_bound_that_fp32_does_not_keep_and_bad_arguments_are_refused() -> None:
    model = Deep()
    with pytest.raises(PolicyError, match=r"nodes in FP32, and .* with none"):
        fxamp.tune(model, X, metric=lambda view: 1.0, bound=0.5, policy=BF16)
    with pytest.raises(PolicyError, match="inf with none"):
        fxamp.tune(model, X, metric=lambda view: math.nan, bound=0.5, policy=BF16)
    with pytest.raises(PolicyError, match="metric= returns a number, not Tensor"):
        fxamp.tune(model, X, metric=lambda view: X, bound=0.5, policy=BF16)
    for bound in (math.nan, math.inf, "0.5", True):
        with pytest.raises(PolicyError, match="bound is a finite number"):
            fxamp.tune(model, X, metric=lambda view: 0.0, bound=bound)  # type: ignore[arg-type]
