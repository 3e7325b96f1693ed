"""What is said of the dtypes of values holds."""

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

from passes.graph.values import Inference, dtypes_of, original_dtypes
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


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.matrix)])
def test_what_is_said_of_every_op_of_torch_is_true(every: int) -> None:
    """In a process of its own, for torch's test suite changes global settings when it is imported."""
    wrong, count = in_another_process(sweep, every)
    assert wrong == []
    assert count > 300 / every
