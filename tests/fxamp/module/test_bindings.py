"""A function that stands for an overload does the same: values, gradients and what it is when it is captured again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, symbolic_trace

import fxamp
from fxamp.module.bindings import bindings, called_directly
from passes._torch import pytree
from passes.ops import ops
from tests.support.graphs import parse
from tests.support.helpers import Two, example

X, Y = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 24).view(4, 6)
W, B, V = torch.linspace(-2, 2, 36).view(6, 6), torch.linspace(0, 1, 6), torch.ones(6)
IMAGE, FILTER = torch.arange(64.0).view(1, 4, 4, 4), torch.linspace(-1, 1, 16).view(4, 4, 1, 1)
I = torch.tensor([1, 0, 3, 2])  # noqa: E741
# Arguments in the order of the schema, as many as the exporter may write.
EXAMPLES: dict[str, tuple[Any, ...]] = {
    "add.Tensor": (X, Y), "addmm.default": (B, X, W), "baddbmm.default": (Y[None], X[None], W[None]),
    "batch_norm.default": (X, V, B, B.clone(), V.clone(), True, 0.1, 1e-5, False), "bmm.default": (X[None], W[None]),
    "cat.default": ([X, Y], 1), "conv1d.default": (IMAGE[0], FILTER[..., 0], None, [1], [0], [1], 1),
    "conv2d.default": (IMAGE, FILTER, V[:4], [2, 2], [1, 1], [1, 1], 1), "cos.default": (X,), "div.Tensor": (X, 3.0),
    "dropout.default": (X, 0.5, False), "embedding.default": (X, I, 0, False, False), "exp.default": (X,),
    "flatten.using_ints": (IMAGE, 1, 2), "group_norm.default": (X, 2, V, B, 1e-5, False),
    "layer_norm.default": (X, [6], V, B, 1e-5, False), "log_softmax.int": (X, -1, torch.float32),
    "masked_fill.Scalar": (X, Y > 0, 2.0), "matmul.default": (X, W), "max_pool2d.default": (IMAGE, [2, 2], [1, 1], [1]),
    "mean.dim": (X, [-1], True), "mm.default": (X, W), "mul.Tensor": (X, 0.5), "neg.default": (X,),
    "permute.default": (X, [1, 0]), "pow.Tensor_Scalar": (X, 3.0), "relu.default": (X,), "reshape.default": (X, [6, 4]),
    "rms_norm.default": (X, [6], V, 1e-6), "rsqrt.default": (Y + 2,), "select.int": (X, 0, 2), "sigmoid.default": (X,),
    "sin.default": (X,), "softmax.int": (X, 0, None), "squeeze.dim": (X[None], 0), "sub.Tensor": (X, Y),
    "sum.dim_IntList": (X, [0], True), "t.default": (X,), "tanh.default": (X,), "transpose.int": (X, 0, 1),
    "unbind.int": (X, 1), "unsqueeze.default": (X, 1), "where.self": (Y > 0, X, Y),
    "adaptive_avg_pool2d.default": (IMAGE, [2, 1]), "gelu.default": (X,), "linear.default": (X, W, B),
    "scaled_dot_product_attention.default": (X[None], Y[None], X[None], None),
    "silu.default": (X,), "contiguous.default": (X.t(),), "expand.default": (X[:, None], [-1, 2, 6]),
    "to.dtype": (X, torch.bfloat16), "type_as.default": (X, Y.double()), "view.default": (X, [2, 12]),
}  # fmt: skip
KEYWORDS: dict[str, dict[str, Any]] = {
    "add.Tensor": {"alpha": 2}, "sub.Tensor": {"alpha": 3}, "gelu.default": {"approximate": "tanh"},
    "mean.dim": {"dtype": torch.float64}, "scaled_dot_product_attention.default": {"scale": 0.3},
    "contiguous.default": {"memory_format": torch.contiguous_format},
}  # fmt: skip


def short(overload: Any) -> str:
    return str(overload).removeprefix("aten.")


def made(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return outputs and gradients of a call."""
    args = pytree.tree_map(
        lambda a: a.clone().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a, args
    )
    if function is torch.batch_norm or "batch_norm" in str(function):
        args = (*args[:3], args[3].detach(), args[4].detach(), *args[5:])
    outputs = [t for t in pytree.tree_leaves(function(*args, **kwargs)) if isinstance(t, Tensor)]
    inputs = [t for t in pytree.tree_leaves(args) if isinstance(t, Tensor) and t.requires_grad]
    gradients = torch.autograd.grad([o.sum() for o in outputs], inputs, allow_unused=True)
    return [o.detach() for o in outputs], [g for g in gradients if g is not None]


def test_every_function_has_an_example() -> None:
    assert {short(o) for o in bindings()} == EXAMPLES.keys()


@pytest.mark.parametrize("overload", bindings(), ids=short)
def test_a_function_does_what_its_overload_does(overload: Any) -> None:
    name = short(overload)
    for kwargs in ({}, KEYWORDS.get(name, {})):
        expected, got = (made(f, EXAMPLES[name], kwargs) for f in (overload, bindings()[overload]))
        for a, b in zip([*expected[0], *expected[1]], [*got[0], *got[1]], strict=True):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert torch.equal(a, b)


@pytest.mark.parametrize("overload", bindings(), ids=short)
def test_a_function_has_the_defaults_of_its_overload(overload: Any) -> None:
    args = EXAMPLES[short(overload)]
    required = sum(not a.has_default_value() for a in overload._schema.arguments if not a.kwarg_only)
    for count in range(required, len(args)):
        expected, got = (made(f, args[:count], {}) for f in (overload, bindings()[overload]))
        for a, b in zip([*expected[0], *expected[1]], [*got[0], *got[1]], strict=True):
            assert a.shape == b.shape
            assert torch.equal(a, b)


@pytest.mark.parametrize("overload", bindings(), ids=short)
def test_a_function_has_the_canonical_name_of_its_overload(overload: Any) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_function(target, (x,)) for target in (overload, bindings()[overload])]
    assert ops.name(nodes[0]).removesuffix("_nd") == ops.name(nodes[1]).removesuffix("_nd")


@pytest.mark.parametrize("literal", [torch.float16, torch.float64])
@pytest.mark.parametrize("policy", ["O0", "O1"])
def test_a_cast_with_a_memory_format_runs(literal: torch.dtype, policy: str) -> None:
    def f(self: Two, x: Tensor) -> Any:
        return self.l(x).view(2, 3, 2, 6).to(literal, memory_format=torch.channels_last)

    model, x = Two(f), example(12)
    module = fxamp.convert(model, x, policy=policy, capture="export")
    with torch.autocast("cpu", torch.bfloat16, enabled=policy != "O0"):
        expected = model(x)
    assert torch.equal(module(x), expected)
    assert module(x).stride() == expected.stride()


def test_the_code_calls_functions_and_the_graph_keeps_its_overloads() -> None:
    gm = parse("x: f32[2, 4]\nw: f32[4, 4] = param\ny: f32[2, 4] = linear(x, w)\nz: f32[2, 4] = erf(y)\nreturn z")
    before = [n.target for n in gm.graph.nodes]
    x = torch.randn(2, 4)
    expected = gm(x)
    with called_directly(gm.graph):
        gm.recompile()
    assert "torch._C._nn.linear(x, w)" in gm.code
    assert "torch.ops.aten.erf.default(" in gm.code  # one that is not in the table
    assert [n.target for n in gm.graph.nodes] == before
    assert torch.equal(gm(x)[0], expected[0])
    assert [ops.name(n) for n in symbolic_trace(gm).graph.nodes if n.op == "call_function"] == ["linear", "erf"]
