"""The form of a pass, and what is told between two of them: verification, times, printed graphs, edits by rule."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import re
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from torch.fx import GraphModule

from fxamp.capture.graph import attribute_of
from fxamp.cli.printed import Printed
from passes import NAMES, ByteCosts, Pipeline, watched
from passes.assign.assign_precision import AssignPrecision
from passes.contract.errors import PolicyError, VerificationError
from passes.contract.plan import Plan
from passes.contract.policy import Policy, Target
from passes.form import Ensures, Unit
from passes.pipeline import Watcher, _run
from reports.scaling import Timed
from tests.support.graphs import compile_plain, parse

POLICY = Policy("O1", dtype="bf16", device="cpu")
TEXT = """
    x: f32[2, 4]
    w: f32[4, 4] = param
    first: f32[2, 4] = linear(x, w)
    second: f32[2, 4] = linear(x, w)
    both: f32[2, 4] = add.Tensor(first, second)
    p: f32[2, 4] = softmax.int(both, 1)
    return p
"""


def compiled(policy: Policy = POLICY) -> tuple[GraphModule, Plan]:
    gm = parse(TEXT)
    return gm, compile_plain(gm, policy)


def test_a_pass_is_its_configuration() -> None:
    pipeline = Pipeline.of(POLICY)
    assert pipeline == Pipeline.of(POLICY)
    assert pipeline.names == tuple(name for name in NAMES if name != "split-norms")  # O1 splits none
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in NAMES)
    for step in (pipeline, *pipeline.prepare, pipeline.decide, *pipeline.rewrite):
        assert type(step).__doc__
        with pytest.raises(dataclasses.FrozenInstanceError):
            step.anything = 1  # type: ignore[attr-defined]


def test_nothing_is_prepared_where_nothing_is_rounded() -> None:
    assert Pipeline.of(Policy("O0")).prepare == ()


def test_watchers_are_told_before_and_after_every_pass() -> None:
    told = []

    class Told(Watcher):
        def before(self, step: object, unit: Unit) -> None:
            told.append(("before", step.name))  # type: ignore[attr-defined]

        def after(self, step: object, unit: Unit, edits: object) -> None:
            told.append(("after", step.name))  # type: ignore[attr-defined]

    with watched(Told()):
        compiled()
    assert told == [(when, name) for name in Pipeline.of(POLICY).names for when in ("before", "after")]
    told.clear()
    compiled()
    assert not told


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_cycles_are_collected_after_the_passes_alone(fails: bool, enabled: bool) -> None:
    class Told(Watcher):
        def after(self, step: object, unit: Unit, edits: object) -> None:
            assert not gc.isenabled()
            if fails:
                raise ValueError("no")

    try:
        gc.enable() if enabled else gc.disable()
        with watched(Told()), pytest.raises(ValueError, match="no") if fails else contextlib.nullcontext():
            compiled()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


@pytest.mark.parametrize("ensures", Ensures)
def test_what_a_pass_breaks_is_found_after_it(ensures: Ensures) -> None:
    promised = ensures

    @dataclasses.dataclass(frozen=True)
    class Widens:
        name: ClassVar = "widens"
        ensures: ClassVar = promised

        def __call__(self, unit: Unit) -> dict[str, int]:
            relu = next(n for n in unit.graph.nodes if n.name == "second")
            unit.inserted[relu] = torch.float32, torch.float64
            return {}

    gm, _ = compiled()
    unit = _run(
        Unit(gm.graph, functools.partial(attribute_of, gm), Target.of(POLICY)), (AssignPrecision(POLICY),), Counter()
    )
    if ensures is Ensures.DTYPES:
        with pytest.raises(VerificationError, match=r"linear .*gives torch\.\w+, its plan says torch\.float64"):
            _run(unit, (Widens(),), Counter())
    else:
        _run(unit, (Widens(),), Counter())


def test_times_are_kept_by_pass() -> None:
    ticks = iter(range(100))
    timed = Timed(clock=lambda: float(next(ticks)))
    with watched(timed):
        compiled()
    assert timed.seconds == dict.fromkeys(Pipeline.of(POLICY).names, 1.0)


def test_a_graph_is_printed_as_it_is_after_one_pass() -> None:
    texts: list[str] = []
    with watched(Printed("insert-casts", texts.append)):
        compiled()
    assert texts == [
        """graph 0 after insert-casts: operand 4, clamp 0, argument 0, output 1, read 0, assertion 0
  x: float32 = input
  w: float32 = w
  to_dtype: bfloat16 = to(x, torch.bfloat16)
  to_dtype_1: bfloat16 = to(w, torch.bfloat16)
  first: bfloat16 = linear(to_dtype, to_dtype_1)
  to_dtype_2: bfloat16 = to(x, torch.bfloat16)
  to_dtype_3: bfloat16 = to(w, torch.bfloat16)
  second: bfloat16 = linear(to_dtype_2, to_dtype_3)
  both: bfloat16 = add(first, second)
  p: bfloat16 = softmax(both, 1)
  to_dtype_4: float32 = to(p, torch.float32)
  return (to_dtype_4,)
"""
    ]


def test_the_plan_says_how_often_each_rule_fired_and_which_never_did() -> None:
    _, plan = compiled()
    assert (plan.edits["insert-casts/operand"], plan.edits["insert-casts/output"], plan.inserted_casts) == (4, 1, 5)
    assert plan.edits["eliminate-casts/share"] == 2
    assert "eliminate-casts/share" not in plan.never_fired
    assert {"eliminate-casts/promote", "insert-casts/clamp", "legalize/composite"} <= set(plan.never_fired)
    again = Plan.from_json(plan.to_json())
    assert again.edits == plan.edits
    assert copy.deepcopy(plan).edits == plan.edits


def test_a_second_run_of_the_passes_that_eliminate_finds_nothing() -> None:
    gm = parse(TEXT)
    unit = _run(
        Unit(gm.graph, functools.partial(attribute_of, gm), Target.of(POLICY)), (AssignPrecision(POLICY),), Counter()
    )
    edits: Counter[str] = Counter()
    rewrite = Pipeline.of(POLICY).rewrite
    unit = _run(unit, rewrite, edits)
    before = dict(edits)
    _run(unit, [step for step in rewrite if step.name == "eliminate-casts"], edits)
    assert edits == before


@pytest.mark.parametrize("decide", [None, ()])
def test_a_pipeline_without_a_decision_is_refused(decide: Any) -> None:
    with pytest.raises(PolicyError, match=f"needs a pass that decides .* decide={re.escape(repr(decide))} is none"):
        dataclasses.replace(Pipeline.of(POLICY), decide=decide)


def test_a_pass_that_decides_nothing_is_no_decision() -> None:
    gm = parse(TEXT)
    pipeline = dataclasses.replace(Pipeline.of(POLICY), decide=Pipeline.of(POLICY).prepare[0])
    with pytest.raises(PolicyError, match="nothing is decided on this graph: the pass `decide` of a pipeline"):
        compile_plain(gm, POLICY, pipeline=pipeline)


def test_a_pipeline_has_the_plan_and_the_costs_that_it_was_made_with() -> None:
    gm, costs = parse(TEXT), ByteCosts("cpu")
    with pytest.raises(PolicyError, match="give them to Pipeline"):
        compile_plain(gm, POLICY, pipeline=Pipeline.of(POLICY), costs=costs)
    made = compile_plain(gm, POLICY, pipeline=Pipeline.of(POLICY, costs=costs))
    assert made == compiled()[1]
