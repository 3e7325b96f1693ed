"""Every way into the compiler, as one function of a model, its inputs and a policy that returns what is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import fxamp
from passes.contract.policy import Policy
from tests.support.graphs import compile_plain

Door = Callable[[nn.Module, tuple[Tensor, ...], str], Callable[..., Any]]


def by_compile(model: nn.Module, args: tuple[Tensor, ...], policy: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = fxamp.compile(model, policy=policy, backend="eager")
    return compiled


def by_convert(model: nn.Module, args: tuple[Tensor, ...], policy: str) -> Callable[..., Any]:
    return fxamp.convert(model, args, policy=policy)


def plain_graph(model: nn.Module, args: tuple[Tensor, ...]) -> torch.fx.GraphModule:
    """Return an exported graph as a GraphModule that gives a tuple, without the exporter's guards and hooks."""
    module = torch.export.export(model, args).module()
    graph: Any = module.graph
    for guard in [n for n in graph.nodes if n.op == "call_module"]:
        graph.erase_node(guard)
    graph.set_codegen(torch.fx.graph.CodeGen())
    return torch.fx.GraphModule(module, graph)


def by_graph_module(model: nn.Module, args: tuple[Tensor, ...], policy: str) -> Callable[..., Any]:
    converted = fxamp.convert(plain_graph(model, args), args, policy=policy)
    return lambda *inputs: converted(*inputs)[0]


def by_exported_program(model: nn.Module, args: tuple[Tensor, ...], policy: str) -> Callable[..., Any]:
    program: Any = torch.export.export(model, args)
    return fxamp.convert(program, policy=policy)


def by_compile_graph(model: nn.Module, args: tuple[Tensor, ...], policy: str) -> Callable[..., Any]:
    module = plain_graph(model, args)
    chosen = replace(Policy.parse(policy), device="cpu")
    compile_plain(module, chosen)
    module.recompile()
    return lambda *inputs: module(*inputs)[0]


DOORS: dict[str, Door] = {
    "ahead of time": by_convert,
    "at the first call": by_compile,
    "a GraphModule": by_graph_module,
    "an ExportedProgram": by_exported_program,
    "the pass alone": by_compile_graph,
}
