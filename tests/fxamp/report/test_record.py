"""The record of a conversion: what it says is what a step does, and what is read back is what was written."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

import fxamp
from fxamp.capture.graphs import runner_of
from fxamp.measure.counts import saved_bytes
from fxamp.report.reader import record_of
from fxamp.report.record.record import Record
from fxamp.report.record.sizes import sizes_of
from passes.contract.errors import PlanError
from passes.contract.plan import Plan
from passes.graph.notes import is_inserted
from tests.support.helpers import matrix
from tests.support.records import SCHEMA, schema
from tests.support.subjects import compiled as convert_subject
from tests.support.subjects import converted, subject, unchanged
from tests.support.zoo import BY_NAME

ROOT = Path(fxamp.__file__).parent.parent
NAMES = ("lenet5", "hf_bert", "resnet18", "vit", "hf_gpt2")
MODELS = (*NAMES[:2], *matrix(*NAMES[2:]))
LEVELS = ("O0", "O1,dtype=bf16", "O2,dtype=bf16")
EVERY_DAY = [*zip(NAMES[:2], LEVELS[:2], strict=True)]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(*pair, marks=() if pair in EVERY_DAY else pytest.mark.matrix)
        for pair in itertools.product(NAMES, LEVELS)
    ],
)
def test_what_is_kept_for_backward_is_what_a_step_keeps(name: str, policy: str) -> None:
    found = subject(name)
    found.model.train()
    module = convert_subject(found, policy)  # one of its own: its first graph is that of training
    sizes = sizes_of(fxamp.graphs(module)[0])
    assert sizes is not None
    predicted = sum(size.saved_bytes for size in sizes.values())
    with unchanged(found.model):
        counted = saved_bytes(lambda: module(*found.args, **found.kwargs))
    assert predicted == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_what_fp32_and_autocast_would_keep_is_what_they_keep(name: str) -> None:
    found = subject(name)
    found.model.train()
    totals = record_of(convert_subject(found, "O2,dtype=bf16")).totals  # its first graph is that of training
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
    assert {n.original for n in record_of(fxamp.plan_of(converted(name, "O2,dtype=bf16"))).nodes} == {""}


@pytest.mark.parametrize("name", MODELS)
def test_every_decision_is_found_in_the_graph(name: str) -> None:
    module = converted(name, "O2,dtype=bf16")
    record = record_of(module)
    assert [n.key for n in record.nodes] == [d.key for d in fxamp.plan_of(module).decisions]
    assert all(n.bytes is not None and n.dtypes for n in record.nodes if n.op != "getitem")
    assert all(n.file and n.line for n in record.nodes)
    inserted = [n for graph in fxamp.graphs(module) for n in graph.graph.nodes if is_inserted(n)]
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"version": 1', "record:1: not JSON, or cut short"),
        ('{"version": 1, "version": 1}', "'version' is given twice"),
        ('{"version": NaN}', "NaN is not a number"),
        ("[" * 100_000, "not a record"),
        ("[]", "not a record of fxamp"),
    ],
    ids=["cut short", "twice", "no number", "deep", "list"],
)
def test_a_record_of_nonsense_is_refused(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Record.from_json(text)


def test_a_record_that_is_too_long_for_any_model_is_refused() -> None:
    with pytest.raises(PlanError, match="longer than 64 MB"):
        Record.from_json('{"version": "' + "x" * (65 << 20) + '"}')


def test_a_record_of_another_format_says_which() -> None:
    text = record_of(converted("lenet5", "O1,dtype=bf16")).to_json()
    with pytest.raises(PlanError, match="record format 9; this fxamp reads 3"):
        Record.from_json(text.replace('"version": 3', '"version": 9', 1))


def test_the_published_schema_is_that_of_the_record() -> None:
    assert json.loads(SCHEMA.read_text()) == schema()
    assert schema()["$schema"].endswith("2020-12/schema")


def test_a_plan_alone_gives_a_record_without_sizes() -> None:
    plan = fxamp.plan_of(converted("lenet5", "O1,dtype=bf16"))
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


def test_a_model_compiled_for_several_sizes_has_the_record_that_it_had_after_one() -> None:
    zoo = BY_NAME["gpt"]
    module = fxamp.compile(zoo.build(), policy="O1,dtype=bf16", backend="eager", dynamic=False)
    records = []
    for batch in (3, 5, 7):
        args, kwargs = zoo.inputs(batch)
        module(*args, **kwargs)
        records.append(record_of(fxamp.plan_of(module)).to_json())
    assert len(runner_of(module).graphs) > 1
    assert records[1:] == records[:1] * 2


def records(turn: int) -> list[str]:
    """Return records of two models, which are converted, and whose children are registered, in this order or back."""
    made = {}
    for name in ("graph_conv", "lenet5")[::turn]:
        model, (args, kwargs) = BY_NAME[name].build(), BY_NAME[name].inputs(3)
        children = list(model.named_children())
        for child, _ in children:
            delattr(model, child)
        for child, module in children[::turn]:
            setattr(model, child, module)
        made[name] = fxamp.convert(model, args, kwargs, policy="O2,dtype=bf16", check=False)
    return [record_of(made[name]).to_json() for name in sorted(made)]


SEPARATOR = "----"
OTHER = f"""
import fxamp.report.reader, torch, sqlite3, decimal
from tests.fxamp.report.test_record import record_of, records
module = fxamp.compile(torch.nn.Sequential(torch.nn.Linear(4, 4)), policy="O1,dtype=bf16", backend="eager")
module(torch.randn(3, 4))
traced = record_of(fxamp.plan_of(module)).to_json()
print("".join(records(-1)), traced, sep="{SEPARATOR}", end="")
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """Return what a process with another hash seed says, of models converted and of one compiled, and its trace."""
    folder = tmp_path_factory.mktemp("trace")
    environment = {**os.environ, "PYTHONHASHSEED": "1", "TORCH_TRACE": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", OTHER]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    converted, _, traced = done.stdout.partition(SEPARATOR)
    return converted, traced, folder


def test_records_are_the_same_in_other_processes_orders_and_hash_seeds(other: tuple[str, str, Path]) -> None:
    here = "".join(records(1))
    assert other[0] == here
    assert here.count('"policy": "O2,dtype=bf16,device=cpu"') == 2


def test_a_compilation_that_is_traced_has_the_plan_as_an_artefact(other: tuple[str, str, Path]) -> None:
    _, traced, folder = other
    (trace,) = folder.iterdir()
    _, _, rest = trace.read_text(encoding="utf-8").partition('{"artifact": {"name": "fxamp_precision"')
    _, *lines = rest.splitlines()
    payload = itertools.takewhile(lambda line: line.startswith("\t"), lines)
    found = record_of(Plan.from_json("\n".join(line[1:] for line in payload)))
    assert found == Record.from_json(traced)
    assert [n.op for n in found.nodes] == ["linear"]
