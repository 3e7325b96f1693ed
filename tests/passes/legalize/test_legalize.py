"""Regions are inlined and composites decomposed without changing a value, a gradient or a random number."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx.graph import CodeGen

import fxamp
from passes._torch import enter_autocast, exit_autocast, pytree
from passes.legalize import legalize
from passes.legalize.legalize import (
    decompose_composites,
    drop_autocast_switches,
    index_fields,
    inline_regions,
    loosen_assertions,
)
from passes.notes import note, note_of
from passes.ops import ops
from tests.support.graphs import Builder, render

BF16 = torch.bfloat16
aten = torch.ops.aten


class Model(nn.Module):
    """A weight, a buffer, and the forward it is given."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("b", torch.linspace(0, 1, 6))
        self.body = forward

    def forward(self, *args: Tensor) -> Any:
        return self.body(self, *args)


def example(rows: int = 4) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))


def exported(model: nn.Module, *args: Tensor, dynamic: bool = False) -> tuple[GraphModule, dict[str, Any]]:
    """Export a model; return its graph and what it refers to beside the model, under `_fxamp`."""
    dims = tuple({0: torch.export.Dim.AUTO} for _ in args) if dynamic else None
    shapes = {"args": dims} if dims else None
    gm = torch.export.export(model, args, dynamic_shapes=shapes, strict=False).module(check_guards=False)
    assert isinstance(gm, GraphModule)
    gm.graph.set_codegen(CodeGen())
    constants = {}
    for node in list(gm.graph.nodes):
        if node.op == "get_attr":
            held = getattr(gm, str(node.target), None)
            if isinstance(held, GraphModule):
                constants[str(node.target)] = held
                node.target = f"_fxamp.{node.target}"
    return gm, constants


def inlined(model: nn.Module, *args: Tensor) -> tuple[GraphModule, dict[str, Any], int]:
    """Export a model, inline its regions, and put what they held where the graph finds it."""
    gm, constants = exported(model, *args)
    edits = inline_regions(gm.graph, constants)
    holder = nn.Module()
    for name, value in constants.items():
        setattr(holder, name, value)
    gm.add_module("_fxamp", holder)
    gm.graph.lint()
    gm.recompile()
    return gm, constants, edits


def check_equal(model: nn.Module, gm: GraphModule, *args: Tensor) -> None:
    """Check that two ways to run a model agree in values, requires_grad, gradients and random state."""
    results = []
    for call in (model, gm):
        torch.manual_seed(0)
        outputs = call(*args)
        outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        total = sum((o.float().square().sum() for o in outputs if o.requires_grad), torch.zeros(()))
        weights = [dict(call.named_parameters())["w"]]
        gradients = list(torch.autograd.grad(total, weights, allow_unused=True)) if total.requires_grad else []
        results.append((outputs, [g for g in gradients if g is not None], torch.get_rng_state()))
    (expected, gradients, state), (got, got_gradients, got_state) = results
    assert [o.requires_grad for o in expected] == [o.requires_grad for o in got]
    assert [o.dtype for o in expected] == [o.dtype for o in got]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, got_gradients, strict=True))
    assert torch.equal(state, got_state)
    assert torch.is_grad_enabled()


# Regions.


def no_grad(self: Model, x: Tensor) -> Any:
    with torch.no_grad():
        frozen = x @ self.w
    return frozen, x @ self.w + frozen


def enable_grad_inside_no_grad(self: Model, x: Tensor) -> Any:
    with torch.no_grad():
        a = x @ self.w
        with torch.enable_grad():
            b = x @ self.w
        c = (b * 2).sin()
    return a, b, c, c + b


def set_grad_enabled(self: Model, x: Tensor) -> Any:
    with torch.set_grad_enabled(False):
        a = (x @ self.w).relu()
    return a, a @ self.w


def several_outputs_of_a_region(self: Model, x: Tensor) -> Any:
    with torch.no_grad():
        first, second = (x @ self.w).chunk(2, 1)
        third = first + second
    return second, first, third * self.w[0, 0]


def an_operand_that_passes_through(self: Model, x: Tensor) -> Any:
    y = x @ self.w
    with torch.no_grad():
        z = y + 1
    return y, z


def random_numbers(self: Model, x: Tensor) -> Any:
    with torch.no_grad():
        mask = torch.rand_like(x) > 0.5
        dropped = torch.dropout(x, 0.5, True)
    return torch.dropout(x @ self.w, 0.3, True) * mask + dropped


def a_constant_inside(self: Model, x: Tensor) -> Any:
    with torch.no_grad():
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        y = x * scale
    return y @ self.w


def autocast_off(self: Model, x: Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        y = x @ self.w
    return y, y @ self.w


def autocast_on(self: Model, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=BF16):
        y = x @ self.w
    return y, y.float() @ self.w


def autocast_in_autocast(self: Model, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=BF16):
        a = x @ self.w
        with torch.autocast("cpu", enabled=False):
            b = x @ self.w
        c = x @ self.w
    return a, b, c


def autocast_in_no_grad(self: Model, x: Tensor) -> Any:
    with torch.no_grad():
        a = x @ self.w
        with torch.autocast("cpu", dtype=BF16):
            b = x @ self.w
    return a, b, x @ self.w


def regions_in_a_row(self: Model, x: Tensor) -> Any:
    with torch.no_grad():
        a = x @ self.w
    b = x @ self.w
    with torch.no_grad():
        c = b + a
    return c, b


REGIONS = [
    no_grad, enable_grad_inside_no_grad, set_grad_enabled, several_outputs_of_a_region, an_operand_that_passes_through,
    random_numbers, a_constant_inside, autocast_off, autocast_on, autocast_in_autocast, autocast_in_no_grad,
    regions_in_a_row,
]  # fmt: skip


@pytest.mark.parametrize("forward", REGIONS, ids=lambda f: f.__name__)
def test_inlined_regions_are_eager_bit_for_bit(forward: Callable[..., Any]) -> None:
    model = Model(forward)
    gm, constants, edits = inlined(model, example())
    assert edits > 0
    assert not any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in gm.graph.nodes)
    assert not any(isinstance(value, GraphModule) for value in constants.values())
    check_equal(model, gm, example())
    assert inline_regions(gm.graph, constants) == 0


def test_a_region_becomes_two_switches() -> None:
    gm, _, edits = inlined(Model(no_grad), example())
    switches = [n.target for n in gm.graph.nodes if n.target in (torch.is_grad_enabled, torch._C._set_grad_enabled)]
    assert edits == 1
    assert switches == [torch.is_grad_enabled, torch._C._set_grad_enabled, torch._C._set_grad_enabled]


def test_what_an_autocast_region_says_stays_on_its_nodes_the_inner_one_winning() -> None:
    gm, _, _ = inlined(Model(autocast_in_autocast), example())
    found = [note_of(n).region for n in gm.graph.nodes if n.target is aten.matmul.default]
    regions = [r for r in found if r is not None]
    assert [r[:2] for r in regions] == [("cpu", True), ("cpu", False), ("cpu", True)]
    assert regions[0][2] == regions[2][2] == BF16


def test_autocast_switches_go_all_together() -> None:
    gm, _, _ = inlined(Model(autocast_in_no_grad), example())
    assert drop_autocast_switches(gm.graph) == 2
    assert drop_autocast_switches(gm.graph) == 0
    assert not any(n.target in (enter_autocast, exit_autocast) for n in gm.graph.nodes)
    gm.graph.lint()


def test_a_body_that_two_regions_share_is_copied_twice() -> None:
    model = Model(regions_in_a_row)
    gm, constants = exported(model, example())
    first, second = (n for n in gm.graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator))
    body, holder = constants[first.args[1].target.removeprefix("_fxamp.")], first.args[1]
    second.replace_all_uses_with(first)
    gm.graph.erase_node(second)
    with gm.graph.inserting_after(first):
        again = gm.graph.call_function(first.target, (False, holder, *first.args[2:]))
    again.meta.update(first.meta)
    users = [u for u in first.users if u is not again]
    users[-1].replace_input_with(first, again)
    assert inline_regions(gm.graph, constants) == 2
    copies = [n for n in gm.graph.nodes if n.target is aten.matmul.default]
    assert len(copies) == 3
    assert len([n for n in body.graph.nodes if n.op == "call_function"]) == 1
    assert holder not in gm.graph.nodes


def test_two_constants_of_one_name_are_both_kept() -> None:
    gm, constants = exported(Model(no_grad), example())
    node = next(n for n in gm.graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator))
    holder = node.args[1]
    body = constants[holder.target.removeprefix("_fxamp.")]
    body.register_buffer("deep", torch.ones(6))
    inner = next(n for n in body.graph.nodes if n.op == "call_function")
    with body.graph.inserting_before(inner):
        constant = body.graph.get_attr("deep")
        scaled = body.graph.call_function(aten.mul.Tensor, (inner.args[0], constant))
    inner.args = (scaled, inner.args[1])
    taken = torch.zeros(6)
    constants[f"{holder.name}_deep"] = taken
    inline_regions(gm.graph, constants)
    assert constants[f"{holder.name}_deep"] is taken
    held = next(n for n in gm.graph.nodes if n.op == "get_attr" and "deep" in n.target)
    assert constants[held.target.removeprefix("_fxamp.")] is body.deep


def test_an_error_inside_a_region_leaves_the_modes_as_they_were() -> None:
    def forward(self: Model, x: Tensor, index: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
            row = (x @ self.w).index_select(0, index)
        return x @ self.w + row.float()

    model = fxamp.convert(Model(forward), (example(), torch.tensor([1])), policy="O0", dynamic_shapes=None)
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        model(example(), torch.tensor([9]))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


# Composites.


def composite(target: Any, *shapes: Any, **options: Any) -> tuple[GraphModule, list[Tensor]]:
    """Return a graph of one op over parameters of these shapes, and the same tensors; a list of shapes is a list."""
    generator = torch.Generator().manual_seed(0)
    builder = Builder()
    tensors: list[Tensor] = []

    def operand(shape: Any) -> Any:
        if isinstance(shape, list):
            return [operand(s) for s in shape]
        if not isinstance(shape, tuple):
            return shape
        tensors.append(torch.randn(shape, generator=generator))
        node = builder.input(f"x{len(tensors)}", shape)
        node.meta["val"] = builder.mode.from_tensor(tensors[-1])
        return node

    out = builder.call(target, *map(operand, shapes), **options)
    if isinstance(out.meta["val"], tuple):
        return builder.finish(*(builder.call(operator.getitem, out, i) for i in range(len(out.meta["val"])))), tensors
    return builder.finish(out), tensors


COMPOSITES = {
    "einsum bij,bjk->bik": (aten.einsum.default, "bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
    "einsum bhid,bhjd->bhij": (aten.einsum.default, "bhid,bhjd->bhij", [(2, 3, 4, 5), (2, 3, 6, 5)]),
    "einsum i,j->ij": (aten.einsum.default, "i,j->ij", [(3,), (4,)]),
    "einsum ij->ji": (aten.einsum.default, "ij->ji", [(3, 4)]),
    "einsum ii->i": (aten.einsum.default, "ii->i", [(3, 3)]),
    "einsum bij,jk,bk->i": (aten.einsum.default, "bij,jk,bk->i", [(2, 3, 4), (4, 5), (2, 5)]),
    "einsum ...ij,...j->...i": (aten.einsum.default, "...ij,...j->...i", [(2, 3, 4), (2, 4)]),
    "gru_cell": (aten.gru_cell.default, (2, 3), (2, 4), (12, 3), (12, 4), (12,), (12,)),
    "lstm_cell": (aten.lstm_cell.default, (2, 3), [(2, 4), (2, 4)], (16, 3), (16, 4), (16,), (16,)),
    "inner": (aten.inner.default, (2, 3), (4, 3)),
    "tensordot": (aten.tensordot.default, (2, 3, 4), (4, 3, 5), [1, 2], [1, 0]),
    "pad reflect": (aten.pad.default, (2, 3, 5), [1, 1], "reflect"),
    "pad constant": (aten.pad.default, (2, 3, 5), [1, 1]),
    "pad circular": (aten.pad.default, (2, 3, 5), [1, 1], "circular"),
    "matrix_power": (aten.matrix_power.default, (3, 3), 3),
}  # fmt: skip


def outputs_and_gradients(gm: GraphModule, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    outputs = list(gm(*leaves))
    total = sum(((i + 1) * o.square().sum() for i, o in enumerate(outputs)), torch.zeros(()))
    return outputs, list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("case", COMPOSITES)
def test_a_decomposed_composite_is_eager_bit_for_bit_forward_and_backward(case: str) -> None:
    gm, tensors = composite(*COMPOSITES[case])
    original = copy.deepcopy(gm)
    assert decompose_composites(gm.graph, "cpu") == (1 if case != "inner" else 2, [])
    assert decompose_composites(gm.graph, "cpu") == (0, [])
    gm.graph.lint()
    gm.recompile()
    expected, gradients = outputs_and_gradients(original, tensors)
    got, got_gradients = outputs_and_gradients(gm, tensors)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, got_gradients, strict=True))


def test_a_cell_becomes_its_layers_with_their_weights_at_hand() -> None:
    gm, _ = composite(*COMPOSITES["lstm_cell"])
    decompose_composites(gm.graph, "cpu")
    layers = [n for n in gm.graph.nodes if n.target is aten.linear.default]
    assert {layer.args[1].name for layer in layers} == {"x4", "x5"}


def test_new_nodes_say_where_they_come_from() -> None:
    gm, _ = composite(*COMPOSITES["gru_cell"])
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.meta |= {"nn_module_stack": {"k": ("cell", nn.GRUCell)}, "stack_trace": "here"}
    note(node, region=("cpu", False, None))
    decompose_composites(gm.graph, "cpu")
    made = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert len(made) > 5
    assert all(n.meta["nn_module_stack"] == {"k": ("cell", nn.GRUCell)} for n in made)
    assert all(n.meta["stack_trace"] == "here" and (note_of(n).region or ("", True))[1] is False for n in made)


def test_sizes_that_were_dynamic_stay_dynamic() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return torch.einsum("bi,ij->bj", x, self.w) + torch.einsum("bi,bj->bij", x, x).sum(1)

    model = Model(forward)
    gm, _ = exported(model, example(4), dynamic=True)
    assert decompose_composites(gm.graph, "cpu") == (2, [])
    gm.recompile()
    for rows in (2, 3, 7):
        assert torch.equal(gm(example(rows))[0], model(example(rows)))


def test_a_composite_over_a_dynamic_size_is_decomposed() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, x.shape[0], 0)) @ self.w

    model = Model(forward)
    gm, _ = exported(model, example(4), dynamic=True)
    assert decompose_composites(gm.graph, "cpu") == (1, [])
    gm.recompile()
    assert torch.equal(gm(example(3))[0], model(example(3)))


def test_equal_composites_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    original = legalize._trace

    def trace(node: Any, *rest: Any) -> Any:
        traced.append(node)
        return original(node, *rest)

    monkeypatch.setattr(legalize, "_trace", trace)
    builder = Builder()
    x, y = builder.input("x", (2, 4, 4)), builder.input("y", (2, 3, 4))
    made = [builder.call(aten.einsum.default, "bij,bjk->bik", [x, x]) for _ in range(3)]
    made.append(builder.call(aten.einsum.default, "bij,bjk->bik", [y, x]))
    gm = builder.finish(*made)
    assert decompose_composites(gm.graph, "cpu") == (4, [])
    assert len(traced) == 2


def test_a_function_of_torch_becomes_the_operators_that_it_calls() -> None:
    gm, inputs = composite(torch.functional.einsum, "bi,ij->bj", (2, 3), (3, 4))
    expected = gm(*inputs)
    assert decompose_composites(gm.graph, "cpu") == (2, [])  # the function, then the operator
    gm.recompile()
    assert torch.equal(pytree.tree_leaves(gm(*inputs))[0], pytree.tree_leaves(expected)[0])
    assert "bmm" in {ops.name(n) for n in gm.graph.nodes}


@pytest.mark.parametrize(
    ("target", "shapes", "name"),
    [
        (aten.cov.default, ((3, 5),), "cov"),  # asks for values
        (
            aten._trilinear.default,
            ((2, 3), (2, 4), (2, 5), [], [], [], []),
            "_trilinear",
        ),  # is not written in other ops
    ],
)
def test_what_cannot_be_decomposed_stays_whole_and_is_listed(target: Any, shapes: tuple[Any, ...], name: str) -> None:
    try:
        gm, _ = composite(target, *shapes)
    except Exception:  # fake tensors cannot run it: the graph has it without a value
        builder = Builder()
        operands = [builder.input(f"x{i}", s) if isinstance(s, tuple) else s for i, s in enumerate(shapes)]
        gm = builder.finish(builder.graph.call_function(target, tuple(operands)))
    before = [n.target for n in gm.graph.nodes]
    assert decompose_composites(gm.graph, "cpu") == (0, [name])
    assert [n.target for n in gm.graph.nodes] == before


def test_a_recurrence_is_not_unrolled() -> None:
    gm, _ = composite(
        aten.gru.input, (5, 2, 3), (1, 2, 4), [(12, 3), (12, 4), (12,), (12,)], True, 1, 0.0, False, False, False
    )
    assert decompose_composites(gm.graph, "cpu") == (0, ["gru"])


# The exporter's assertions.


def assertion(dtype: torch.dtype) -> GraphModule:
    builder = Builder()
    x = builder.input("x", (2,), dtype)
    builder.graph.call_function(
        aten._assert_tensor_metadata.default, (x, [2], None, torch.float32), {"device": torch.device("cpu")}
    )
    return builder.finish(x)


def test_an_assertion_loses_its_device_and_the_dtype_of_what_was_recoloured() -> None:
    gm = assertion(BF16)
    assert loosen_assertions(gm.graph, lambda n: True) == 1
    assert loosen_assertions(gm.graph, lambda n: True) == 0
    gm.recompile()
    gm(torch.ones(2, dtype=BF16))
    with pytest.raises(RuntimeError, match="sizes mismatch"):
        gm(torch.ones(3, dtype=BF16))


def test_an_assertion_on_what_was_not_recoloured_still_holds() -> None:
    gm = assertion(torch.float32)
    assert loosen_assertions(gm.graph, lambda n: False) == 1
    assert loosen_assertions(gm.graph, lambda n: False) == 0
    gm.recompile()
    gm(torch.ones(2))
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        gm(torch.ones(2, dtype=BF16))


def test_a_users_cast_after_a_lowered_layer_runs() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return (x @ self.w).to(torch.float32) + 1

    model = Model(forward)
    module = fxamp.convert(model, (example(),), policy="O1,dtype=bf16")
    with torch.autocast("cpu", BF16):
        assert torch.equal(module(example()), model(example()))


def test_a_field_is_read_by_index_and_an_attribute_of_a_tensor_is_not() -> None:
    graph = symbolic_trace(lambda x: (x.sort(1).indices, x.shape, torch.sort(x)[0].T)).graph
    assert index_fields(graph) == 1
    assert index_fields(graph) == 0
    assert [n.args[1] for n in graph.nodes if n.target in (operator.getitem, getattr)] == [0, 1, "shape", "T"]


def test_a_graph_without_regions_or_composites_is_left_alone() -> None:
    gm, _ = composite(aten.relu.default, (2, 3))
    before = render(gm.graph)
    assert inline_regions(gm.graph, {}) == 0
    assert decompose_composites(gm.graph, "cpu") == (0, [])
    assert render(gm.graph) == before
