"""Recurrent layers on fake tensors: one step tells what all of them give."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxamp._torch import python_kernels
from fxamp.capture.one_step import fakes_of_one_step
from passes._torch import FakeTensorMode, pytree
from tests.support.fakes import counted_fakes

LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "RNN": (nn.RNN, {}),
    "RNN, relu": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
    "GRU": (nn.GRU, {}),
    "GRU, batch first, two ways": (nn.GRU, {"batch_first": True, "bidirectional": True}),
    "GRU, two layers, dropout": (nn.GRU, {"num_layers": 2, "dropout": 0.5, "bias": False}),
    "LSTM": (nn.LSTM, {}),
    "LSTM, batch first, two layers, two ways": (nn.LSTM, {"batch_first": True, "num_layers": 2, "bidirectional": True}),
    "LSTM, projections": (nn.LSTM, {"proj_size": 4, "bidirectional": True}),
}


def described(value: Any) -> list[Any]:
    return [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_leaf) for t in pytree.tree_leaves(value)]


def on_fakes(layer: nn.Module, shape: tuple[int, ...], grad: bool, *contexts: Any) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True), python_kernels(), contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return layer(torch.empty(shape, requires_grad=grad))


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("mode", ["train", "input", "no_grad", "inference", "autocast"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_fake_is_what_the_decomposition_into_all_steps_gives(kind: str, mode: str, steps: int) -> None:
    build, options = LAYERS[kind]
    layer, shape = build(6, 5, **options), (3, steps, 6) if options.get("batch_first") else (steps, 3, 6)
    around: dict[str, Any] = {
        "no_grad": torch.no_grad, "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }  # fmt: skip
    ambient = around.get(mode, contextlib.nullcontext)
    found, expected = (
        on_fakes(layer, shape, mode == "input", ambient(), context)
        for context in (fakes_of_one_step(), contextlib.nullcontext())
    )
    assert described(found) == described(expected)


def test_as_many_fake_kernels_run_for_a_thousand_steps_as_for_ten() -> None:
    layer = nn.GRU(6, 5, bidirectional=True)
    counts = []
    for steps in (10, 1000):
        with counted_fakes() as count:
            on_fakes(layer, (steps, 3, 6), False, fakes_of_one_step())
        counts.append(count())
    assert counts[0] == counts[1] > 0


def test_no_steps_are_the_error_of_the_layer() -> None:
    errors = []
    for context in (fakes_of_one_step(), contextlib.nullcontext()):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            on_fakes(nn.GRU(6, 5), (0, 3, 6), False, context)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_whoever_traces_what_a_layer_calls_sees_all_of_its_steps() -> None:
    layer = nn.GRU(6, 5)

    def run(x: Tensor) -> Any:
        return layer(x)

    sizes = []
    for steps in (3, 6):
        with fakes_of_one_step():
            traced = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.zeros(steps, 3, 6))
        sizes.append(len(traced.graph.nodes))
    assert sizes[0] < sizes[1]


def test_a_run_on_numbers_is_the_layers_own() -> None:
    layer, x = nn.GRU(6, 5), torch.randn(4, 3, 6)
    with fakes_of_one_step():
        found = layer(x)
    assert all(map(torch.equal, found, layer(x)))
