"""A graph that was broken on purpose does not verify, and the error says where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

from passes.assign.assign_precision import AssignPrecision
from passes.casts.insert_casts import InsertCasts
from passes.casts.verify import verify
from passes.contract.errors import VerificationError
from passes.contract.policy import Policy, Target
from passes.form import Assignment, Unit
from passes.graph.notes import is_inserted
from passes.graph.values import Inference
from tests.support.graphs import parse, residual_chain, unit_of

BF16 = torch.bfloat16
TEXT = """
    x: f32[2, 4]
    w: f32[4, 4] = param
    linear: f32[2, 4] = linear(x, w)
    relu: f32[2, 4] = relu(linear)
    linear_1: f32[2, 4] = linear(relu, w)
    return linear_1
"""


def rewritten(gm: GraphModule) -> Assignment:
    """Colour a graph and insert its casts."""
    policy = Policy("O1", dtype=BF16, device="cpu")
    assignment = AssignPrecision(policy)(Unit(gm.graph, gm.get_parameter, Target.of(policy)))
    unit = unit_of(gm.graph, assignment)
    InsertCasts()(unit)
    return unit.after().decided


def located() -> tuple[GraphModule, Assignment]:
    """Return a rewritten graph whose first layer says where it comes from."""
    gm = parse(TEXT)
    node(gm, "linear").meta["nn_module_stack"] = {"k": ("block.fc", nn.Linear)}
    node(gm, "linear").meta["stack_trace"] = 'File "/home/me/model.py", line 12, in forward\n    return self.fc(x)'
    return gm, rewritten(gm)


def node(gm: GraphModule, name: str) -> Node:
    return next(n for n in gm.graph.nodes if n.name == name)


def test_a_correct_graph_verifies() -> None:
    gm, assignment = located()
    verify(gm.graph)
    verify(gm.graph, assignment)


def test_a_cast_to_the_wrong_dtype_is_found() -> None:
    gm, assignment = located()
    cast = next(n for n in gm.graph.nodes if is_inserted(n))
    cast.args = (cast.args[0], torch.float16)
    with pytest.raises(
        VerificationError, match=rf"to \(node {cast.name}, .*gives torch.float16, its plan says .*bfloat16"
    ):
        verify(gm.graph, assignment)


def test_a_missing_cast_is_found_where_its_reader_rejects_the_operand() -> None:
    gm, assignment = located()
    linear = node(gm, "linear")
    linear.args = (node(gm, "x"), linear.args[1])
    with pytest.raises(
        VerificationError, match=r"linear \(node linear, module 'block.fc', model.py:12: return self.fc\(x\)\) rejects"
    ):
        verify(gm.graph, assignment)


def test_missing_casts_are_found_where_the_reader_takes_what_it_gets() -> None:
    gm, assignment = located()
    linear = node(gm, "linear")
    linear.args = (node(gm, "x"), node(gm, "w"))
    with pytest.raises(VerificationError, match=r"node linear, .*gives torch.float32, its plan says torch.bfloat16"):
        verify(gm.graph, assignment)


def test_an_operand_that_is_made_later_is_found() -> None:
    gm, assignment = located()
    linear = node(gm, "linear")
    relu = node(gm, "relu")
    linear.args = (relu, linear.args[1])
    with pytest.raises(VerificationError, match=r"linear \(node linear, module 'block.fc', model.py:12: .*reads relu"):
        verify(gm.graph, assignment)


def test_a_graph_that_fx_finds_malformed_does_not_verify() -> None:
    gm = parse(TEXT)
    node(gm, "relu").name = "linear"
    with pytest.raises(VerificationError, match="malformed"):
        verify(gm.graph)


class _Counting(Inference):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Node] = []

    def __call__(self, node: Node, dtype_of: Any) -> Any:
        self.asked.append(node)
        return super().__call__(node, dtype_of)


def test_only_what_was_touched_is_inferred_again() -> None:
    gm = parse(
        """
        x: f32[2, 4]
        w: f32[4, 4] = param
        exp: f32[2, 4] = exp(x)
        abs_1: f32[2, 4] = abs(exp)
        linear: f32[2, 4] = linear(abs_1, w)
        return linear
        """
    )
    assignment = rewritten(gm)
    counting = _Counting()
    assignment = replace(assignment, infer=counting)
    verify(gm.graph, assignment)
    touched = [
        n for n in gm.graph.nodes if is_inserted(n) or any(_recoloured(i, assignment) for i in n.all_input_nodes)
    ]
    assert counting.asked == [n for n in touched if n.op != "output"]
    assert node(gm, "exp") not in touched
    assert node(gm, "linear") in touched


def _recoloured(node: Node, assignment: Assignment) -> bool:
    return bool(assignment.dtypes[node] != assignment.original[node])


def test_an_op_is_run_once_for_each_kind_of_call() -> None:
    gm = residual_chain(300)
    assignment = rewritten(gm)
    runs = []

    class Watched(Inference):
        def _run(self, node: Node, dtype_of: Any) -> Any:
            runs.append(node)
            return super()._run(node, dtype_of)

    verify(gm.graph, replace(assignment, infer=Watched()))
    assert 0 < len(runs) < 20
