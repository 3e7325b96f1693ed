"""While a model is captured its code is not generated, but that of the graphs inside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from fxamp.capture.states import capture
from tests.support.helpers import Two, example


def long(self: Two, x: Tensor) -> Any:
    return self.m(self.l(x)).softmax(-1) * 2 + 1


def branch(self: Two, x: Tensor) -> Any:
    h = self.l(x)
    return torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,))


def test_the_exporter_generates_no_code_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    generated: list[int] = []
    generate = Graph.python_code

    def counted(graph: Graph, *args: Any, **kwargs: Any) -> Any:
        generated.append(len(graph.nodes))
        return generate(graph, *args, **kwargs)

    monkeypatch.setattr(Graph, "python_code", counted)
    captured = capture(Two(long), (example(),), front_end="export").graphs[0]
    assert len([n for n in captured.graph.nodes if n.op == "call_function"]) > 4
    assert max(generated, default=0) < 4  # graph modules that are made empty


def test_graphs_inside_a_model_have_code() -> None:
    captured = capture(Two(branch), (example(),), front_end="export").graphs[0]
    inside = [held for held in captured.constants.values() if isinstance(held, GraphModule)]
    x = torch.tensor([[0.5]])
    assert [graph(x)[0] for graph in inside] == [x.sin(), x.cos()]
    assert ["sin" in graph.code for graph in inside] == [True, False]
