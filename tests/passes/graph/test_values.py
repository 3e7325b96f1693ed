"""What is said of values holds: storage, writes, grad modes, keys."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import library as operators
from torch.fx import Graph

from passes._torch import pytree
from passes.graph.aliases import Aliases, mutated_operands
from passes.graph.grad import grad_modes
from passes.graph.values import keys, literal_dtype, module_path, module_stack, no_autocast, original_dtypes, source
from passes.runtime.regions import grad_mode
from tests.support.calls import call, x
from tests.support.graphs import Builder, parse
from tests.support.helpers import named

aten = torch.ops.aten
BF16, F16, F32, F64, I64 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64
lib = torch.ops.fxamp_test_values


@operators.custom_op("fxamp_test_values::write", mutates_args=("b",))
def write(a: Tensor, b: Tensor) -> None:
    b.add_(a)


# Storage.


def shares(target: Any, *args: Any, **kwargs: Any) -> bool:
    """Say whether a call is said to share storage with its first tensor, which is written later."""
    builder_args = pytree.tree_leaves((args, kwargs))
    node = call(target, *args, **kwargs)
    first = next(
        n for n in node.graph.nodes if n.meta.get("val") is next(a for a in builder_args if isinstance(a, Tensor))
    )
    node.graph.call_function(aten.zero_.default, (first,))
    found = Aliases(node.graph)
    return found.find(node) is found.find(first)


def test_a_view_made_after_the_last_write_is_none() -> None:
    gm = parse(
        """
        x: f32[4, 4]
        before: f32[16] = reshape(x, [16])
        add_: f32[4, 4] = add_.Tensor(x, 1)
        upcast: f32[4, 4] = to.dtype(x, f32)
        later: f32[16] = reshape(upcast, [16])
        return before, later
        """
    )
    found = Aliases(gm.graph)
    by_name = {n.name: n for n in gm.graph.nodes}
    assert {n.name for members in found.sets().values() for n in members} == {"x", "before", "add_"}
    assert not found.is_mutated(by_name["later"])
    assert found.epoch(by_name["x"], by_name["upcast"]) == 1


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (aten.view.default, (x(), [4, 2]), {}),
        (aten.reshape.default, (x(), [4, 2]), {}),
        (aten.contiguous.default, (x(),), {}),
        (aten.to.dtype, (x(), F32), {}),
        (aten.dropout.default, (x(), 0.5, False), {}),
        (aten.chunk.default, (x(), 2), {}),
        (aten.unsafe_chunk.default, (x(), 2), {}),
        (aten.unbind.int, (x(),), {}),
        (aten.detach.default, (x(),), {}),
        (aten.einsum.default, ("ij->ji", [x()]), {}),
        (aten.add_.Tensor, (x(), 1), {}),
        (F.dropout, (), {"input": x(), "training": False}),
        (F.relu, (), {"input": x(), "inplace": True}),
        (torch.split, (x(), 1), {}),
        (torch.broadcast_tensors, (x(), x()), {}),
        (torch.meshgrid, ([x(F32, 2)],), {}),
        (torch.atleast_2d, ([x(F32, 2)],), {}),
        (operator.iadd, (x(), 1), {}),
        (operator.getitem, (x(), 0), {}),
        ("view", (x(), 4, 2), {}),
        ("transpose", (x(), 0, 1), {}),
        ("float", (x(),), {}),
        ("squeeze", (x(),), {}),
        (sorted, (x(),), {}),
    ],
    ids=lambda value: named(value) if callable(value) or isinstance(value, str) else None,
)
def test_views_share_storage(target: Any, args: Any, kwargs: Any) -> None:
    assert shares(target, *args, **kwargs)


@pytest.mark.parametrize(
    "target", [aten.clone.default, aten.relu.default, aten.neg.default, torch.exp, "abs", operator.neg], ids=named
)
def test_new_values_do_not_share_storage(target: Any) -> None:
    assert not shares(target, x())


def test_the_source_of_an_in_place_op_does_not_share_its_storage() -> None:
    node = call(aten.add_.Tensor, x(), x())
    found = Aliases(node.graph)
    target, other = node.all_input_nodes
    assert found.find(node) is found.find(target) is not found.find(other)


def test_out_is_what_the_call_returns() -> None:
    out = x()
    node = call(torch.add, x(), x(), out=out)
    found = Aliases(node.graph)
    assert found.is_mutated(node)
    assert [n.meta["val"] is out for n in mutated_operands(node)] == [True]
    assert not found.is_mutated(node.all_input_nodes[0])


# Writes.


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "written"),
    [
        (aten.add_.Tensor, (x(), x()), {}, [0]),
        (aten.add.Tensor, (x(), x()), {}, []),
        (aten.add.out, (x(), x()), {"out": x()}, [2]),
        (aten.max.dim_max, (x(), 1), {"max": x(F32, 2), "max_values": x(I64, 2)}, [1, 2]),
        (torch.max, (x(), 1), {"out": (x(F32, 2), x(I64, 2))}, [1, 2]),
        (aten._foreach_add_.Scalar, ([x(), x()], 1), {}, [0, 1]),
        (torch._foreach_add_, ([x(), x()], 1), {}, [0, 1]),
        (operator.setitem, (x(), 0, x(F32, 4)), {}, [0]),
        (operator.iadd, (x(), x()), {}, [0]),
        ("copy_", (x(), x()), {}, [0]),
        ("zero_", (x(),), {}, [0]),
        (F.relu, (x(),), {"inplace": True}, [0]),
        (F.relu, (), {"input": x(), "inplace": True}, [0]),
        (F.relu, (x(),), {"inplace": False}, []),
        (F.dropout, (x(), 0.5, True, True), {}, [0]),
        (lib.write.default, (x(), x()), {}, [1]),
        (lib.write, (x(), x()), {}, [1]),
        (aten.batch_norm.default, (x(), None, None, x(F32, 4), x(F32, 4), True, 0.1, 1e-5, False), {}, [1, 2]),
        (aten.batch_norm.default, (x(), None, None, x(F32, 4), x(F32, 4), False, 0.1, 1e-5, False), {}, []),
        (F.batch_norm, (x(), x(F32, 4), x(F32, 4)), {"training": True}, [1, 2]),
        (F.batch_norm, (x(), x(F32, 4), x(F32, 4)), {}, []),
        (F.instance_norm, (x(F32, 1, 4, 4), x(F32, 4), x(F32, 4)), {}, [1, 2]),
        (F.embedding, (torch.tensor([1]), x(F32, 5, 3)), {"max_norm": 1.0}, [1]),
        (F.embedding, (torch.tensor([1]), x(F32, 5, 3)), {}, []),
        (aten.embedding_renorm_.default, (x(F32, 5, 3), torch.tensor([1]), 1.0, 2.0), {}, [0]),
        (aten.__and__.Tensor, (x(I64), x(I64)), {}, []),
    ],
    ids=lambda value: named(value) if callable(value) or isinstance(value, str) else None,
)
def test_writes_are_seen(target: Any, args: Any, kwargs: Any, written: list[int]) -> None:
    node = call(target, *args, **kwargs)
    operands = [n for n in node.graph.nodes if n.op == "placeholder"]
    assert mutated_operands(node) == [operands[i] for i in written]


def test_a_flag_that_is_read_at_run_time_may_mean_a_write() -> None:
    builder = Builder()
    values = builder.input("x", (2, 4)), builder.input("mean", (4,)), builder.input("var", (4,))
    flag = builder.graph.get_attr("training")
    node = builder.graph.call_function(F.batch_norm, values, {"training": flag})
    assert mutated_operands(node) == [*values[1:]]


def test_a_write_through_a_view_is_a_write_to_its_base_and_to_other_views() -> None:
    gm = parse(
        """
        x: f32[4, 4]
        y: f32[4, 4]
        rows = unbind.int(x)
        first: f32[4] = getitem(rows, 0)
        other: f32[16] = reshape(x, [16])
        add_: f32[4] = add_.Tensor(first, 1)
        relu: f32[4, 4] = relu(x)
        return relu, other
        """
    )
    found = Aliases(gm.graph)
    by_name = {n.name: n for n in gm.graph.nodes}
    assert {n.name for members in found.sets().values() for n in members} == {"x", "rows", "first", "other", "add_"}
    assert found.is_mutated(by_name["other"])
    assert not found.is_mutated(by_name["y"])
    assert not found.is_mutated(by_name["relu"])
    assert [found.epoch(by_name["x"], by_name[n]) for n in ("rows", "add_", "relu")] == [0, 0, 1]
    assert found.epoch(by_name["y"], by_name["relu"]) == 0


def test_one_attribute_read_twice_is_one_storage() -> None:
    builder = Builder()
    first = builder.attribute("b", torch.zeros(2))
    second = builder.graph.get_attr("b")
    other = builder.attribute("c", torch.zeros(2))
    write = builder.call(aten.add_.Tensor, first, 1)
    builder.finish(write)
    found = Aliases(builder.graph)
    assert found.is_mutated(second)
    assert not found.is_mutated(other)


def test_an_opaque_call_may_write_and_share_but_is_not_said_to_mutate() -> None:
    builder = Builder()
    a = builder.input("a", (2,))
    opaque = builder.graph.call_function(sorted, (a,))
    after = builder.graph.call_function(aten.relu.default, (a,))
    builder.graph.output((after,))
    found = Aliases(builder.graph)
    assert found.epoch(a, opaque) == 0
    assert found.epoch(a, after) == 1
    assert not found.is_mutated(a)
    assert found.find(opaque) is found.find(a)


# Grad modes.


def test_grad_modes_follow_the_switches() -> None:
    graph = Graph()
    set_grad = torch._C._set_grad_enabled
    outer = graph.placeholder("x")
    first = graph.call_function(grad_mode)
    graph.call_function(set_grad, (False,))
    inside = graph.call_function(aten.relu.default, (outer,))
    second = graph.call_function(grad_mode)
    graph.call_function(set_grad, (True,))
    deepest = graph.call_function(aten.relu.default, (outer,))
    graph.call_function(set_grad, (second,))
    inside_again = graph.call_function(aten.relu.default, (outer,))
    graph.call_function(set_grad, (first,))
    after = graph.call_function(aten.relu.default, (outer,))
    modes = grad_modes(graph)
    assert [modes[n][0] for n in (outer, inside, deepest, inside_again, after)] == [None, False, True, False, None]


# Names.


class Block(nn.Module):
    def __init__(self, extra: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = nn.Tanh() if extra else nn.Identity()
        self.extra = nn.Linear(4, 4) if extra else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.extra(self.first(x)))).relu() + x.relu()


def test_keys_do_not_change_with_unrelated_edits() -> None:
    def of(extra: bool) -> list[str]:
        gm = torch.export.export(Block(extra), (torch.randn(2, 4),)).module(check_guards=False)
        assert isinstance(gm, torch.fx.GraphModule)
        return list(keys(gm.graph.nodes).values())

    plain, extended = of(False), of(True)
    assert plain == ["first/linear#0", "second/linear#0", "/relu#0", "/relu#1", "/add#0"]
    assert [k for k in extended if k in plain] == plain
    assert set(extended) - set(plain) == {"extra/linear#0", "act/tanh#0"}


def test_a_node_says_where_it_comes_from() -> None:
    node = Graph().call_function(aten.relu.default)
    assert (module_path(node), module_stack(node), source(node)) == ("", [], "")
    node.meta["nn_module_stack"] = {"a": ("", nn.Sequential), "b": ("0", "torch.nn.modules.linear.Linear")}
    node.meta["stack_trace"] = (
        'File "/lib/torch/nn/modules/container.py", line 5, in forward\n    input = module(input)\n'
        'File "C:\\me\\model.py", line 12, in forward\n    return self.fc(x)\n'
    )
    assert module_path(node) == "0"
    assert module_stack(node) == [
        ("", "torch.nn.modules.container.Sequential"),
        ("0", "torch.nn.modules.linear.Linear"),
    ]
    assert source(node) == "model.py:12: return self.fc(x)"


def test_the_dtype_that_a_call_names_is_found_however_it_is_spelled() -> None:
    a = x()
    spellings: list[tuple[Callable[..., Any] | str, tuple[Any, ...], dict[str, Any]]] = [
        (aten.to.dtype, (a, BF16), {}), (aten._to_copy.default, (a,), {"dtype": BF16}), ("to", (a, BF16), {}),
        ("to", (a, "cpu", BF16), {}), ("bfloat16", (a,), {}), (torch.Tensor.bfloat16, (a,), {}),
        ("type", (a, BF16), {}), (torch.sum, (a,), {"dtype": BF16}), (F.softmax, (a, 1), {"dtype": BF16}),
    ]  # fmt: skip
    assert [literal_dtype(call(t, *args, **kwargs)) for t, args, kwargs in spellings] == [BF16] * len(spellings)
    assert literal_dtype(call("to", a, a)) is None
    assert literal_dtype(call(aten.relu.default, a)) is None


def test_ambient_autocast_is_off_inside_and_on_again_after() -> None:
    with torch.autocast("cpu", F16):
        with no_autocast():
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is F16


def test_dtypes_as_captured_know_attributes_inputs_and_what_has_no_value() -> None:
    graph = Graph()
    a, w = graph.placeholder("a"), graph.get_attr("w")
    layer = graph.call_function(F.linear, (a, w))
    opaque = graph.call_module("leaf", (layer,))
    out = graph.output((opaque,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = original_dtypes(graph, {"w": torch.ones(2, 2, dtype=F32)}.__getitem__)
    assert found == {a: None, w: F32, layer: None, opaque: None, out: None}
