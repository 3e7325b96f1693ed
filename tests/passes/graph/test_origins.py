"""What a front end says of each node, and what it hears that says nothing of one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxamp.capture.graph import attribute_of
from passes import Origin, compile_graph
from passes.contract.errors import CaptureError
from passes.contract.policy import Policy
from passes.graph.bodies import all_graphs, bodies_of, origins_of
from passes.graph.notes import note_of
from passes.pipeline import _note
from tests.support.graphs import LAYER, parse

O1 = Policy("O1", dtype=torch.bfloat16, device="cpu")


@pytest.mark.parametrize("name", ["x", "relu"])
@pytest.mark.parametrize("policy", ["O0", "O1"])
def test_a_node_without_an_origin_is_named_before_anything_changes(name: str, policy: str) -> None:
    gm = parse(LAYER)
    origins = {node: Origin() for node in gm.graph.nodes if node.name != name}
    before = str(gm.graph)
    with pytest.raises(CaptureError, match=rf"node '{name}' has no Origin: .* for every input and call"):
        compile_graph(gm.graph, Policy(policy, dtype=torch.bfloat16, device="cpu"), gm.get_parameter, origins)
    assert str(gm.graph) == before


def test_a_get_attr_needs_none_since_the_compiler_asks_what_it_is() -> None:
    gm = parse(LAYER)
    origins = {node: Origin() for node in gm.graph.nodes if node.op != "get_attr"}
    plan = compile_graph(gm.graph, O1, gm.get_parameter, origins)
    assert [d.colour for d in plan.decisions] == ["bfloat16", "bfloat16"]


def test_what_an_origin_says_is_obeyed() -> None:
    gm = parse(LAYER)
    outside = ("cpu", False, None, True)
    origins = {n: Origin(region=outside if n.name == "linear" else None) for n in gm.graph.nodes}
    plan = compile_graph(gm.graph, O1, gm.get_parameter, origins)
    assert [d.colour for d in plan.decisions] == ["float32", "float32"]


@pytest.mark.parametrize("wrong", [{"role": "bias"}, {"cast": "implicit"}])
def test_an_origin_that_says_what_nobody_knows_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"the {next(iter(wrong))} of an Origin is one of"):
        Origin(**wrong)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,))
        return out


def exported() -> tuple[Any, Any]:
    gm: Any = torch.export.export(Branches(), (torch.randn(3, 3),)).module(check_guards=False)
    return gm, functools.partial(attribute_of, gm)


def test_a_graph_inside_a_graph_needs_them_too() -> None:
    gm, attribute = exported()
    inside = {n for g in all_graphs(gm.graph, bodies_of(gm.graph, attribute))[1:] for n in g.nodes if n.op != "output"}
    assert inside
    for node in inside:
        origins = {n: o for n, o in origins_of(gm.graph, attribute).items() if n is not node}
        with pytest.raises(CaptureError, match=f"node '{node.name}' has no Origin"):
            compile_graph(gm.graph, O1, attribute, origins)


def test_to_ask_for_the_graphs_inside_a_graph_notes_nothing() -> None:
    gm, attribute = exported()
    (call,) = bodies_of(gm.graph, attribute)
    assert not note_of(call).pure
    _note(gm.graph, attribute, origins_of(gm.graph, attribute))
    assert note_of(call).pure
