"""What is noted on a node is one record, and says which rule made the node."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from passes.graph import notes
from passes.graph.notes import is_inserted, note, note_of
from tests.support.exported import graph_of
from tests.support.helpers import Two

ROOT = Path(__file__).parents[3]
# Keys that torch writes, or reads: its own, and Dynamo's and the partitioner's.
TORCHS = {
    "val",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "stack_trace",
    "example_value",
    "grapharg",
    "tensor_meta",
    "_checkpoint_context_fn",
    "recompute",
    "ac_graph_id",
    "from_node",
}


def masked(self: Any, x: Tensor, target: Tensor) -> Tensor:
    h = self.l(x)
    return F.cross_entropy(torch.where(h > 0, h, self.lowest).softmax(1), target)


@pytest.fixture(scope="module")
def converted() -> GraphModule:
    inputs = (torch.randn(4, 6), torch.tensor([0, 1, 2, 3]))
    model = Two(masked, lowest=torch.tensor(torch.finfo(torch.float32).min))  # a number that only FP32 holds
    return graph_of(model, inputs, "O2,dtype=bf16")


def made_by(module: GraphModule, rule: str) -> set[str]:
    return {str(n.target) for n in module.graph.nodes if note_of(n).made_by == rule}


def test_what_a_rule_made_is_signed_with_it(converted: GraphModule) -> None:
    assert made_by(converted, notes.CAST_OPERAND) == {"aten.to.dtype"}
    assert made_by(converted, notes.CLAMP_OPERAND) == {"aten.clamp.default"}
    assert made_by(converted, notes.SPLIT_LOSS) >= {"aten.log_softmax.int", "aten.nll_loss.default", "aten.sum.default"}


def test_what_was_captured_is_signed_by_nobody(converted: GraphModule) -> None:
    assert made_by(converted, "") >= {"aten.linear.default", "aten.where.self", "aten.softmax.int"}


def test_a_cast_that_restores_an_output_is_not_one_of_an_operand() -> None:
    module = graph_of(nn.Linear(2, 2), torch.randn(3, 2), "O1,dtype=bf16")
    (last,) = module.graph.output_node().all_input_nodes
    assert note_of(last).made_by == notes.RESTORE_OUTPUT
    assert is_inserted(last)


def test_a_copied_node_keeps_its_note_when_the_first_gets_another() -> None:
    graph = Graph()
    note(graph.placeholder("x"), role="buffer")
    copied = copy.deepcopy(graph)
    (first,), (second,) = graph.nodes, copied.nodes
    note(first, role="parameter")
    assert (note_of(first).role, note_of(second).role) == ("parameter", "buffer")


def keys_of_meta(source: str) -> set[str]:
    """Return the keys by which a file reads or writes the meta of a node."""
    found: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and is_meta(node.value):
            found.append(node.slice)
        elif isinstance(node, ast.Compare) and any(map(is_meta, node.comparators)):
            found.append(node.left)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_meta(node.func.value):
            found += node.args[:1]
    return {n.value for n in found if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def is_meta(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "meta"


def test_fxamp_has_no_other_key() -> None:
    files = [p for package in ("passes", "fxamp") for p in (ROOT / package).rglob("*.py")]
    assert not {(p.name, key) for p in files for key in keys_of_meta(p.read_text("utf-8")) if key not in TORCHS}
    assert keys_of_meta('n.meta["a"]; n.meta.get("b", 1); "c" in n.meta; n.meta.setdefault("d", 2)') == set("abcd")
