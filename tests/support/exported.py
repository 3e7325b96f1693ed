"""Graphs as `torch.export` gives them: with its regions, after these are inlined, and converted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx.graph import CodeGen

import fxamp
from fxamp.capture.user_graph import inline_regions
from passes.contract.plan import Plan
from passes.contract.policy import Policy


class Model(nn.Module):
    """A weight, a buffer, and the forward it is given."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("b", torch.linspace(0, 1, 6))
        self.body = forward

    def forward(self, *args: Tensor) -> Any:
        return self.body(self, *args)


def exported(model: nn.Module, *args: Tensor, dynamic: bool = False) -> GraphModule:
    """Export a model; return its graph."""
    dims = tuple({0: torch.export.Dim.AUTO} for _ in args) if dynamic else None
    shapes = {"args": dims} if dims else None
    gm = torch.export.export(model, args, dynamic_shapes=shapes, strict=False).module(check_guards=False)
    assert isinstance(gm, GraphModule)
    gm.graph.set_codegen(CodeGen())
    return gm


def inlined(model: nn.Module, *args: Tensor) -> GraphModule:
    """Export a model, and inline its regions."""
    gm = exported(model, *args)
    inline_regions(gm)
    gm.graph.lint()
    gm.recompile()
    return gm


def graph_of(model: nn.Module, args: Any, policy: Policy | str = "O1") -> GraphModule:
    """Convert what `torch.export` makes of a model in its present mode; its nodes have the names of ATen's ops."""
    made = fxamp.convert(program_of(model, args), policy=policy)
    assert isinstance(made, GraphModule)
    return made


def traced_of(model: nn.Module, args: Any, policy: Policy | str = "O1") -> GraphModule:
    """Convert what `torch.fx` makes of a model, in which what Python reads of a tensor is a node of its own."""
    made = fxamp.convert(symbolic_trace(model), args, policy=policy)
    assert isinstance(made, GraphModule)
    return made


def plan_of(model: nn.Module, args: Any, policy: Policy | str = "O1") -> Plan:
    """Return the plan of the same graph, for a device that need not be here."""
    return fxamp.plan(program_of(model, args), policy=policy)


def program_of(model: nn.Module, args: Any) -> torch.export.ExportedProgram:
    """Export a model in its present mode, for these sizes."""
    return torch.export.export(model, args if isinstance(args, tuple) else (args,), strict=False)
