"""Nodes have the lines of the model that they come from, and no other frame of the process is looked up for them."""

from __future__ import annotations

import pytest
import torch
import torch.fx.proxy
from torch import Tensor, nn

import fxamp


class Helped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.helped(self.l(x))

    def helped(self, x: Tensor) -> Tensor:
        return x.tanh()


@pytest.mark.parametrize("front_end", ["export", "fx"])
def test_lines_of_the_model_alone_are_looked_up(front_end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.fx.proxy, "CapturedTraceback", None)  # whose summary looks up every frame
    module = fxamp.convert(Helped(), (torch.randn(3, 4),), policy="O0", capture=front_end)
    traces = {str(n.target): n.meta.get("stack_trace") or "" for n in module.graph.nodes if n.op.startswith("call")}
    trace = next(trace for target, trace in traces.items() if "tanh" in target)
    assert [line.strip() for line in trace.splitlines()[1::2]] == ["return self.helped(self.l(x))", "return x.tanh()"]
    assert all(__file__ in line for line in trace.splitlines()[::2])
