"""Graphs that the user brings: shapes that they lack are found by example inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fxamp


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, *, scale: Tensor, shift: Tensor) -> Tensor:
        return self.layer(x) * scale + shift


def _without_shapes() -> tuple[GraphModule, Tensor, dict[str, Any]]:
    x, named = torch.randn(4, 6), {"scale": torch.rand(6), "shift": torch.randn(6)}
    graph: Any = torch.export.export(_Scaled(), (x,), named, strict=False).module(check_guards=False)
    for node in graph.graph.nodes:
        node.meta.pop("val", None)
    return graph, x, named


def test_keyword_inputs_fill_in_the_shapes_of_an_exported_graph_in_any_order() -> None:
    graph, x, named = _without_shapes()
    backwards = dict(reversed(named.items()))
    converted = fxamp.convert(graph, (x,), backwards, policy="O1,dtype=bf16")
    with torch.autocast("cpu", torch.bfloat16):
        expected = graph(x, **named)
    assert torch.equal(converted(x, **named), expected)


def test_a_keyword_input_that_an_exported_graph_needs_and_is_not_given_is_named() -> None:
    graph, x, named = _without_shapes()
    del named["shift"]
    with pytest.raises(fxamp.CaptureError, match="the graph rejects the example inputs: KeyError: 'shift'"):
        fxamp.convert(graph, (x,), named)


class _Mean(nn.Module):
    """Rebinds a buffer to a value of another dtype, which an exported graph copies into the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(6, 6), nn.Buffer(torch.zeros(6))

    def forward(self, x: Tensor, wide: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + wide.mean(0)
        return self.layer(x)


def test_a_buffer_that_is_rebound_in_another_dtype_keeps_its_own() -> None:
    x, wide = torch.randn(4, 6), torch.randn(4, 6, dtype=torch.float64)
    model = _Mean()
    converted = fxamp.convert(torch.export.export(model, (x, wide), strict=False), policy="O1,dtype=bf16")
    before = converted.mean.clone()
    converted(x, wide)
    assert converted.mean.dtype is torch.float32
    assert torch.equal(converted.mean, (before * 0.9 + wide.mean(0)).float())
