"""What a saved plan holds, and what reading a damaged one says."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from passes.contract.errors import FxampError, PlanError
from passes.contract.plan import Decision, Plan
from passes.contract.plan_format import FORMAT_VERSION, write_text
from passes.contract.policy import Policy


def decision(key: str, reason: str = "autocast_low", graph: int = 0) -> Decision:
    path, _, rest = key.rpartition("/")
    op = rest.partition("#")[0]
    return Decision(key, graph, op, path, "net.py:12 x = é(x)", "bfloat16", "float32", "low", reason, (f"{op}#9",))


@pytest.fixture
def plan() -> Plan:
    return Plan(
        decisions=(decision("fc/linear#0"), decision("relu#0", "literal: out of range"), decision("add#0", "keep")),
        policy=Policy("O2", dtype="bf16", device="cpu", modules={"fc": "low"}),
        verified="fake",
        notes=("gru kept whole",),
        inserted_casts=3,
        casts=2,
    )


def test_a_plan_is_the_same_by_text_and_by_file(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == Plan.from_json(plan.to_json()) == plan
    assert os.listdir(tmp_path) == ["plan.json"]
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
    assert plan.to_json().endswith("}\n")
    data = json.loads(plan.to_json())
    assert data["policy"] == "O2,dtype=bf16,device=cpu,modules.fc=low"
    assert (data["version"], data["decisions"][0]["colour"]) == (FORMAT_VERSION, "bfloat16")


def test_decisions_are_found_by_all_that_is_asked_for(plan: Plan) -> None:
    def keys(**asked: str) -> list[str]:
        return [d.key for d in plan.find(**asked)]

    assert keys() == keys(colour="low") == keys(colour="bfloat16") == ["fc/linear#0", "relu#0", "add#0"]
    assert keys(module="fc") == keys(op="linear") == keys(module="fc", op="linear", reason="autocast_low")
    assert keys(module="fc") == ["fc/linear#0"]
    assert keys(reason="literal") == ["relu#0"]
    assert keys(module="f") == keys(colour="fp32") == keys(module="fc", op="relu") == []
    assert [d.code for d in plan.deviations] == ["literal", "keep"]


def test_one_other_decision_makes_another_plan(plan: Plan) -> None:
    other = dataclasses.replace(plan.decisions[0], colour="float32")
    assert dataclasses.replace(plan, decisions=(other, *plan.decisions[1:])) != plan


def test_one_key_is_once_in_a_graph() -> None:
    plan = Plan((decision("relu#0"), decision("relu#0", graph=1)), Policy())
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match="two decisions have the key 'relu#0' in graph 0"):
        Plan((decision("relu#0"), decision("relu#0")), Policy())


def test_a_plan_of_before_there_were_ranges_has_none() -> None:
    plan = Plan((dataclasses.replace(decision("where#0"), ranges=("mask: -1e+09",)),), Policy())
    assert Plan.from_json(plan.to_json()) == plan
    assert "mask: -1e+09" in str(plan.decisions[0])
    data = json.loads(plan.to_json()) | {"version": 6}
    del data["decisions"][0]["ranges"]
    assert Plan.from_json(json.dumps(data)).decisions[0].ranges == ()


def test_cut_short_file_names_the_line(plan: Plan, tmp_path: Path) -> None:
    lines = plan.to_json().splitlines()
    (tmp_path / "plan.json").write_text("\n".join(lines[:10]), encoding="utf-8")
    with pytest.raises(PlanError, match=r"plan.json:10: not JSON, or cut short .*--save-plan"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("content", [b"", b"hello", b"\xff\xfe", b"[" * 3])
def test_other_content_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError, match=r"plan.json:1: not .*--save-plan"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_of_a_newer_format_is_refused(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(json.loads(plan.to_json()) | {"version": FORMAT_VERSION + 1}))
    with pytest.raises(PlanError, match=f"plan format {FORMAT_VERSION + 1} is newer than .*; upgrade fxamp"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_says_by_which_fxamp_it_was_made(plan: Plan) -> None:
    assert plan.fxamp_version == importlib.metadata.version("fxamp")
    other = dataclasses.replace(plan, fxamp_version="0.0.1")
    assert other == plan
    assert Plan.from_json(other.to_json()).fxamp_version == "0.0.1"
    data = json.loads(plan.to_json()) | {"version": 3}
    del data["fxamp_version"]
    assert Plan.from_json(json.dumps(data)).fxamp_version == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decisions": {}}, "'decisions' is {}, expected list"),
        ({"decisions": ["relu"]}, r"decisions\[0\]: expected an object, found str"),
        ({"decisions": [{"key": "relu#0"}]}, r"decisions\[0\]: 'autocast_dtype' is missing"),
        ({"policy": "O9"}, "unknown level 'O9'"),
        ({"policy": None}, "'policy' is None, expected str"),
        ({"casts": "2"}, "'casts' is '2', expected int"),
        ({"casts": True}, "'casts' is True, expected int"),
        ({"notes": [1]}, "'notes' holds something other than text"),
        ({"colour": "low"}, "'colour' is not a field of this format"),
        ({"version": 0}, "no plan format 0"),
        ({"version": "1"}, "not a plan"),
        ({"version": True}, "not a plan"),
    ],
)
def test_wrong_shape_names_the_field(plan: Plan, change: dict[str, object], message: str) -> None:
    data = json.loads(plan.to_json()) | change
    with pytest.raises(PlanError, match=f"^p.json: .*{message}"):
        Plan.from_json(json.dumps(data), name="p.json")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"casts": 2', '"casts": 2, "casts": 0', "'casts' is given twice in one object"),
        ('"casts": 2', '"casts": -2', "'casts' is negative, -2"),
        ('"causes": ["relu#9"]', '"causes": "relu#0"', r"decisions\[1\]: 'causes' is 'relu#0', expected list"),
    ],
)
def test_wrong_text_is_named(plan: Plan, old: str, new: str, message: str) -> None:
    text = json.dumps(json.loads(plan.to_json()))
    assert old in text
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text.replace(old, new))


def test_json_that_is_no_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="JSON, but not a plan"):
        Plan.from_json("[1, 2]")


def test_missing_file_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read the plan '.*absent.json': No such file"):
        Plan.load(tmp_path / "absent.json")


def test_file_that_cannot_be_written_names_the_path(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(FxampError, match=r"cannot write the plan to '.*absent.plan.json': No such file"):
        plan.save(tmp_path / "absent" / "plan.json")
    with pytest.raises(FxampError, match=r"cannot write the plan to .*: Is a directory"):
        plan.save(tmp_path)


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_write_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


DAMAGED = {
    "deep": '{"version": 1, "notes": ' + "[" * 100_000,
    "digits": '{"version": 1, "casts": ' + "1" * 5000 + "}",
    "infinity": '{"version": Infinity}',
    "no number": '{"version": 4, "totals": {"casts": NaN}}',
    "said twice": '{"version": 3, "casts": 1, "casts": 2}',
    "said twice inside": '{"version": 3, "totals": {"casts": 1, "casts": 2}}',
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_plan_of_nonsense_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json.*make a new plan"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero")
def test_a_device_that_never_ends_is_no_plan() -> None:
    with pytest.raises(PlanError, match=r"longer than 64 MB, which no model needs"):
        Plan.load("/dev/zero")


def test_a_hundred_megabytes_are_no_plan(tmp_path: Path) -> None:
    with (tmp_path / "plan.json").open("w") as file:
        file.write('{"version": 3, "notes": [' + '"x", ' * (20 << 20))
    with pytest.raises(PlanError, match=r"plan\.json: not a plan .longer than 64 MB.*make a new plan"):
        Plan.load(tmp_path / "plan.json")


def test_a_path_that_is_none_is_refused(plan: Plan) -> None:
    with pytest.raises(PlanError, match=r"cannot write the plan to 'a\\x00b': (lstat: )?embedded null"):  # by Python
        plan.save("a\0b")
    with pytest.raises(PlanError, match=r"cannot read the plan 'a\\x00b': embedded null byte"):
        Plan.load("a\0b")


def test_text_that_utf8_has_not_is_saved_and_read(plan: Plan, tmp_path: Path) -> None:
    odd = dataclasses.replace(plan, notes=("a file named \udcff",))
    odd.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == odd


def test_a_name_as_long_as_the_file_system_takes_is_written(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250 + ".json")
    plan.save(path)
    assert Plan.load(path) == plan
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_threads_that_save_one_plan_leave_a_whole_one_and_nothing_else(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    with ThreadPoolExecutor(8) as pool:
        writes = [pool.submit(plan.save, path) for _ in range(200)]
        reads = [pool.submit(Plan.load, path) for _ in range(200)]
    assert [w.exception() for w in writes] == [None] * 200
    assert all(r.result() == plan for r in reads)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_of_before_edits_were_counted_loads_without_any(plan: Plan) -> None:
    counted = dataclasses.replace(plan, edits={"eliminate-casts/share": 2, "eliminate-casts/no_op": 0})
    assert counted.never_fired == ("eliminate-casts/no_op",)
    assert Plan.from_json(counted.to_json()).edits == counted.edits
    assert Plan.from_json(counted.to_json()) == plan  # how it was made is no part of what was decided
    data = json.loads(counted.to_json()) | {"version": 4}
    del data["edits"]
    pickled = Plan.__new__(Plan)
    pickled.__setstate__({name: value for name, value in vars(counted).items() if name != "edits"})
    for made in (Plan.from_json(json.dumps(data)), pickled):
        assert made == plan
        assert (made.edits, made.never_fired) == ({}, ())
