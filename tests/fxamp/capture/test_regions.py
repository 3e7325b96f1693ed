"""Regions of the exporter are inlined without changing a value, a gradient or a random number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fxamp
from fxamp.capture.regions import inline_regions
from passes.graph.notes import note_of
from tests.support.exported import Model, example, exported, inlined

BF16 = torch.bfloat16
aten = torch.ops.aten


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
