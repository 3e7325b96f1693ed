"""The page of a report: one file that needs nothing else, in which nothing that a model is called does anything."""

from __future__ import annotations

import functools
import html.parser
import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import fxamp
from fxamp.report.page.page import MOST_NODES, SCRIPTS, excerpts, page
from fxamp.report.record.record import Record
from tests.support.records import node
from tests.support.subjects import converted

EMPTY_TAGS = {"meta", "input", "br", "link", "rect", "path"}
TEMPLATES = Path(fxamp.__file__).parent / "report" / "page" / "templates"


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

    def column(self, name: str) -> list[str]:
        """Return what the nodes have in a column of texts."""
        return [self.data["strings"][number] for number in self.data["columns"][name]]

    def keys(self) -> list[str]:
        """Return the keys of the nodes, of which a column has only what follows the module."""
        both = zip(self.column("module"), self.column("key"), strict=True)
        return [module + key if module and key.startswith("/") else key for module, key in both]


@pytest.fixture(scope="module")
def record() -> Record:
    return fxamp.report(converted("hf_bert", "O2,dtype=bf16")).record


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


def test_its_script_is_ours_and_short() -> None:
    lines = [line.strip() for name in SCRIPTS for line in TEMPLATES.joinpath(name).read_text().splitlines()]
    assert sum(bool(line) and not line.startswith("//") for line in lines) <= 1_200
    assert max(map(len, lines)) <= 120


def test_a_page_holds_every_node_with_what_it_reads_and_why(record: Record) -> None:
    found = Page(page_of("hf_bert", "O2,dtype=bf16"))
    keys = found.keys()
    assert keys == [n.key for n in record.nodes]
    assert found.column("reason") == [n.reason for n in record.nodes]
    reads, causes = found.data["columns"]["reads"], found.data["columns"]["causes"]
    for made, given, because in zip(record.nodes, reads, causes, strict=True):
        assert [keys[at] for kind, at, _ in given if not kind] == [r.value for r in made.reads if r.kind == "node"]
        assert [keys[at] for at in because] == list(made.causes)
    (state,) = found.data["states"]
    assert state["totals"] == msgspec.to_builtins(record.totals)


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


def test_very_many_nodes_are_left_out_with_a_word(record: Record) -> None:
    many = tuple(node(i, module=f"layers.{i // 10}.part{i % 3}") for i in range(100_000))
    text = page(msgspec.structs.replace(record, nodes=many), "Net")
    assert Page(text).keys() == []
    assert f"100000 nodes are more than the {MOST_NODES} that a page can hold" in text
    assert len(text) < 200_000


@pytest.mark.matrix
def test_sixty_layers_make_a_page_of_less_than_a_megabyte_and_a_half_in_less_than_three_seconds() -> None:
    config = BertConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=60, num_attention_heads=2, intermediate_size=32,
        attn_implementation="eager",
    )  # fmt: skip
    inputs = {"input_ids": torch.randint(0, 100, (2, 16)), "attention_mask": torch.ones(2, 16, dtype=torch.long)}
    report = fxamp.report(fxamp.convert(BertForMaskedLM(config), (), inputs, policy="O2,dtype=bf16"))
    begin = time.process_time()
    text = report.to_html()
    assert time.process_time() - begin < 3
    assert len(report.record.nodes) > 1_700
    assert len(text.encode()) < 1_500_000


def test_a_page_of_a_part_says_what_it_is_of(record: Record) -> None:
    text = fxamp.report(converted("hf_bert", "O2,dtype=bf16")).to_html(ops=["layer_norm"])
    found = Page(text)
    assert set(found.column("op")) == {"layer_norm"}
    assert f"{len(found.keys())} of {len(record.nodes)} nodes were chosen for this page" in text


def test_a_plan_alone_gives_a_page_without_sizes() -> None:
    found = Page(fxamp.report(fxamp.plan_of(converted("lenet5", "O1,dtype=bf16"))).to_html())
    assert found.keys()
    assert not any(found.data["columns"]["reads"])
    assert found.data["states"][0]["totals"]["bytes"] is None


def test_a_page_is_the_same_every_time() -> None:
    module = converted("lenet5", "O1,dtype=bf16")
    assert fxamp.report(module).to_html() == fxamp.report(module).to_html()


def test_the_lines_of_a_file_are_shown_with_what_is_round_them() -> None:
    here = Path(__file__)
    at = 1 + next(i for i, line in enumerate(here.read_text().splitlines()) if "def test_the_lines_of_a_file" in line)
    code = here.read_text().splitlines()[at - 1]
    (lines,) = excerpts([node(0, file=here.name, line=at, code=code)]).values()
    assert [number for number, _ in lines] == list(range(at - 3, at + 4))
    assert dict(lines)[at] == code


@pytest.mark.parametrize("file", ["test_page.py", "/dev/zero", "nowhere.py", "a\0b.py", "/etc/hostname", "../x.py"])
def test_of_a_file_that_has_changed_or_is_not_here_only_the_known_line_is_shown(file: str) -> None:
    assert excerpts([node(0, file=file, line=3, code="x = gone()")]) == {file: [(3, "x = gone()")]}
