"""What is said of the dtypes of values holds, with shapes and without them."""

from __future__ import annotations

import copy
import functools
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import library as operators
from torch.fx import Graph, Node

from passes._torch import pytree
from passes.graph.by_rows import SymbolicInference, original_dtypes
from passes.graph.values import (
    ANY,
    COMPLEX,
    Inference,
    dtypes_of,
)
from passes.runtime import rnn
from passes.runtime.regions import grad_mode
from tests.support.calls import call, held, x
from tests.support.graphs import parse
from tests.support.helpers import named
from tests.support.op_sweep import sweep
from tests.support.processes import in_another_process

aten = torch.ops.aten
BF16, F16, F32, F64, I64 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64
lib = torch.ops.fxamp_test_values


@operators.custom_op("fxamp_test_values::wide", mutates_args=())
def wide(a: Tensor, dtype_by_value: int) -> Tensor:
    return a.double() if dtype_by_value else a.clone()


@wide.register_fake
def _(a: Tensor, dtype_by_value: int) -> Tensor:
    return a.double() if dtype_by_value else torch.empty_like(a)


# Inference on fake tensors.


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (aten.add.Tensor, (x(BF16), x(F32)), {}),
        (aten.add.Tensor, (x(BF16), torch.tensor(1.0)), {}),  # a 0-dim tensor does not promote
        (aten.add.Tensor, (x(BF16), x(F32, 1)), {}),  # one of size 1 does
        (aten.add.Tensor, (x(BF16), x(F16)), {}),
        (aten.add.Tensor, (x(F64), x(BF16)), {}),
        (aten.add.Tensor, (x(I64), x(BF16)), {}),
        (aten.add.Tensor, (x(I64), 1), {}),
        (aten.add.Tensor, (x(I64), 1.0), {}),  # what a number is decides
        (aten.mul.Tensor, (x(torch.bool), 2), {}),
        (aten.mul.Tensor, (x(torch.bool), True), {}),
        (aten.div.Tensor, (x(I64), x(I64)), {}),
        (aten.div.Tensor_mode, (x(I64), x(I64)), {"rounding_mode": "floor"}),
        (aten.pow.Tensor_Scalar, (x(I64), 2), {}),
        (aten.pow.Tensor_Scalar, (x(I64), 2.0), {}),
        (aten.sum.default, (x(BF16),), {}),
        (aten.sum.default, (x(BF16),), {"dtype": F32}),
        (aten.sum.default, (x(torch.bool),), {}),
        (aten.to.dtype, (x(F32), F16), {}),
        (aten.to.dtype, (x(F32), F64), {}),
        (aten.view.dtype, (x(BF16), torch.int16), {}),
        (aten.softmax.int, (x(BF16), 1), {}),
        (aten.softmax.int, (x(BF16), 1, F32), {}),
        (aten.max.dim, (x(BF16), 1), {}),
        (aten.max.default, (x(BF16),), {}),
        (aten.split.Tensor, (x(BF16), 2, 1), {}),
        (aten.split.Tensor, (x(BF16), 1, 1), {}),  # sizes decide how many outputs there are
        (aten.unbind.int, (x(F32),), {}),
        (aten.unbind.int, (x(F32, 3, 4),), {}),
        (aten.cat.default, ([x(BF16), x(F32)],), {}),
        (aten.where.self, (x(torch.bool), x(BF16), x(F32)), {}),
        (aten.embedding.default, (x(BF16, 5, 3), torch.tensor([1, 2])), {}),
        (aten.layer_norm.default, (x(BF16), [4], x(F32, 4), x(F32, 4)), {}),
        (aten.eq.Tensor, (x(BF16), x(F32)), {}),
        (aten.argmax.default, (x(BF16),), {}),
        (aten.complex.default, (x(F32), x(F32)), {}),
        (aten.full.default, ([2], 1), {}),
        (aten.full.default, ([2], 1.0), {}),
        (aten.add_.Tensor, (x(BF16), x(F32)), {}),
        (aten.nonzero.default, (x(BF16),), {}),  # a size that only data decides
        (aten.masked_select.default, (x(BF16), x(torch.bool)), {}),
        (operator.getitem, (x(BF16), slice(0, 1)), {}),
        (F.relu, (x(BF16),), {"inplace": True}),
        ("float", (x(BF16),), {}),
        (lib.wide.default, (x(F32), 0), {}),
        (lib.wide.default, (x(F32), 1), {}),  # a custom op may let a value decide
    ],
    ids=lambda value: named(value) if callable(value) else None,
)
def test_inference_gives_what_torch_gives_whatever_ran_before(target: Any, args: Any, kwargs: Any) -> None:
    node = call(target, *args, **kwargs)
    args, kwargs = copy.deepcopy((args, kwargs))
    out = getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)
    node.meta["val"] = out
    assert _inference()(node, held) == dtypes_of(out)
    assert _inference()(node, held) == dtypes_of(out)


@functools.cache
def _inference() -> Inference:
    return Inference()  # one for all cases: what one of them left behind must not answer another


def test_inference_takes_dtypes_from_the_caller_and_not_from_the_graph() -> None:
    node = call(aten.mul.Tensor, x(F32), x(F32))
    first, second = node.all_input_nodes
    assert Inference()(node, {first: BF16, second: BF16}.__getitem__) is BF16
    assert Inference()(node, {first: BF16, second: F32}.__getitem__) is F32


def test_inference_raises_what_the_op_raises_and_logs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    node = call(aten.dot.default, x(F32, 2), x(F32, 2))
    first, second = node.all_input_nodes
    with pytest.raises(RuntimeError, match="expected"):
        Inference()(node, {first: BF16, second: F32}.__getitem__)
    assert capfd.readouterr().err == ""


def test_inference_draws_no_random_number_and_keeps_grad_mode() -> None:
    state = torch.get_rng_state()
    node = call(aten.rand_like.default, x(BF16))
    assert Inference()(node, held) is BF16
    assert torch.equal(state, torch.get_rng_state())
    assert torch.is_grad_enabled()


def test_inference_knows_sizes_that_are_symbols_even_those_that_only_data_decides() -> None:
    class Model(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            rows = a[b > 0]  # as many as there are
            return torch.cat([rows, rows]).reshape(-1, 2) @ a.reshape(2, -1)

    dims = {"a": {0: torch.export.Dim.AUTO}, "b": {0: torch.export.Dim.AUTO}}
    gm = torch.export.export(Model(), (torch.randn(6, 4), torch.randn(6)), dynamic_shapes=dims).module(
        check_guards=False
    )
    assert isinstance(gm, torch.fx.GraphModule)
    infer = Inference()
    found = {
        n.name: infer(n, held) for n in gm.graph.nodes if n.op == "call_function" and isinstance(n.meta["val"], Tensor)
    }
    expected = {n.name: held(n) for n in gm.graph.nodes if n.name in found}
    assert found == expected
    assert "matmul" in found


def test_a_member_of_a_tuple_has_its_own_dtype() -> None:
    gm = parse(
        """
        x: bf16[2, 4]
        topk = topk(x, 2)
        values: bf16[2, 2] = getitem(topk, 0)
        at: i64[2, 2] = getitem(topk, 1)
        return values, at
        """
    )
    dtypes = original_dtypes(gm.graph, gm.get_parameter)
    assert [d for n, d in dtypes.items() if n.op == "call_function"] == [(BF16, I64), BF16, I64]
    node = next(n for n in gm.graph.nodes if n.name == "at")
    assert Inference()(node, dtypes.__getitem__) is I64


# Inference without shapes.


def symbolic(target: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the dtypes of a call, of whose operands these dtypes are known: `?` for one of which nothing is."""
    graph, dtypes = Graph(), dict[Node, Any]()

    def operand(arg: Any) -> Any:
        if isinstance(arg, torch.dtype) or arg in (ANY, COMPLEX):
            node = graph.placeholder("x")
            dtypes[node] = arg
            return node
        return arg.value if isinstance(arg, Literal) else arg

    args, kwargs = pytree.tree_map(operand, (args, kwargs))
    node = (
        graph.call_method(target, args, kwargs)
        if isinstance(target, str)
        else graph.call_function(target, args, kwargs)
    )
    return SymbolicInference()(node, dtypes.__getitem__)


class Literal:
    """A dtype that stands in the call as it is."""

    def __init__(self, value: torch.dtype) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("target", "args", "expected"),
    [
        (torch.relu, (F32,), F32),
        (torch.relu, (ANY,), ANY),
        (torch.add, (F32, F32), F32),
        (torch.add, (F32, 1.0), F32),
        (torch.add, (F32, I64), F32),
        (torch.add, (F32, 1j), COMPLEX),
        (torch.matmul, (COMPLEX, torch.complex64), COMPLEX),
        (torch.mul, (COMPLEX, ANY), COMPLEX),
        ("mH", (COMPLEX,), COMPLEX),
        (torch.eq, (F32, 1j), torch.bool),
        (torch.abs, (COMPLEX,), ANY),  # of which it is half as wide
        (torch.add, (BF16, F32), ANY),  # bfloat16 if the second has no dimension
        (torch.add, (F32, ANY), ANY),
        (torch.add, (I64, I64), ANY),  # of which the ranks decide
        (torch.div, (I64, I64), ANY),
        (torch.sin, (I64,), ANY),
        (operator.add, (F32, F32), F32),
        (operator.iadd, (BF16, F32), BF16),
        ("mul_", (BF16, F32), BF16),
        (F.relu, (BF16, True), BF16),
        (F.linear, (ANY, F32, F32), F32),  # which takes no mixed operands
        (torch.matmul, (ANY, ANY), ANY),
        (F.layer_norm, (ANY, (4,), F32, F32), ANY),  # which follows its first operand
        (F.layer_norm, (BF16, (4,), F32, F32), BF16),
        (F.embedding, (ANY, F32), F32),
        (F.embedding, (I64, BF16), BF16),
        ("view", (I64, 2), I64),
        ("view", (BF16, 2), BF16),
        ("view", (BF16, Literal(torch.int16)), torch.int16),
        ("float", (BF16,), F32),
        ("half", (ANY,), F16),
        (torch.Tensor.double, (ANY,), F64),
        ("to", (F32, Literal(BF16)), BF16),
        ("to", (F32, "cpu"), ANY),
        ("to", (F32, BF16), BF16),  # another tensor
        ("type", (F32, "torch.HalfTensor"), F16),
        ("type", (F32, "torch.cuda.DoubleTensor"), F64),
        ("type_as", (F32, BF16), BF16),
        ("type_as", (F32, ANY), ANY),
        ("sum", (BF16,), BF16),
        ("argmax", (ANY,), I64),
        (torch.eq, (ANY, ANY), torch.bool),
        (torch.max, (BF16,), BF16),
        (torch.max, (BF16, 1), (BF16, I64)),
        (torch.max, (BF16, BF16), BF16),
        ("topk", (BF16, 2), (BF16, I64)),
        (torch.chunk, (BF16, 2), (BF16,)),
        (torch.split, (BF16, 2), (BF16,)),
        (torch.std_mean, (F32,), (F32, F32)),
        (rnn.lstm, (BF16, None, [BF16]), (BF16, (BF16, BF16))),
        (rnn.rnn, (BF16, None, [BF16], True, 1, 0.0, True, False, True, "relu"), (BF16, BF16)),
        (aten.lstm.input, (BF16, [BF16, BF16], [BF16]), (BF16, BF16, BF16)),
        (torch.bucketize, (F32, F32), I64),
        (torch.float_power, (F32, 2), ANY),
        (torch.unique, (F32,), ANY),
        (torch.fft.fft, (F32,), COMPLEX),
        (torch.view_as_complex, (F32,), COMPLEX),
        (torch.zeros, (2,), ANY),
        (torch.equal, (F32, F32), None),
        ("size", (F32, 0), None),
        ("item", (F32,), None),
        (grad_mode, (), None),
        (lib.wide.default, (F32, 0), ANY),
        (abs, (F32,), F32),
        (sorted, (F32,), ANY),  # of which nothing is known
    ],
    ids=named,
)
def test_what_is_said_without_shapes(target: Any, args: Any, expected: Any) -> None:
    assert symbolic(target, *args) == expected


def test_a_dtype_that_is_read_from_a_value_is_that_of_the_value() -> None:
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    dtype = graph.call_function(getattr, (b, "dtype"))
    dtypes = {a: F32, b: BF16, dtype: None}
    infer = SymbolicInference()
    assert infer(graph.call_method("to", (a, dtype)), dtypes.__getitem__) is BF16
    assert infer(graph.call_function(torch.zeros, (2,), {"dtype": dtype}), dtypes.__getitem__) is BF16
    assert infer(graph.call_function(torch.zeros_like, (a,), {"dtype": dtype}), dtypes.__getitem__) is BF16


def test_a_list_of_unknown_length_has_one_dtype() -> None:
    graph = Graph()
    a = graph.placeholder("a")
    parts = graph.call_function(torch.chunk, (a, 3))
    dtypes: dict[Node, Any] = {a: BF16, parts: (BF16,)}
    infer = SymbolicInference()
    assert infer(graph.call_function(operator.getitem, (parts, 2)), dtypes.__getitem__) is BF16
    assert infer(graph.call_function(operator.getitem, (parts, slice(1, None))), dtypes.__getitem__) == (BF16,)
    assert infer(graph.call_function(torch.cat, (parts,)), dtypes.__getitem__) is BF16


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.matrix)])
def test_what_is_said_of_every_op_of_torch_is_true(every: int) -> None:
    """In a process of its own, for torch's test suite changes global settings when it is imported."""
    wrong, count = in_another_process(sweep, every)
    assert wrong == []
    assert count > 300 / every
