"""Composites are decomposed, switches dropped and fields indexed without changing a value or a gradient."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

import fxamp
from passes._torch import enter_autocast, exit_autocast, pytree
from passes.graph.notes import note, note_of
from passes.legalize import legalize
from passes.legalize.legalize import decompose_composites, drop_autocast_switches, index_fields
from passes.ops import ops
from tests.support.exported import Model, exported, inlined
from tests.support.graphs import Builder, render
from tests.support.helpers import example

BF16 = torch.bfloat16
aten = torch.ops.aten


def test_autocast_switches_go_all_together() -> None:
    def forward(self: Model, x: Tensor) -> Any:
        with torch.no_grad():
            a = x @ self.w
            with torch.autocast("cpu", dtype=BF16):
                b = x @ self.w
        return a, b, x @ self.w

    gm = inlined(Model(forward), example())
    assert drop_autocast_switches(gm.graph) == 2
    assert drop_autocast_switches(gm.graph) == 0
    assert not any(n.target in (enter_autocast, exit_autocast) for n in gm.graph.nodes)
    gm.graph.lint()


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
    assert decompose_composites(gm.graph, "cpu") == (1 if case != "inner" else 2)
    assert decompose_composites(gm.graph, "cpu") == 0
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
    gm = exported(model, example(4), dynamic=True)
    assert decompose_composites(gm.graph, "cpu") == 2
    gm.recompile()
    for rows in (2, 3, 7):
        assert torch.equal(gm(example(rows))[0], model(example(rows)))


def test_a_composite_over_a_dynamic_size_is_decomposed() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, x.shape[0], 0)) @ self.w

    model = Model(forward)
    gm = exported(model, example(4), dynamic=True)
    assert decompose_composites(gm.graph, "cpu") == 1
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
    assert decompose_composites(gm.graph, "cpu") == 4
    assert len(traced) == 2


def test_a_function_of_torch_becomes_the_operators_that_it_calls() -> None:
    gm, inputs = composite(torch.functional.einsum, "bi,ij->bj", (2, 3), (3, 4))
    expected = gm(*inputs)
    assert decompose_composites(gm.graph, "cpu") == 2  # the function, then the operator
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
    assert decompose_composites(gm.graph, "cpu") == 0
    assert [n.target for n in gm.graph.nodes] == before


def test_a_recurrence_is_not_unrolled() -> None:
    gm, _ = composite(
        aten.gru.input, (5, 2, 3), (1, 2, 4), [(12, 3), (12, 4), (12,), (12,)], True, 1, 0.0, False, False, False
    )
    assert decompose_composites(gm.graph, "cpu") == 0


def test_a_users_cast_after_a_lowered_layer_runs() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return (x @ self.w).to(torch.float32) + 1

    model = Model(forward)
    module = fxamp.convert(model, (example(),), policy="O1,dtype=bf16")  # an export drops this cast
    with torch.autocast("cpu", BF16):
        assert torch.equal(module(example()), model(example()))


def test_a_field_is_read_by_index_and_an_attribute_of_a_tensor_is_not() -> None:
    graph = symbolic_trace(lambda x: (x.sort(1).indices, x.shape, torch.sort(x)[0].T)).graph
    assert index_fields(graph) == 1
    assert index_fields(graph) == 0
    assert [n.args[1] for n in graph.nodes if n.target in (operator.getitem, getattr)] == [0, 1, "shape", "T"]


def test_a_graph_without_composites_is_left_alone() -> None:
    gm, _ = composite(aten.relu.default, (2, 3))
    before = render(gm.graph)
    assert decompose_composites(gm.graph, "cpu") == 0
    assert render(gm.graph) == before
