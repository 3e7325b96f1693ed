"""Casts stand before the readers that need them, and nothing else changes."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from passes.casts.insert_casts import InsertCasts
from passes.contract.reasons import Code
from passes.form import Assignment, Cast, Choice, Edit, Replace, SetDtype
from passes.runtime.casts import cast_floating, cast_weight
from tests.support.graphs import Builder, as_it_stands, normal, parse, random_inputs, render, unit_of

BF16, F32 = torch.bfloat16, torch.float32
aten = torch.ops.aten
TEST = Code.LOW("test")


def coloured(gm: GraphModule, colours: dict[str, Any], held: dict[str, Any] | None = None) -> Assignment:
    """Return an assignment: by node, the casts of its operands; and the dtypes that values come to have."""
    assignment, nodes = as_it_stands(gm), {n.name: n for n in gm.graph.nodes}
    choices = {
        nodes[name]: given if isinstance(given, Choice) else choice(*map(Cast, given, given.values()))
        for name, given in colours.items()
    }
    dtypes = {**assignment.dtypes, **{nodes[name]: dtype for name, dtype in (held or {}).items()}}
    return replace(assignment, colours=choices, dtypes=dtypes)


def choice(*edits: Edit) -> Choice:
    """Return the choice to run a node in BF16 by some edits."""
    return Choice(BF16, TEST, edits)


def casts(edits: dict[str, int]) -> int:
    """Return how many casts were inserted."""
    return edits["operand"] + edits["output"]


def check(before: str, after: str, edits: int, colours: dict[str, Any], **held: Any) -> GraphModule:
    """Check what insertion makes of a graph; it runs, and gives the dtypes that the text says."""
    gm = parse(before)
    assert casts(InsertCasts()(unit_of(gm.graph, coloured(gm, colours, held)))) == edits
    assert render(gm.graph) == normal(after)
    gm.graph.lint()
    gm.recompile()
    gm(*random_inputs(gm))
    return gm


def test_each_operand_is_cast_before_its_reader_and_the_output_back() -> None:
    check(
        """
        x: f32[2, 4]
        w: f32[3, 4] = param
        linear: f32[2, 3] = linear(x, w)
        return linear
        """,
        """
        x: f32[2, 4]
        w: f32[3, 4] = param
        to_dtype: bf16[2, 4] = cast(x, bf16)
        to_dtype_1: bf16[3, 4] = cast(w, bf16)
        linear: bf16[2, 3] = linear(to_dtype, to_dtype_1)
        to_dtype_2: f32[2, 3] = cast(linear, f32)
        return to_dtype_2
        """,
        3,
        {"linear": {("input", 0): BF16, ("weight", 0): BF16}},
        linear=BF16,
    )


def test_an_operand_that_needs_no_cast_stays() -> None:
    check(
        """
        x: bf16[2, 4]
        y: f32[2, 4]
        add: f32[2, 4] = add.Tensor(x, y)
        return add
        """,
        """
        x: bf16[2, 4]
        y: f32[2, 4]
        to_dtype: f32[2, 4] = cast(x, f32)
        add: f32[2, 4] = add.Tensor(to_dtype, y)
        return add
        """,
        1,
        {"add": {("self", 0): F32}},
    )


def test_one_value_in_two_positions_is_cast_in_each_that_needs_it() -> None:
    check(
        """
        x: f32[2, 2]
        mul: f32[2, 2] = mul.Tensor(x, x)
        return mul
        """,
        """
        x: f32[2, 2]
        to_dtype: bf16[2, 2] = cast(x, bf16)
        mul: f32[2, 2] = mul.Tensor(x, to_dtype)
        return mul
        """,
        1,
        {"mul": {("other", 0): BF16}},
    )


def test_a_member_of_a_list_is_cast_alone() -> None:
    check(
        """
        x: bf16[2, 2]
        y: f32[2, 2]
        cat: f32[4, 2] = cat([x, y, x])
        return cat
        """,
        """
        x: bf16[2, 2]
        y: f32[2, 2]
        to_dtype: f32[2, 2] = cast(x, f32)
        to_dtype_1: f32[2, 2] = cast(x, f32)
        cat: f32[6, 2] = cat([to_dtype, y, to_dtype_1])
        return cat
        """,
        2,
        {"cat": {("tensors", 0): F32, ("tensors", 2): F32}},
    )


def test_an_output_of_several_is_cast_and_not_the_tuple() -> None:
    check(
        """
        x: f32[2, 4]
        w: f32[3, 4] = param
        topk = topk(x, 4)
        values: f32[2, 4] = getitem(topk, 0)
        indices: i64[2, 4] = getitem(topk, 1)
        linear: f32[2, 3] = linear(values, w)
        return linear, indices
        """,
        """
        x: f32[2, 4]
        w: f32[3, 4] = param
        topk = topk(x, 4)
        values: f32[2, 4] = getitem(topk, 0)
        indices: i64[2, 4] = getitem(topk, 1)
        to_dtype: bf16[2, 4] = cast(values, bf16)
        to_dtype_1: bf16[3, 4] = cast(w, bf16)
        linear: bf16[2, 3] = linear(to_dtype, to_dtype_1)
        to_dtype_2: f32[2, 3] = cast(linear, f32)
        return to_dtype_2, indices
        """,
        3,
        {"linear": {("input", 0): BF16, ("weight", 0): BF16}},
        linear=BF16,
    )


def test_a_relative_cast_takes_the_dtype_it_was_given() -> None:
    check(
        """
        x: bf16[2, 4]
        to: f32[2, 4] = to.dtype(x, f32)
        return x
        """,
        """
        x: bf16[2, 4]
        to: bf16[2, 4] = to.dtype(x, bf16)
        return x
        """,
        0,
        {"to": choice(SetDtype(BF16))},
    )


@pytest.mark.parametrize("spelling", ["method", "function"])
def test_a_relative_cast_spelled_as_a_name_becomes_one_that_can_hold_any_dtype(spelling: str) -> None:
    builder = Builder()
    x = builder.input("x", (2, 2), BF16)
    if spelling == "method":
        node = builder.graph.call_method("float", (x,))
    else:
        node = builder.graph.call_function(torch.Tensor.float, (x,))
    gm = builder.finish(node)
    assignment = replace(coloured(gm, {node.name: choice(SetDtype(BF16))}), returned={})
    InsertCasts()(unit_of(gm.graph, assignment))
    gm.recompile()
    assert gm(torch.ones(2, 2, dtype=BF16))[0].dtype is BF16


def test_a_number_is_replaced_where_it_stands() -> None:
    lowest = torch.finfo(F32).min
    builder = Builder()
    x, mask = builder.input("x", (2, 2), BF16), builder.input("mask", (2, 2), torch.bool)
    fill = builder.graph.call_function(aten.masked_fill.Scalar, (x, mask, lowest), {})
    gm = builder.finish(fill)
    number = Replace(lowest, torch.finfo(BF16).min)
    assignment = replace(coloured(gm, {fill.name: choice(number)}), returned={})
    InsertCasts()(unit_of(gm.graph, assignment))
    assert fill.args == (x, mask, torch.finfo(BF16).min)


def test_an_output_keeps_the_dtype_of_the_model_and_one_value_is_cast_once() -> None:
    check(
        """
        x: bf16[2]
        relu: bf16[2] = relu(x)
        half: bf16[2] = to.dtype(x, bf16)
        return relu, half, relu
        """,
        """
        x: bf16[2]
        relu: bf16[2] = relu(x)
        half: bf16[2] = to.dtype(x, bf16)
        return relu, half, relu
        """,
        0,
        {},
    )
    gm = parse("x: bf16[2]\nrelu: bf16[2] = relu(x)\nreturn relu, relu")
    assignment = as_it_stands(gm)
    relu = next(n for n in gm.graph.nodes if n.name == "relu")
    assignment = replace(assignment, returned={relu: F32})
    assert casts(InsertCasts()(unit_of(gm.graph, assignment))) == 1
    gm.recompile()
    first, second = gm(torch.ones(2, dtype=BF16))
    assert first is second
    assert first.dtype is F32


def test_outputs_stay_low_when_the_policy_says_so() -> None:
    gm = parse("x: bf16[2]\nrelu: bf16[2] = relu(x)\nreturn relu")
    assignment = as_it_stands(gm)
    relu = next(n for n in gm.graph.nodes if n.name == "relu")
    assignment = replace(assignment, original={**assignment.original, relu: F32}, returned={relu: BF16})
    assert casts(InsertCasts()(unit_of(gm.graph, assignment))) == 0


def test_an_output_that_is_an_input_stays_that_object() -> None:
    gm = check("x: bf16[2]\nreturn x", "x: bf16[2]\nreturn x", 0, {})
    x = torch.ones(2, dtype=BF16)
    assert gm(x)[0] is x


def test_outputs_that_are_no_tensors_stay() -> None:
    builder = Builder()
    x = builder.input("x", (2,))
    size = builder.graph.call_function(aten.sym_size.int, (x, 0))
    size.meta["val"] = 2
    gm = builder.finish(size, None, 3.5)
    InsertCasts()(unit_of(gm.graph, as_it_stands(gm)))
    gm.recompile()
    assert gm(torch.ones(2)) == (2, None, 3.5)


def test_a_cast_belongs_to_its_reader() -> None:
    gm = parse("x: f32[2]\nrelu: f32[2] = relu(x)\nreturn relu")
    relu = next(n for n in gm.graph.nodes if n.name == "relu")
    relu.meta["nn_module_stack"] = {"k": ("block.act", nn.ReLU)}
    InsertCasts()(unit_of(gm.graph, coloured(gm, {"relu": {("self", 0): BF16}})))
    assert relu.args[0].meta["nn_module_stack"] == relu.meta["nn_module_stack"]


def test_strides_survive_a_cast() -> None:
    gm = parse("x: f32[2, 3, 4, 5]\ncast: bf16[2, 3, 4, 5] = cast(x, bf16)\nreturn cast")
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert gm(x)[0].stride() == x.stride()


def test_of_a_container_only_floats_below_64_bits_are_cast() -> None:
    assert cast_floating(torch.ones(2), BF16).dtype is BF16
    for kept in (torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.float64), torch.ones(2) + 1j, 3, None):
        assert cast_floating(kept, BF16) is kept


def test_the_members_of_a_container_are_cast_when_the_graph_runs() -> None:
    builder = Builder()
    x = builder.input("x", (2,), BF16)
    states = builder.graph.call_function(_pair, (x,))
    gm = builder.finish(states)
    assignment = coloured(gm, {}, {states.name: (BF16, (BF16, torch.int64))})
    wide = {states: (F32, (F32, torch.int64))}
    assignment = replace(assignment, original={**assignment.original, **wide}, returned=wide)
    assert casts(InsertCasts()(unit_of(gm.graph, assignment))) == 1
    gm.recompile()
    first, (second, count) = gm(torch.ones(2, dtype=BF16))[0]
    assert (first.dtype, second.dtype, count.dtype) == (F32, F32, torch.int64)


def _pair(x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    return x, (x + 1, x.long())


def _layer_on_a_turned_input() -> GraphModule:
    builder = Builder()
    x, w = builder.input("x", (4, 2, 8)), builder.attribute("w", nn.Parameter(torch.randn(8, 8)))
    turned = builder.call(aten.transpose.int, x, 0, 1)
    return builder.finish(builder.call(aten.linear.default, turned, w, name="linear"))


def test_a_weight_keeps_requires_grad_where_a_kernel_is_chosen_by_it() -> None:
    gm = _layer_on_a_turned_input()
    InsertCasts()(
        unit_of(gm.graph, coloured(gm, {"linear": {("input", 0): BF16, ("weight", 0): BF16}}, {"linear": BF16}))
    )
    gm.recompile()
    assert [n.target for n in gm.graph.nodes].count(cast_weight) == 1
    x = torch.randn(4, 2, 8)
    with torch.no_grad():
        assert cast_weight(gm.get_parameter("w"), BF16).requires_grad
        got = gm(x)[0]
        with torch.autocast("cpu", BF16):
            assert torch.equal(got, nn.functional.linear(x.transpose(0, 1), gm.get_parameter("w")).float())
    assert not cast_weight(torch.randn(2), BF16).requires_grad
    with torch.inference_mode():
        cast_weight(gm.get_parameter("w"), BF16)


def test_the_gradient_of_a_cast_weight_arrives_in_fp32() -> None:
    gm = _layer_on_a_turned_input()
    InsertCasts()(
        unit_of(gm.graph, coloured(gm, {"linear": {("input", 0): BF16, ("weight", 0): BF16}}, {"linear": BF16}))
    )
    gm.recompile()
    gm(torch.randn(4, 2, 8))[0].sum().backward()
    gradient = gm.get_parameter("w").grad
    assert gradient is not None
    assert gradient.dtype is F32


def test_getitem_of_a_tuple_is_never_handed_a_cast_tuple() -> None:
    gm = parse("x: f32[2, 4]\nhalves = chunk(x, 2, 1)\nfirst: f32[2, 2] = getitem(halves, 0)\nreturn first")
    InsertCasts()(
        unit_of(gm.graph, coloured(gm, {"halves": {("self", 0): BF16}}, {"halves": (BF16, BF16), "first": BF16}))
    )
    first = next(n for n in gm.graph.nodes if n.target is operator.getitem)
    assert first.args[0].name == "halves"


def test_what_a_rewritten_argument_drops_is_not_cast() -> None:
    gm = parse(
        """
        x: f32[2, 4]
        y: f32[2, 4]
        same: f32[2, 4] = type_as(x, y)
        return same
        """
    )
    given = choice(Cast(("other", 0), BF16), SetDtype(BF16))
    assignment = coloured(gm, {"same": given}, {"same": BF16})
    assert InsertCasts()(unit_of(gm.graph, assignment))["operand"] == 0
    assert [n.name for n in gm.graph.nodes if n.op == "call_function"][:1] == ["same"]
