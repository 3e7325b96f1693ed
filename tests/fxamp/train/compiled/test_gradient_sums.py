"""Gradients of kept casts are added to those of the weights after backward, where nothing can tell the difference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import SGD

import fxamp
from fxamp.train.compiled.compile_settings import CompileSettings
from fxamp.train.compiled.compiled_region import Region
from fxamp.train.compiled.gradient_sums import sum_region
from fxamp.train.step import TrainStep
from fxamp.train.weights.held_nodes import nodes_are_held

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of a module that torch imports


class Two(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


class Choosing(nn.Module):
    """Two converted layers, of which a micro-batch may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(fxamp.convert(nn.Linear(8, 8), (x_of(0),), policy="O1,dtype=bf16") for _ in "ab")

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.layers[0](x)
        return self.layers[1](x) if both else x


def x_of(seed: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def step_of(model: nn.Module, weights: Any, loss: Callable[[Tensor], Tensor] = mean_square) -> TrainStep:
    torch.compiler.reset()
    return TrainStep(
        model, loss, SGD(model.parameters(), lr=0.1), weights=weights, accumulate_steps=3, compile="aot_eager"
    )


def run(step: TrainStep, inputs: Iterable[Any]) -> list[Tensor]:
    for given in inputs:
        step(given)
    return [p.detach().clone() for p in step.model.parameters()]


@pytest.fixture
def two() -> Any:
    torch.manual_seed(0)
    return fxamp.convert(Two(), (x_of(0),), policy="O1,dtype=bf16")


INPUTS = [x_of(seed) for seed in range(9)]


def test_they_are_added_by_one_graph_from_the_second_window_on(two: Any) -> None:
    expected = run(step_of(copy.deepcopy(two), "per_use"), INPUTS)
    step = step_of(two, "per_step")
    run(step, INPUTS[:3])
    assert step.compiled is not None
    assert step.compiled.sums.region.frames == 0
    assert all(map(torch.equal, run(step, INPUTS[3:]), expected))
    assert step.compiled.sums.region.frames == 1
    assert all(cast.alone for cast in step.weights.casts)
    assert len(step.weights.casts) == 4
    assert ("add gradients of kept casts", "1 compiled, 0 graph breaks, 0 recompiles, 0 fallbacks") in fxamp.report(
        step
    ).training


class Watched:
    """Notes the gradients that reach a weight in one of the ways that torch has for it."""

    def __init__(self, weight: nn.Parameter, way: str) -> None:
        self.seen: list[Tensor] = []
        if way == "hook":
            weight.register_hook(lambda gradient: self.seen.append(gradient.clone()))
        elif way == "hook after the sum":
            weight.register_post_accumulate_grad_hook(lambda w: self.seen.append(w.grad.clone()))
        else:  # as DistributedDataParallel and its relatives do
            self.node: Any = get_gradient_edge(weight).node
            self.node.register_prehook(lambda gradients: self.seen.append(gradients[0].clone()))


@pytest.mark.parametrize(("way", "at"), [
    *((way, at) for way in ("hook", "hook after the sum", "hook of the node") for at in (0, 6)),
    ("hook", 5), ("hook after the sum", 5),
])  # fmt: skip
def test_hooks_see_the_gradients_that_they_would_see_without(two: Any, way: str, at: int) -> None:
    """They are registered before a window, or within one (at 5), as soon as gradients would be added together."""
    found = []
    for weights in ("per_use", "per_step"):
        model = copy.deepcopy(two)
        step = step_of(model, weights)
        run(step, INPUTS[:at])
        watched = Watched(model.get_parameter("first.weight"), way)
        found.append([*run(step, INPUTS[at:]), *watched.seen])
        assert len(watched.seen) == 9 - at
    assert all(map(torch.equal, *found))
    assert [cast.alone for cast in step.weights.casts].count(False) == 1


def test_a_loss_that_reads_a_weight_from_some_micro_batch_on_has_the_sums_of_casts_at_every_use(
    two: Any,
) -> None:
    found = []
    for weights in ("per_use", "per_step"):
        model = copy.deepcopy(two)
        weight, penalty = model.get_parameter("first.weight"), {"on": False}

        def loss(output: Tensor, weight: Tensor = weight, penalty: dict[str, bool] = penalty) -> Tensor:
            return mean_square(output) + (weight.square().sum() if penalty["on"] else 0.0)

        step = step_of(model, weights, loss)
        run(step, INPUTS[:4])
        penalty["on"] = True
        found.append(run(step, INPUTS[4:]))
    assert all(map(torch.equal, *found))
    assert [cast.alone for cast in step.weights.casts].count(False) == 1


def test_layers_that_run_at_times_compile_nothing_anew() -> None:
    torch.manual_seed(0)
    model, found = Choosing(), []
    inputs = [(x, index % 4 != 1) for index, x in enumerate(INPUTS * 2)]
    for weights in ("per_use", "per_step"):
        step = step_of(copy.deepcopy(model), weights)
        found.append(run(step, inputs))
    assert all(map(torch.equal, *found))
    assert step.compiled is not None
    assert step.compiled.sums.region.frames == 1


def test_code_that_is_not_compiled_may_read_weights_so_theirs_are_added_by_autograd(two: Any) -> None:
    def loss(output: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return mean_square(output) + two.get_parameter("first.weight").square().sum()

    step = step_of(two, "per_step", loss)
    run(step, INPUTS)
    assert step.compiled is not None
    assert step.compiled.sums.region.frames == 0
    assert [cast.alone for cast in step.weights.casts] == [False] * 4


@pytest.mark.parametrize("together", [False, True])
def test_an_error_after_backward_leaves_no_gradient_for_the_next_window(
    two: Any, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxamp.train.weights.kept.one_launch_pays", lambda weight: together)

    def fail(casts: Any) -> None:
        raise ArithmeticError

    found = []
    for weights in ("per_use", "per_step"):
        step = step_of(copy.deepcopy(two), weights)
        run(step, INPUTS[:4])
        with monkeypatch.context() as patch:
            patch.setattr(step.compiled, "sums", fail)
            with pytest.raises(ArithmeticError):
                step(INPUTS[4])
        assert all(p.grad is None for p in step.model.parameters())
        found.append(run(step, INPUTS[:6]))
        assert step.windows == 3
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inductor_adds_to_the_bit_what_autograd_adds(dtype: torch.dtype) -> None:
    torch.compiler.reset()
    totals = [torch.randn(17, 5), torch.randn(33), torch.full((2,), torch.inf)]
    gradients = [torch.randn_like(total).mul(100).to(dtype) for total in totals]
    expected = [total + gradient.float() for total, gradient in zip(totals, gradients, strict=True)]
    Region("add gradients", sum_region, CompileSettings())(totals, gradients)
    assert all(map(torch.equal, totals, expected))


def test_copies_that_one_launch_fills_again_are_leaves_too(
    two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(step_of(copy.deepcopy(two), "per_use"), INPUTS)
    monkeypatch.setattr("fxamp.train.weights.kept.one_launch_pays", lambda weight: True)  # as on an accelerator
    step = step_of(two, "per_step")
    run(step, INPUTS[:6])
    lows = [cast.place.low for cast in step.weights.casts if cast.place is not None]
    assert [low.is_leaf for low in lows] == [True] * 4
    assert all(map(torch.equal, run(step, INPUTS[6:]), expected))
    assert all(
        cast.place is not None and cast.place.low is low for cast, low in zip(step.weights.casts, lows, strict=True)
    )


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have the dtype of their tensor")
def test_a_weight_that_wants_its_gradient_in_16_bits_has_it(two: Any) -> None:
    found = []
    for weights in ("per_use", "per_step"):
        step = step_of(copy.deepcopy(two), weights)
        weight: Any = step.model.get_parameter("first.weight")
        weight.grad_dtype = torch.bfloat16
        run(step, INPUTS[:5])
        assert weight.grad.dtype == torch.bfloat16
        found.append(run(step, INPUTS[5:]))
    assert all(map(torch.equal, *found))


def test_a_node_is_held_as_long_as_somebody_refers_to_it() -> None:
    weights = [nn.Parameter(torch.randn(3)) for _ in range(3)]
    assert nodes_are_held([]) == []
    assert nodes_are_held(weights) == [False, False, False]
    last, first = get_gradient_edge(weights[2]), get_gradient_edge(weights[0])
    assert nodes_are_held(weights) == [True, False, True]
    assert nodes_are_held([weights[2], weights[2]]) == [True, True]
    del last
    assert nodes_are_held(weights) == [True, False, False]
    del first
    assert nodes_are_held(weights) == [False, False, False]
