"""The page of a report: one file that needs nothing else, in which nothing that a model is called does anything."""

from __future__ import annotations

import functools
import html.parser
import itertools
import json
import re
import time
from typing import Any

import msgspec
import networkx as nx
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import fxamp
from fxamp.report.page.layout import GAP, layered
from fxamp.report.page.report import MOST_NODES, MOST_ROWS, page
from fxamp.report.page.views import MOST, View, views
from fxamp.report.record.record import Record
from reports.subjects import converted
from tests.support.records import node

EMPTY_TAGS = {"meta", "input", "br", "link", "rect", "path"}


class Page(html.parser.HTMLParser):
    """The tags and attributes of a page, the data in it, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self._data = ""
        self.feed(text)
        self.close()
        assert self._open == []
        self.data: dict[str, Any] = json.loads(self._data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY_TAGS:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in EMPTY_TAGS:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][1].get("id") == "data":
            self._data += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def record() -> Record:
    found = fxamp.report(converted("hf_bert", "O2,dtype=bf16")).record
    assert found is not None
    return found


@functools.cache
def page_of(name: str, policy: str) -> str:
    return fxamp.report(converted(name, policy)).to_html()


def test_a_page_is_well_formed_and_asks_for_nothing() -> None:
    text = page_of("hf_bert", "O2,dtype=bf16")
    found = Page(text)
    assert {value for _, a in found.tags for name, value in a.items() if name in ("src", "href")} == {"#main"}
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not any(name.startswith("on") or name == "style" for _, attributes in found.tags for name in attributes)
    policy = next(m["content"] for m in found.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_a_page_holds_every_node_and_a_row_for_every_module(record: Record) -> None:
    found = Page(page_of("hf_bert", "O2,dtype=bf16"))
    assert [n["key"] for n in found.data["nodes"]] == [n.key for n in record.nodes]
    rows = {a["data-path"] for a in found.all("tr") if "data-path" in a}
    assert rows >= {n.module for n in record.nodes} | {""}
    levels = [int(a["aria-level"] or 0) for a in found.all("tr") if "data-path" in a]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_what_a_node_reads_leads_back_to_the_graph(record: Record) -> None:
    keys = [n.key for n in record.nodes]
    for at, made in enumerate(record.nodes):
        assert all(keys.index(r.value) < at for r in made.reads if r.kind == "node")
    by_key = {n.key: n for n in record.nodes}
    query = next(n for n in record.nodes if n.module.endswith("attention.self.query"))
    assert {r.value.rpartition(".")[2] for r in query.reads if r.kind == "attribute"} == {"weight", "bias"}
    assert all(r.cast == "bfloat16" for r in query.reads if r.kind == "attribute")
    assert [r.value in by_key for r in query.reads if r.kind == "node"] == [True]
    assert any(r.kind == "input" for n in record.nodes for r in n.reads)


def test_every_node_is_drawn_once_in_its_own_module_or_the_one_round_it(record: Record) -> None:
    drawn = views(record.nodes)
    modules = {v.module for v in drawn}
    assert modules >= {n.module.rpartition(".")[0] for n in record.nodes}
    for module in {n.module for n in record.nodes} & modules:
        own = [v for v in drawn if v.module == module]
        boxes = [b.node for v in own for b in v.boxes if b.style != "outside" and b.node >= 0]
        direct = [i for i, n in enumerate(record.nodes) if n.module == module]
        assert set(direct) <= set(boxes)
        assert len(boxes) == len(set(boxes))


def test_a_cast_of_the_record_is_a_mark_of_a_drawing(record: Record) -> None:
    drawn = views(record.nodes)
    for module in {n.module for n in record.nodes if any(r.cast for r in n.reads)}:
        own = [v for v in drawn if v.module == module] or [v for v in drawn if v.module == module.rpartition(".")[0]]
        assert any(b.casts for v in own for b in v.boxes) or any(e.cast for v in own for e in v.edges)


def test_no_drawing_is_too_large_to_read() -> None:
    many = [node(i) for i in range(3 * MOST + 7)]
    drawn = views(many)
    assert [v.title for v in drawn] == [f"part {i} of 4" for i in (1, 2, 3, 4)]
    assert all(sum(b.style != "outside" for b in v.boxes) <= MOST for v in drawn)
    assert sorted(b.node for v in drawn for b in v.boxes if b.style != "outside") == list(range(len(many)))
    layers = [node(i, module=f"layers.{i // 50}.block{i // 25 % 2}") for i in range(600)]
    whole, *_ = views(layers)
    assert {b.module for b in whole.boxes} == {f"layers.{i}.block{j}" for i in range(12) for j in (0, 1)}


def test_a_module_that_runs_twice_is_drawn_twice() -> None:
    many = [node(i, module="act" if i in (3, 4, 9, 10) else f"layer{i}.x{i % 2}") for i in range(12)]
    (whole,) = [v for v in views([*many, *(node(i, module=f"more.{i}") for i in range(12, 90))]) if not v.module]
    twice = [b for b in whole.boxes if b.module == "act"]
    assert [b.label for b in twice] == ["act (2)", "act (2)"]
    assert all(whole.boxes[e.start].y < whole.boxes[e.end].y for e in whole.edges)


def test_a_graph_of_another_state_reads_what_the_first_one_has() -> None:
    first = [node(i) for i in range(4)]
    second = [msgspec.structs.replace(node(i), graph=1) for i in (1, 3)]
    training, evaluation = views([*first, *second], ("0: training", "1: evaluation"))
    assert (training.title, evaluation.title) == ("training", "evaluation")
    outside = {b.node for b in evaluation.boxes if b.style == "outside"}
    assert outside == {0, 2}
    assert [b.node for b in evaluation.boxes if b.style != "outside"] == [4, 5]


def overlaps(view: View) -> list[tuple[int, int]]:
    boxes = list(enumerate(view.boxes))
    return [
        (i, j) for i, a in boxes for j, b in boxes[i + 1 :]
        if a.y == b.y and abs(a.x - b.x) < (a.width + b.width) / 2 + GAP - 2
    ]  # fmt: skip


def test_boxes_of_a_drawing_do_not_overlap_and_edges_lead_down(record: Record) -> None:
    for view in views(record.nodes):
        assert overlaps(view) == []
        assert all(b.width / 2 - 1 <= b.x <= view.width - b.width / 2 + 1 for b in view.boxes)
        for edge in view.edges:
            assert edge.points[0] == (view.boxes[edge.start].x, view.boxes[edge.start].y)
            assert edge.points[-1] == (view.boxes[edge.end].x, view.boxes[edge.end].y)
            ys = [y for _, y in edge.points]
            assert ys in (sorted(ys), sorted(ys, reverse=True))


def test_a_layout_is_layered_and_the_same_every_time() -> None:
    graph = nx.gnp_random_graph(60, 0.06, seed=3)
    edges = sorted((min(e), max(e)) for e in graph.edges)
    first, second = (layered(dict.fromkeys(range(60), 40.0), edges) for _ in range(2))
    assert first == second
    assert all(first.places[a][1] < first.places[b][1] for a, b in edges)


def test_a_straight_line_is_drawn_straight() -> None:
    made = layered({i: 50.0 + i for i in range(9)}, [(i, i + 1) for i in range(8)])
    assert len({x for x, _ in made.places.values()}) == 1


def test_an_edge_back_is_drawn_upwards() -> None:
    made = layered({"a": 30.0, "b": 30.0}, [("a", "b"), ("b", "a")])
    assert made.routes["b", "a"] == made.routes["a", "b"][::-1]


def test_very_many_nodes_are_left_out_with_a_word(record: Record) -> None:
    many = tuple(node(i, module=f"layers.{i // 10}.part{i % 3}") for i in range(50_000))
    text = page(msgspec.structs.replace(record, nodes=many), "Net")
    found = Page(text)
    assert found.data["nodes"] == []
    assert f"50000 nodes are more than the {MOST_NODES} that a page can hold" in text
    assert 0 < len([a for a in found.all("tr") if "data-path" in a]) <= MOST_ROWS
    assert len(text) < 1_500_000


@pytest.mark.matrix
def test_twelve_layers_make_a_page_of_less_than_a_megabyte_and_a_half_in_less_than_three_seconds() -> None:
    config = BertConfig(
        vocab_size=1000, hidden_size=96, num_hidden_layers=12, num_attention_heads=4, intermediate_size=384,
        attn_implementation="eager",
    )  # fmt: skip
    inputs = {"input_ids": torch.randint(0, 1000, (2, 16)), "attention_mask": torch.ones(2, 16, dtype=torch.long)}
    module = fxamp.convert(BertForMaskedLM(config), (), inputs, policy="O2,dtype=bf16")
    begin = time.process_time()
    text = fxamp.report(module).to_html()
    assert time.process_time() - begin < 3
    assert len(text.encode()) < 1_500_000


def test_a_page_of_a_part_says_what_it_is_of(record: Record) -> None:
    text = fxamp.report(converted("hf_bert", "O2,dtype=bf16")).to_html(ops=["layer_norm"])
    found = Page(text)
    assert {n["op"] for n in found.data["nodes"]} == {"layer_norm"}
    assert f"{len(found.data['nodes'])} of {len(record.nodes)} nodes were chosen for this page" in text


def test_a_plan_alone_gives_a_page_without_sizes() -> None:
    found = Page(fxamp.report(converted("lenet5", "O1,dtype=bf16").plan).to_html())
    assert found.data["views"] == []
    assert found.data["nodes"]


def test_a_page_is_the_same_every_time() -> None:
    module = converted("lenet5", "O1,dtype=bf16")
    assert fxamp.report(module).to_html() == fxamp.report(module).to_html()
