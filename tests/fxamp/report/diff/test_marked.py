"""The difference between a graph and what it was converted to reads as its code, with what conversion did marked."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from fxamp.report.diff.diff import GraphDiff


class Net(nn.Module):
    """A layer that is called twice, attention, sizes, a method and an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(F.relu(self.fc(x)))
        mixed, _ = self.attention(y, y, y, need_weights=False)
        flat = mixed.view(mixed.size(0), -1)
        made: Tensor = self.norm(flat.reshape(y.shape)).exp() + 1
        return made


X = (torch.randn(3, 2, 4),)


@pytest.fixture(scope="module")
def converted() -> Any:
    return fxamp.convert(Net(), X, policy="O1,dtype=bf16", check=False)


def test_it_reads_as_the_code_of_the_model(converted: Any) -> None:
    found = fxamp.diff(torch.fx.symbolic_trace(Net()), converted)
    lines = str(found).splitlines()
    assert lines[2:] == [
        "@@ 8 added, 0 removed, 9 changed @@",
        "  x = input",
        "+ x.to(bfloat16)",
        "+ fc.weight.to(bfloat16)",
        "+ fc.bias.to(bfloat16)",
        "! fc = self.fc(x)                                              runs in bfloat16",
        "! relu = torch.nn.functional.relu(fc, inplace=False)           runs in bfloat16",
        "! fc_1 = self.fc(relu)                                         runs in bfloat16",
        "+ attention.in_proj_weight.to(bfloat16)",
        "+ attention.in_proj_bias.to(bfloat16)",
        "+ attention.out_proj.weight.to(bfloat16)",
        "+ attention.out_proj.bias.to(bfloat16)",
        "! attention = self.attention(fc_1, fc_1, fc_1, need_weights=False) runs in bfloat16",
        "  getitem = _operator.getitem(attention, 0)",
        "  getitem_1 = _operator.getitem(attention, 1)",
        "  size = getitem.size(0)",
        "! view = getitem.view(size, -1)                                runs in bfloat16",
        "  getattr_1 = builtins.getattr(fc_1, 'shape')",
        "! reshape = view.reshape(getattr_1)                            runs in bfloat16",
        "! norm = self.norm(reshape)                                    runs in bfloat16",
        "! exp = norm.exp()                                             runs in bfloat16",
        "! add = _operator.add(exp, 1)                                  runs in bfloat16",
        "+ add.to(float32)",
        "  return add",
    ]


def test_the_code_is_a_block_in_markdown_and_on_a_page(converted: Any) -> None:
    found = fxamp.diff(torch.fx.symbolic_trace(Net()), converted)
    (block,) = re.findall(r"^```diff\n(.*?)^```$", found.to_markdown(), re.DOTALL | re.MULTILINE)
    assert block.splitlines() == list(found.code)
    (shown,) = re.findall(r"<pre>(.*?)</pre>", found.to_html(), re.DOTALL)
    assert html.unescape(shown).splitlines() == list(found.code)


def test_a_fence_is_longer_than_any_in_the_code() -> None:
    odd = GraphDiff("a", "b", (), code=("  x = '````'", "+ " + "y" * 100))
    assert "\n`````diff\n" in odd.to_markdown()
    long = GraphDiff("a", "b", (), code=("+ " + "y" * 1000,) * 2000)
    assert len(long.to_markdown().encode()) < 2**20
    assert "more lines are left out here" in long.to_markdown()


def test_a_graph_of_aten_says_what_ran_before(converted: Any) -> None:
    found = fxamp.diff(torch.export.export(Net(), X).module(), converted)
    assert not [c for c in found.changes if c.kind == "removed"]
    assert {(c.field, c.before, c.after) for c in found.changes if c.kind == "changed"} == {
        ("dtype", "float32", "bfloat16")
    }
    assert sum(c.field == "cast" for c in found.changes) == 8


def test_without_rounding_nothing_is_marked() -> None:
    found = fxamp.diff(torch.fx.symbolic_trace(Net()), fxamp.convert(Net(), X, policy="O0", check=False))
    assert not found
    assert not [line for line in found.code if line[0] != " "]


def test_what_is_new_and_what_is_gone_is_marked(converted: Any) -> None:
    graph = torch.fx.symbolic_trace(Net())
    relu = next(n for n in graph.graph.nodes if n.name == "relu")
    relu.replace_all_uses_with(relu.args[0])
    graph.graph.erase_node(relu)
    exp = next(n for n in graph.graph.nodes if n.name == "exp")
    exp.target = "tanh"
    found = fxamp.diff(graph, converted)
    assert [line for line in found.code if "relu" in line or "exp" in line or "tanh" in line] == [
        f"+ {'relu = torch.nn.functional.relu(fc)':<60} bfloat16",
        "- exp = norm.tanh()",
        f"+ {'exp = norm.exp()':<60} bfloat16",
        f"! {'add = _operator.add(exp, 1)':<60} runs in bfloat16",
    ]


def test_another_model_is_said_in_a_line(converted: Any) -> None:
    other = nn.Sequential(*(nn.Conv1d(2, 2, 1) for _ in range(12)))
    (line,) = fxamp.diff(torch.fx.symbolic_trace(other), converted).code
    assert line.startswith("! (plan)  model: 14 nodes -> another model")
