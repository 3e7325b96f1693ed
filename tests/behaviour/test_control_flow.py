"""Loops, branches, regions and checkpoints hold graphs inside, which are rewritten too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from tests.support.front_ends import FRESH, convert, decided, o1, one, plain, tensors
from tests.support.helpers import Two, assert_same, example

pytestmark = FRESH


def loop(self: Any, x: Tensor) -> Any:
    def more(i: Tensor, h: Tensor) -> Tensor:
        return i < 3

    def step(i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.tanh(self.l(h))

    return torch._higher_order_ops.while_loop(more, step, (torch.tensor(0), self.m(x)))


def running(self: Any, x: Tensor) -> Any:
    def step(carried: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        carried = torch.tanh(carried @ self.l.weight + row)
        return carried, carried * 2

    return torch._higher_order_ops.scan(step, torch.zeros(6), self.m(x))


def branches(self: Any, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda t: self.m(t).float(), lambda t: t * 2, (self.l(x),))


INSIDE = {"while_loop": loop, "scan": running, "cond": branches}


@pytest.mark.parametrize(
    ("kind", "front_end"),
    [("while_loop", "view"), *(pytest.param(kind, "graph", marks=pytest.mark.matrix) for kind in INSIDE)],
)
def test_a_loop_carried_value_keeps_its_dtype(kind: str, front_end: str) -> None:
    torch.manual_seed(0)
    model = Two(INSIDE[kind]).requires_grad_(False)
    module = convert(model, one(), front_end)
    for x in (example(), -example()):
        got, expected = tensors(module(x)), tensors(model(x))
        assert [t.dtype for t in got] == [t.dtype for t in expected]
        for ours, eager in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, eager, rtol=0.05, atol=0.05)
    assert "bfloat16" in decided(module, "linear")


@pytest.mark.parametrize("kind", ["scan", "cond"])
def test_what_torch_refuses_under_autocast_is_refused_with_the_way_out(kind: str) -> None:
    """The carried value, or the other branch, has another dtype under autocast, where the model fails too."""
    model = Two(INSIDE[kind]).requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(Exception, match=r"dtype|meta"):
        model(example())
    with pytest.raises(fxamp.CaptureError, match=r"torch\.autocast\('cpu', enabled=False\)"):
        convert(model, one(), "view")

    def in_a_region(self: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return INSIDE[kind](self, x)

    model = Two(in_a_region).requires_grad_(False)
    got, expected = (tensors(called(example())) for called in (convert(model, one(), "view"), model))
    assert all(map(torch.equal, got, expected))


def test_a_region_that_is_compiled_once_is_right_wherever_it_is_called() -> None:
    @torch.compiler.nested_compile_region
    def block(layer: nn.Module, t: Tensor) -> Tensor:
        return torch.tanh(layer(t))

    model = Two(lambda self, x: self.m(block(self.l, block(self.l, x).float() + 1)))
    module, got = o1(model, one(), "view")
    torch.testing.assert_close(got, plain(model, one()), rtol=0.03, atol=0.03)
    assert "higher_order::invoke_subgraph" in {d.op for d in fxamp.plan_of(module).decisions}


@pytest.mark.parametrize("reentrant", [False, True])
def test_four_checkpointed_blocks_have_the_gradients_of_plain_ones(reentrant: bool) -> None:
    def block(self: Any, x: Tensor) -> Tensor:
        return F.gelu(self.l(x)) + self.m(x)

    def plain(self: Any, x: Tensor) -> Tensor:
        for b in self.blocks:
            x = b(x)
        return x

    def checkpointed(self: Any, x: Tensor) -> Tensor:
        for b in self.blocks:
            x = checkpoint(b, x, use_reentrant=reentrant)
        return x

    results = []
    for forward in (plain, checkpointed):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Two(forward, blocks=nn.ModuleList(Two(block) for _ in range(4)))
        module = convert(model, None, "view")
        x = example().requires_grad_()
        output = module(x)
        output.sum().backward()
        results.append((output, x.grad, [p.grad for p in model.blocks.parameters()]))  # type: ignore[union-attr]
    assert_same(results[0], results[1])
