"""What no 16-bit value has touched is not rounded beyond autocast: positions, times, statistics, masks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from passes import compile_graph
from passes.contract.policy import Policy
from tests.support.front_ends import WARNINGS, fresh
from tests.support.graphs import attribute

pytestmark = [*WARNINGS, pytest.mark.usefixtures("fresh")]
__all__ = ["fresh"]
DTYPES = {"in BF16": torch.bfloat16, "in FP16": torch.float16}


class Rotary(nn.Module):
    """Rotary embedding whose positions are a float buffer."""

    positions: Tensor
    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(64, 64)
        self.register_buffer("positions", torch.arange(1600).float())
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, 32) / 32))

    def forward(self, x: Tensor) -> Tensor:
        angles = self.positions[: x.shape[1], None] * self.frequencies[None]
        cos, sin = angles.cos(), angles.sin()
        q = self.q(x)
        a, b = q[..., :32], q[..., 32:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Time(nn.Module):
    """A diffusion model's embedding of a time, which is an input."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(64, 64)
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, 32) / 32))

    def forward(self, t: Tensor) -> Tensor:
        angles = t[:, None] * self.frequencies[None]
        return self.l(torch.cat([angles.cos(), angles.sin()], -1))


class Standardised(nn.Module):
    """A table whose raw columns are standardised by the model."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(64, 64)
        self.register_buffer("mean", torch.full((64,), 1e5))
        self.register_buffer("std", torch.full((64,), 1e3))

    def forward(self, x: Tensor) -> Tensor:
        return self.l((x - self.mean) / self.std)


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.l = nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.n.running_mean.fill_(1e5)  # type: ignore[union-attr]
        self.n.running_var.fill_(1e6)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.l(self.n(x))


class LayerNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.l = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(self.n(x))


class Masked(nn.Module):
    """Attention written by hand, with a float mask that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / 32**0.5 + mask
        return scores.softmax(-1) @ self.v(x)


def raw(seed: int) -> tuple[Tensor, ...]:
    return (1e5 + 1e3 * torch.randn(256, 64, generator=torch.Generator().manual_seed(seed)),)


def masked(seed: int, lowest: float = torch.finfo(torch.float32).min) -> tuple[Tensor, ...]:
    mask = torch.zeros(2, 8, 8)
    mask[0, 3 + seed] = lowest
    return torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(seed)), mask


def sequence(seed: int) -> tuple[Tensor, ...]:
    return (torch.randn(1, 1500, 64, generator=torch.Generator().manual_seed(seed)),)


def times(seed: int) -> tuple[Tensor, ...]:
    return (torch.linspace(0, 999 - 7 * seed, 64),)


TABLE: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "rotary, positions in a buffer": (Rotary, sequence),
    "time, an input": (Time, times),
    "standardised input": (Standardised, raw),
    "batch norm of an input": (BatchNormed, raw),
    "layer norm of an input": (LayerNormed, raw),
    "mask, an input": (Masked, masked),
}


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
    compile_graph(module.graph, chosen, functools.partial(attribute, module))
    module.recompile()
    return lambda *inputs: module(*inputs)[0]


WAYS = {
    "ahead of time": by_convert,
    "at the first call": by_compile,
    "a GraphModule": by_graph_module,
    "an ExportedProgram": by_exported_program,
    "the pass alone": by_compile_graph,
}


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.float() - exact).norm() / exact.norm())


SLOW = ("a GraphModule", "an ExportedProgram", "the pass alone")  # the same code as the others, by other doors


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("way", [pytest.param(w, marks=[pytest.mark.matrix] * (w in SLOW)) for w in WAYS])
@pytest.mark.parametrize("number", DTYPES)
def test_o2_is_as_exact_as_autocast_on_raw_inputs_and_buffers(name: str, way: str, number: str) -> None:
    as_exact_as_autocast(*TABLE[name], way, number)


def as_exact_as_autocast(
    make: Callable[[], nn.Module], batch: Callable[[int], tuple[Tensor, ...]], way: str, low: str
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        run = WAYS[way](model, batch(0), f"O2,dtype={low[3:].lower()}")
        for seed in range(3):  # the second and third batch are unseen
            exact = model(*batch(seed))
            with torch.autocast("cpu", DTYPES[low]):
                allowed = error(model(*batch(seed)), exact)
            assert math.isfinite(found := error(run(*batch(seed)), exact)), found
            assert found <= 1.5 * allowed or not math.isfinite(allowed), (found, allowed)


def test_a_mask_that_turns_extreme_after_conversion_keeps_the_values_finite() -> None:
    torch.manual_seed(0)
    model = Masked()
    with torch.no_grad():
        for low in ("bf16", "fp16"):
            run = fxamp.convert(model, masked(0, 0.0), policy=f"O2,dtype={low}")
            assert {d.colour for d in fxamp.plan_of(run).decisions if d.op == "softmax"} <= {
                "bfloat16",
                "float16",
            }  # it is rounded
            for lowest in (-1e4, -1e9, torch.finfo(torch.float32).min, -math.inf):
                exact = model(*masked(1, lowest))
                assert error(run(*masked(1, lowest))[1], exact[1]) < 0.01
                if math.isfinite(lowest):
                    assert run(*masked(1, lowest)).isfinite().all()


def test_what_o2_casts_down_and_autocast_does_not_is_brought_into_range_once() -> None:
    rounded, exact = (fxamp.graphs(fxamp.convert(Masked(), masked(0), policy=p))[0] for p in ("O2,dtype=bf16", "O1"))
    clamps = [n for n in rounded.graph.nodes if n.target is torch.ops.aten.clamp.default]
    assert [n.args[0].op for n in clamps] == ["placeholder"]  # the mask
    assert not [n for n in exact.graph.nodes if n.target is torch.ops.aten.clamp.default]


def test_what_autocast_casts_down_after_a_move_is_not_brought_into_range() -> None:
    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(x.reshape(-1, 1), self.one).reshape(x.shape).softmax(-1)

    x = torch.randn(2, 3)
    view = fxamp.convert(Moved(), (x,), policy="O2,dtype=bf16")
    moves = [d.colour for d in fxamp.plan_of(view).decisions if d.op == "reshape"]
    assert moves[0] == "bfloat16"  # the input is cast before it is moved
    assert not [n for n in fxamp.graphs(view)[0].graph.nodes if n.target is torch.ops.aten.clamp.default]
    x[0, 0] = -math.inf
    assert view(x)[0, 0] == 0
    assert view(torch.full((2, 3), -math.inf)).isnan().all()  # as in FP32, and under autocast
