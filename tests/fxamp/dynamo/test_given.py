"""Graphs that the user brings: shapes that they lack are found by example inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

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


def test_modules_of_torch_in_a_traced_graph_write_their_buffers_when_it_runs_and_not_while_it_is_converted() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), torch.randn(2, 3, 5, 5)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    converted = fxamp.convert(symbolic_trace(model), (x,), policy="O1,dtype=bf16")
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    converted(x)
    assert model.get_buffer("1.num_batches_tracked") == 1
    assert not torch.equal(model.get_buffer("1.running_mean"), before["1.running_mean"])


def test_a_module_of_torch_is_inlined_though_an_argument_of_it_is_not_given() -> None:
    model, x = nn.Sequential(nn.ConvTranspose2d(3, 4, 3)), torch.randn(2, 3, 5, 5)
    converted = fxamp.convert(symbolic_trace(model), (x,), policy="O1,dtype=bf16")
    assert [(d.op, d.colour) for d in fxamp.plan_of(converted).decisions] == [("conv_transpose2d", "bfloat16")]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(converted(x), model(x).float())


def test_an_exported_region_that_switches_a_mode_needs_no_shapes() -> None:
    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                fixed = self.layer(x)
            with torch.autocast("cpu", enabled=False):
                return fixed, self.layer(x)

    model, x = Regions(), torch.randn(4, 6)
    fixed, plain = fxamp.convert(torch.export.export(model, (x,), strict=False), policy="O1,dtype=bf16")(x)
    assert not fixed.requires_grad
    assert torch.equal(plain, model.layer(x))
