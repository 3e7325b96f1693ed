"""The harness of trial finds what it is made to find, and a small sample of it finds nothing.

All of it: `python -m pytest -m trial`, which takes hours; `reports/programs.py`, `reports/op_coverage.py` and
`reports/libraries.py` do the same with a record, so that a run can be ended and gone on with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.errors import NotFaithfulError
from passes._torch import pytree
from passes.contract.reasons import DEVIATIONS
from reports import libraries, op_coverage, programs
from tests.support.front_ends import WARNINGS
from tests.support.helpers import Layers
from tests.support.trial import judge, samples
from tests.support.trial.alone import Alone
from tests.support.trial.generate import generate, runs
from tests.support.trial.judge import LEVELS, Subject, judged
from tests.support.trial.own import unsaturated, with_dtypes
from tests.support.trial.program import Line, Program
from tests.support.trial.runs import Noise, Run, run
from tests.support.trial.shrink import shrink
from tests.support.trial.workers import Record, run_all

pytestmark = WARNINGS
SAMPLE = (101, 102)


def test_a_seed_gives_the_same_program_in_every_process() -> None:
    made = [generate(seed) for seed in SAMPLE]
    assert made == [generate(seed) for seed in SAMPLE]
    assert len({program.text() for program in made if program is not None}) > 1


@pytest.mark.parametrize("seed", [pytest.param(SAMPLE[0], marks=pytest.mark.matrix), *SAMPLE[1:]])
def test_a_random_program_has_no_failure(seed: int) -> None:
    assert not programs.failed(programs.work(str(seed)))


def test_a_random_program_whose_numbers_are_attributes_has_no_failure() -> None:
    found = programs.with_numbers("103")
    assert found["found"] is not None
    assert not programs.failed(found)


def test_a_plan_that_depends_on_the_numbers_seen_before_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program((Line("v0", "self.l(x) * 0.5"),), "v0.softmax(-1)", attributes=True)
    assert program.numbers == {"number0": 0.5}
    model, args = program.build()
    subject = Subject(model, args, numbers=program.numbers)
    assert judged(subject, judge.NUMBERS, ("O1",))["O1"].kind == "ok"
    of = fxamp.plan_of
    plans = iter((of, lambda view: replace(of(view), casts=99)))
    monkeypatch.setattr(fxamp, "plan_of", lambda view: next(plans)(view))
    assert judged(subject, judge.NUMBERS, ("O1",))["O1"].why.startswith("another plan")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x).softmax(-1)


def net(forward: Callable[..., Any], **parts: Any) -> Layers:
    return Layers(forward, l=nn.Linear(6, 6), **parts)


@pytest.mark.default_case(front_end="graph")
@pytest.mark.parametrize("front_end", judge.FRONT_ENDS)
def test_an_ordinary_model_is_ok_at_every_level(front_end: str) -> None:
    torch.manual_seed(0)
    found = judged(Subject(Net(), (torch.randn(4, 6),)), front_end)
    assert {level: verdict.kind for level, verdict in found.items()} == dict.fromkeys(LEVELS, "ok")


@pytest.mark.default_case(front_end="graph")
@pytest.mark.parametrize("front_end", judge.FRONT_ENDS[:2])
def test_a_changed_value_is_a_mismatch_at_every_level(front_end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = Subject.run

    def twice_as_much(self: Subject, module: Any, *args: Any, **kwargs: Any) -> Run:
        found = of(self, module, *args, **kwargs)
        return found if module is self.model else replace(found, outputs=[t * 2 for t in found.outputs])

    torch.manual_seed(0)
    monkeypatch.setattr(Subject, "run", twice_as_much)
    monkeypatch.setattr(judge, "torch_alone", lambda *args: [])
    found = judged(Subject(Net(), (torch.randn(4, 6),)), front_end)
    assert {verdict.kind for verdict in found.values()} == {"mismatch"}


def test_what_fxamp_captures_wrongly_is_a_mismatch_and_no_refusal() -> None:
    error = NotFaithfulError("what was captured of Net does not compute what Net computes")
    assert judge.as_verdict(error).kind == "mismatch"
    assert judge.as_verdict(fxamp.CaptureError("this Net is a view of fxamp")).kind == "refused"


def tiny(self: Any, x: Tensor) -> Any:
    """Return a remainder of numbers that BF16 has no room for, and what has a small difference as its gradient."""
    return (x * 1e-7).prod(-1).remainder(1.5), torch.kron(self.gain, self.table)


@pytest.mark.default_case(low="fp16")
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_what_every_op_may_round_counts_in_backward_too_and_with_tiny_numbers(low: str) -> None:
    torch.manual_seed(0)
    model = Layers(tiny, gain=nn.Parameter(torch.ones(6)), table=torch.linspace(-1, 1, 6))
    found = judged(Subject(model, (torch.randn(4, 6),), low=low), "graph", ("O3",))
    assert found["O3"].kind == "ok"


def test_what_low_holds_exactly_is_not_changed_by_rounding() -> None:
    labels, x = torch.tensor([1.0, -1.0, 0.0]), torch.full((3,), 1 / 3)
    for t in (labels, x):
        Noise(torch.bfloat16, 2).round(t)
    assert labels.tolist() == [1.0, -1.0, 0.0]
    assert 0 < (x - 1 / 3).abs().max() < 2**-8


def loss(self: Any, x: Tensor, y: Tensor) -> Any:
    """Return a loss of low inputs: low as PyTorch has it, and FP32 under autocast."""
    return torch.nn.functional.nll_loss(x.log_softmax(-1), y)


@pytest.mark.default_case(front_end="view")
@pytest.mark.parametrize("front_end", judge.FRONT_ENDS)
def test_what_the_model_gives_low_and_autocast_in_fp32_is_autocasts_rounded(front_end: str) -> None:
    torch.manual_seed(0)
    subject = Subject(Layers(loss), (torch.randn(4, 6).half(), torch.arange(4)))
    assert [run.outputs[0].dtype for run in (subject.plain, subject.autocast) if run] == [torch.half, torch.float]
    assert judged(subject, front_end, ("O1",))["O1"].kind == "ok"


@pytest.mark.parametrize("cast", [lambda x: x.to(torch.bfloat16), lambda x: x.type("torch.BFloat16Tensor")])
def test_a_view_gives_what_the_model_makes_low_by_a_named_dtype_low_and_no_allowance_is_needed(
    cast: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    # Beside a low input and a result that autocast makes low, a cast may name its dtype, or read it off either.
    subject = Subject(net(lambda self, x, low: (cast(self.l(x) + x), low.abs())), (x, x.bfloat16()))
    assert judged(subject, "view", ("O1",))["O1"].kind == "ok"
    monkeypatch.setattr(judge, "names_low", lambda *_: False)
    assert judged(subject, "view", ("O1",))["O1"].kind == "ok"


def test_what_an_fp32_model_names_low_comes_out_fp32_where_dynamo_cannot_trace_it_either() -> None:
    """Dynamo reads `range(2)[::-1]` as (1, -1, -1), so all of it runs under autocast."""
    model = net(lambda self, x: self.l(x).permute(*range(x.dim())[::-1]).to(torch.bfloat16) + 1)
    subject = Subject(model, (torch.randn(4, 6),))
    assert {v.kind for v in judged(subject, "view", ("O1", "O2")).values()} == {"ok"}


def upcast(self: Any, x: Tensor, low: Tensor) -> Any:
    """Cast what is given in 16 bits up, and what is made of that to the dtype which that has: FP32."""
    h, k = self.l(x), self.l(low.float())
    return low.to(h.dtype), k.to(k.dtype)


def test_a_view_gives_what_is_made_of_a_low_input_in_the_models_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    subject = Subject(net(upcast), (x, x.bfloat16()))
    assert {v.kind for v in judged(subject, "view").values()} == {"ok"}
    monkeypatch.setattr(judge, "names_low", lambda *_: False)
    assert {v.kind for v in judged(subject, "view").values()} == {"ok"}


def test_of_a_graph_what_the_model_makes_fp32_of_a_low_input_comes_out_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Subject.run

    def as_given(self: Subject, module: Any, *args: Any, **kwargs: Any) -> Run:
        found = of(self, module, *args, **kwargs)
        return found if module is self.model else replace(found, outputs=[self.args[1], found.outputs[1]])

    torch.manual_seed(0)
    subject = Subject(net(upcast), (torch.randn(4, 6), torch.randn(4, 6).bfloat16()))
    assert judged(subject, "graph", ("O1",))["O1"].kind == "ok"
    monkeypatch.setattr(Subject, "run", as_given)
    found = judged(subject, "graph")
    assert {verdict.why for verdict in found.values()} == {"output 0 is torch.bfloat16, not torch.float32"}


@pytest.mark.parametrize(("code", "kind"), [("user_cast", "deviation"), ("low", "mismatch")])
def test_a_deviation_is_named_at_the_first_node_that_differs(
    code: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Subject(Net(), (torch.randn(4, 6),))
    monkeypatch.setattr(judge, "_compiled", lambda *args: (judge.Verdict("deviation", "output 0 differs"), None, None))
    monkeypatch.setattr(judge, "torch_alone", lambda *args: [])
    monkeypatch.setattr(judge, "recorded", lambda *args: [])
    monkeypatch.setattr(judge, "first_difference", lambda pairs: (code, "l/linear#0"))
    assert judged(found, "view", ("O1",))["O1"].kind == kind


def upcast_twice(self: Any, x: Tensor) -> Any:
    """Multiply in FP32 by casts of its own, in two graphs."""
    h = self.l(x)
    torch._dynamo.graph_break()
    return (h.float() @ h.float().t()).relu()


def composite(self: Any, x: Tensor) -> Any:
    """Call what torch.export keeps whole, and the compiler too."""
    return self.l(x) @ torch.linalg.pinv(x[:, :4]).t()


def returned(self: Any, x: Tensor) -> Any:
    """Cast to a dtype that it reads, which an export has as FP32; what it returns is made of that."""
    return self.l(x).to(x.dtype) * self.factor


def branching(self: Any, x: Tensor) -> Any:
    return self.l(x) if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("forward", "front_end", "kind", "why"),
    [
        (upcast_twice, "view", "deviation", "user_cast at /matmul#0"),  # behind a graph break
        (upcast_twice, "ambient", "deviation", "user_cast at /matmul#0"),
        (composite, "graph", "deviation", "composite at /linalg_pinv#0"),  # the key of the plan
        (returned, "graph", "deviation", "user_cast at /to#0"),
        (branching, "graph", judge.TORCH, "torch.export: "),
    ],
)
def test_the_first_node_that_differs_is_named(forward: Any, front_end: str, kind: str, why: str) -> None:
    torch.manual_seed(0)
    subject = Subject(net(forward, factor=nn.Parameter(torch.tensor(0.7))), (torch.randn(6, 6),))
    verdict = judged(subject, front_end, ("O0", "O1"))["O1"]
    assert verdict.kind == kind
    assert verdict.why.startswith(why)


@pytest.mark.parametrize("kind", [judge.ERROR, judge.REFUSED, judge.MISMATCH, judge.VERIFICATION])
def test_a_failure_is_torchs_only_where_it_fails_alike(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(Net(), (torch.randn(4, 6),))
    got = subject.plain if kind == judge.MISMATCH else None
    monkeypatch.setattr(judge, "_compiled", lambda *args: (judge.Verdict(kind), got, None))
    assert judged(subject, "view", ("O0",))["O0"].kind == kind
    if kind in (judge.ERROR, judge.REFUSED):
        monkeypatch.delattr(torch, "compile")  # so it raises too
        assert judged(subject, "view", ("O0",))["O0"].kind == judge.TORCH


@pytest.mark.default_case(front_end="view", level="O1")
@pytest.mark.default_case(front_end="ambient", level="O3")
@pytest.mark.parametrize("front_end", ["view", "ambient"])
@pytest.mark.parametrize("level", LEVELS)
def test_what_torch_compile_changes_is_compared_with_what_it_gives(
    level: str, front_end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times(run: Run, factor: float) -> Run:
        return replace(run, outputs=[t * factor for t in run.outputs])

    torch.manual_seed(0)
    subject = Subject(Net(), (torch.randn(4, 6),))
    assert subject.autocast is not None
    alone = Alone(times(subject.plain, 2), times(subject.autocast, 2), "")
    monkeypatch.setattr(judge, "torch_alone", lambda *args: [alone])
    for factor, kind in [(2, judge.TORCH), (3, judge.MISMATCH)]:
        got = times(subject.plain if level == "O0" else subject.autocast, factor)
        got = with_dtypes(got, subject.plain) if front_end == "view" else got
        monkeypatch.setattr(judge, "_compiled", lambda *args, got=got: (judge.Verdict(judge.MISMATCH), got, None))
        assert judged(subject, front_end, (level,))[level].kind == kind


def test_a_failing_program_shrinks_to_the_line_that_fails() -> None:
    lines = (
        Line("v0", "self.l(x)"),
        Line("", "with torch.no_grad():", (Line("v1a", "v0 * 2"), Line("v1b", "v1a.cumsum(0)"))),
        Line("v2", "v1b + y"),
        Line("v3", "v2.sum(-1)"),
    )
    program = Program(lines, "(v3, v0)", training=True)
    small = shrink(program, lambda p: "cumsum" in p.text() and runs(p))
    assert small.rendered_lines() == ["v1b = x.cumsum(0)"]
    assert (small.output, small.training, small.parts) == ("v1b", False, [])


def _work(case: str) -> dict[str, Any]:
    if case == "dies":
        os._exit(3)
    while case == "hangs":
        pass
    return {"found": case}


def test_a_case_that_dies_or_hangs_ends_no_run_and_a_run_goes_on_where_its_record_ends(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.jsonl")
    run_all(["a", "dies", "b"], _work, record, seconds=60)
    run_all(["a", "hangs", "c"], _work, record, seconds=1)
    again = Record(record.path).found
    assert {case: entry.get("died", "") for case, entry in again.items()} == {
        "a": "", "b": "", "c": "", "dies": "its process ended with 3", "hangs": "took longer than 1 s",
    }  # fmt: skip
    assert [json.loads(line)["case"] for line in record.path.read_text().splitlines()].count("a") == 1


def _softmax(name: str, dtype: str, *, product: bool) -> samples.Sample | None:
    if name == "op:none":
        return None
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=samples.DTYPES[dtype])
    leaves, tree = pytree.tree_flatten(((x, -1), {}))
    return samples.Sample(samples.Call(torch.softmax, leaves, tree, product), (x,))


def test_a_sample_of_an_op_is_judged_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "sample", _softmax)
    cases = ["graph fp32 product op:softmax.", "graph fp16 plain op:softmax.", "view fp32 plain op:none"]
    found = {case: {"case": case, "code": "", **op_coverage.work(case)} for case in cases}
    kinds = {case: {kind for kind, _ in entry["found"].values()} for case, entry in found.items()}
    assert list(kinds.values()) == [{"ok"}, {"ok"}, {"no sample"}]
    text = op_coverage.to_markdown(op_coverage.summary(found, 6))
    assert "3 of 6 cases" in text
    assert "| graph fp32 product O1 | " in text
    assert "## Failures\n\nNone." in text


def test_what_is_called_is_judged_by_what_torch_itself_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = torch.nn.LayerNorm(4), torch.randn(600, 4, generator=torch.Generator().manual_seed(0))
    square = x[:4].clone()

    def sample(name: str, dtype: str, *, product: bool) -> samples.Sample:
        called, value = (layer, x) if name == "op:norm" else (torch.linalg.pinv, square)
        leaves, tree = pytree.tree_flatten(((value,), {}))
        return samples.Sample(samples.Call(called, leaves, tree, product), (value,))

    monkeypatch.setattr(samples, "sample", sample)
    # The low kernel of a layer norm sums the gradient of its bias in low.
    assert op_coverage.work("view fp32 plain op:norm")["found"]["O3"] == ["ok", ""]
    # No node of Dynamo's graph is in the converted one, where the op has another overload.
    kind, why = op_coverage.work("view fp32 plain op:pinv")["found"]["O1"]
    assert (kind, why.partition(" ")[0]) == ("deviation", "composite")


def test_what_is_infinite_in_fp32_may_be_the_largest_low_number_from_o2_on() -> None:
    plain, largest = torch.tensor([-torch.inf, torch.inf, torch.inf, 1.0]), torch.finfo(torch.bfloat16).max
    got = torch.tensor([-largest, largest, -largest, largest])
    found = run(nn.Identity(), nn.Identity(), (plain,))
    made = unsaturated(replace(found, outputs=[got]), found, torch.bfloat16).outputs[0]
    assert made.tolist() == [-torch.inf, torch.inf, -largest, largest]  # another sign, and a finite number, are wrong


def test_a_model_of_a_library_is_compared_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(libraries.BUILDERS, "own", (lambda name: (Net(), (torch.randn(4, 6),), {}), ["net"]))
    row = {"case": "own:net", "code": "", **libraries.work("own:net")}
    assert (row["same"], row["equal"], row["trains"], row["graph"], row["states"]) == (True, True, True, "ok", [])
    assert 0 < row["O2"] <= 2 * row["autocast"] < 0.1
    assert "| own:net | yes  | yes" in libraries.to_markdown(libraries.summary({"own:net": row}))


@pytest.mark.trial
def test_no_sample_of_an_op_fails(tmp_path: Path) -> None:
    # A process of its own: torch's test suite changes global settings when it is imported.
    script = Path(op_coverage.__file__)
    subprocess.run([sys.executable, script, "--record", tmp_path / "ops.jsonl", "-o", tmp_path], check=True)
    found = json.loads(tmp_path.joinpath("op_coverage.json").read_text())
    assert (found["failures"], found["alone"]) == ([], [])


@pytest.mark.trial
def test_models_of_other_libraries_are_converted_as_promised(tmp_path: Path) -> None:
    for package in libraries.LIBRARIES.values():
        pytest.importorskip(package.replace("-", "_"))
    libraries.main(["--record", str(tmp_path / "libraries.jsonl"), "-o", str(tmp_path)])
    rows = [r for r in json.loads(tmp_path.joinpath("libraries.json").read_text())["rows"] if r.get("autocast_runs")]
    assert len(rows) >= 100
    assert all(row.get("same") and row["graph"] not in judge.FAILURES for row in rows)
    assert sum(row["equal"] for row in rows) >= 0.97 * len(rows)
    assert {row.get("code") for row in rows if not row["equal"]} <= {*DEVIATIONS}
    assert all(row["O2"] <= (2 if row["autocast"] > 1e-4 else 10) * row["autocast"] for row in rows)


@pytest.mark.trial
def test_no_random_program_fails(tmp_path: Path) -> None:
    programs.main(["--record", str(tmp_path / "programs.jsonl"), "-o", str(tmp_path)])
    assert json.loads(tmp_path.joinpath("programs.json").read_text())["failures"] == []


@pytest.mark.parametrize("front_end", ["view", "ambient"])
def test_a_returned_value_that_is_written_at_the_end_has_a_cause(front_end: str) -> None:
    def written(self: Any, x: Tensor) -> Tensor:
        h = self.l(x).roll(1, -1)
        h.float().detach().mul_(0.5)  # a copy under autocast, and in FP32 the value itself
        return h

    torch.manual_seed(0)
    verdict = judged(Subject(net(written), (torch.randn(4, 6),)), front_end, ("O1",))["O1"]
    assert (verdict.kind, verdict.why) == (judge.DEVIATION, "mutated at /roll#0")
