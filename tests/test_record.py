"""The record of a conversion: what it says is what a step does, and what is read back is what was written."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch

import fxamp
from fxamp.measure import saved_bytes
from fxamp.report.build import record_of
from fxamp.report.record import SCHEMA, Record, schema
from fxamp.report.sizes import sizes_of
from passes.errors import PlanError
from passes.insert_casts import is_inserted
from tests.harness import converted, subject, unchanged

MODELS = ("lenet5", "hf_bert", "vit", "hf_gpt2", "resnet18")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["O0", "O1,dtype=bf16", "O2,dtype=bf16"])
def test_what_is_kept_for_backward_is_what_a_step_keeps(name: str, policy: str) -> None:
    found, module = subject(name), converted(name, policy)
    module.train()
    predicted = sum(size.saved_bytes for size in sizes_of(module).values())
    with unchanged(found.model):
        counted = saved_bytes(lambda: module(*found.args, **found.kwargs))
    assert predicted == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_what_fp32_and_autocast_would_keep_is_what_they_keep(name: str) -> None:
    found, module = subject(name), converted(name, "O2,dtype=bf16").train()
    totals = record_of(module).totals
    found.model.train()
    with unchanged(found.model):
        plain = saved_bytes(lambda: found.model(*found.args, **found.kwargs))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ambient = saved_bytes(lambda: found.model(*found.args, **found.kwargs))
    assert totals.saved_bytes_fp32 == pytest.approx(plain, rel=0.01)
    assert totals.saved_bytes_autocast == pytest.approx(ambient, rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_node_gives_without_mixed_precision_is_known(name: str) -> None:
    record = record_of(converted(name, "O2,dtype=bf16"))
    assert {n.original for n in record.nodes} <= {"float32", ""}
    assert sum(n.original == "float32" for n in record.nodes) > 0.9 * len(record.nodes)
    assert {n.original for n in record_of(converted(name, "O2,dtype=bf16").plan).nodes} == {""}


@pytest.mark.parametrize("name", MODELS)
def test_every_decision_is_found_in_the_graph(name: str) -> None:
    module = converted(name, "O2,dtype=bf16")
    record = record_of(module)
    assert [n.key for n in record.nodes] == [d.key for d in module.plan.decisions]
    assert all(n.bytes is not None and n.dtypes for n in record.nodes if n.op != "getitem")
    assert all(n.file and n.line for n in record.nodes)
    inserted = [n for n in module.graph.nodes if is_inserted(n)]
    assert sum(len(n.casts) for n in record.nodes) <= len(inserted)
    assert 0 < (record.totals.low_bytes or 0) <= 100


def test_a_record_is_read_back_and_refused_where_it_is_wrong() -> None:
    record = record_of(converted("lenet5", "O1,dtype=bf16"))
    text = record.to_json()
    assert Record.from_json(text) == record
    data = json.loads(text)
    data["nodes"][0]["bytes"] = "many"
    with pytest.raises(PlanError, match=r"\$\.nodes\[0\]\.bytes"):
        Record.from_json(json.dumps(data))
    with pytest.raises(PlanError, match="unknown field"):
        Record.from_json(json.dumps({**json.loads(text), "more": 1}))


def test_the_published_schema_is_that_of_the_record() -> None:
    assert json.loads(SCHEMA.read_text()) == schema()
    assert schema()["$schema"].endswith("2020-12/schema")


def test_a_plan_alone_gives_a_record_without_sizes() -> None:
    plan = converted("lenet5", "O1,dtype=bf16").plan
    record = record_of(plan)
    assert (record.totals.casts, record.totals.bytes, record.nodes[0].bytes) == (plan.casts, None, None)
    assert msgspec.to_builtins(record)["nodes"]


def test_a_line_is_the_authors_and_the_one_inside_torch_stands_beside_it() -> None:
    module = fxamp.convert(torch.nn.Sequential(torch.nn.Linear(4, 4)), (torch.randn(2, 4),))
    node = record_of(module).nodes[0]
    assert node.torch_source == "" or node.torch_source.startswith("linear.py:")


def test_a_report_leaves_the_model_as_it_was() -> None:
    module = converted("resnet18", "O1,dtype=bf16").train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(3)
    random = torch.get_rng_state()
    assert record_of(module).totals.saved_bytes
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
