"""The whole pipeline on graphs drawn at random: exact at O0, equal to autocast at O1, in time that grows linearly."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxamp.capture.graph import attribute_of
from passes.assign.assign_precision import AssignPrecision
from passes.casts.eliminate_casts import EliminateCasts
from passes.casts.insert_casts import InsertCasts
from passes.contract.plan import Plan
from passes.contract.policy import Policy, Target
from passes.form import Assignment, Unit
from passes.graph.notes import is_inserted
from passes.graph.values import LOW_DTYPES, no_autocast
from passes.ops import ops
from tests.support.graphs import compile_plain, random_graph, random_inputs, residual_chain, run, storages, unit_of
from tests.support.helpers import in_turns

SEEDS = range(60)
some_seeds = pytest.mark.parametrize(
    "seed", [s if s < 12 else pytest.param(s, marks=pytest.mark.matrix) for s in SEEDS]
)


@functools.cache
def _drawn(seed: int) -> GraphModule:
    return random_graph(seed)


def drawn(seed: int) -> GraphModule:
    """Return the graph of a seed, drawn once."""
    return copy.deepcopy(_drawn(seed))


def compiled(gm: GraphModule, level: str) -> tuple[GraphModule, Plan]:
    """Return a compiled copy of a graph and its plan."""
    new = copy.deepcopy(gm)
    policy = Policy(level, dtype=torch.bfloat16, device="cpu")
    plan = compile_plain(new, policy)
    new.recompile()
    return new, plan


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@some_seeds
def test_o0_keeps_outputs_gradients_buffers_inputs_and_aliases_bit_for_bit(seed: int) -> None:
    original = drawn(seed)
    new, plan = compiled(original, "O0")
    outputs, inputs, gradients = run(original)
    got_outputs, got_inputs, got_gradients = run(new)
    assert plan.casts == 0
    assert same(outputs, got_outputs)
    assert same(inputs, got_inputs)
    assert [g is None for g in gradients] == [g is None for g in got_gradients]
    assert same([g for g in gradients if g is not None], [g for g in got_gradients if g is not None])
    assert list(storages([*outputs, *inputs])) == list(storages([*got_outputs, *got_inputs]))
    assert same(list(original.buffers()), list(new.buffers()))


@some_seeds
def test_o1_is_autocast_bit_for_bit(seed: int) -> None:
    original = drawn(seed)
    new, _ = compiled(original, "O1")
    with torch.autocast("cpu", torch.bfloat16):
        outputs, inputs, _ = run(original)
    got_outputs, got_inputs, _ = run(new)
    assert same([o.float() for o in outputs], got_outputs)
    assert same(inputs, got_inputs)
    assert same(list(original.buffers()), list(new.buffers()))


@pytest.mark.parametrize(("seed", "level"), in_turns(SEEDS[::10], ["O2", "O3"]))
def test_o2_and_o3_run_keep_dtypes_and_write_what_eager_writes(seed: int, level: str) -> None:
    original = drawn(seed)
    new, _ = compiled(original, level)
    given = random_inputs(original)
    outputs, inputs, gradients = run(original)
    got_outputs, got_inputs, got_gradients = run(new)
    assert [o.dtype for o in outputs] == [o.dtype for o in got_outputs]
    assert [torch.equal(a, b) for a, b in zip(given, inputs, strict=True)] == [
        torch.equal(a, b) for a, b in zip(given, got_inputs, strict=True)
    ]
    assert [g is None or g.dtype for g in gradients] == [g is None or g.dtype for g in got_gradients]
    assert all(o.isfinite().all() for o in got_outputs)


def inserted(gm: GraphModule, policy: Policy, seed: int) -> tuple[GraphModule, Assignment]:
    """Return a copy of a graph with its casts in, and more at random that change no value; and the dtypes."""
    new, rng = copy.deepcopy(gm), random.Random(seed)
    with no_autocast():
        assignment = AssignPrecision(policy)(Unit(new.graph, functools.partial(attribute_of, new), Target.of(policy)))
        unit = unit_of(new.graph, assignment)
        InsertCasts()(unit)
        unit = unit.after()
    for node in [n for n in new.graph.nodes if n.op == "call_function" and not is_inserted(n)]:
        low = [o for o in ops.operands(node) if unit.dtypes_of(o.node)[1] in LOW_DTYPES and rng.random() < 0.5]
        for o in low:
            promotes = ops.name(node) in ("add", "mul", "sub", "cat") and unit.dtypes_of(node)[1] == torch.float32
            kinds = [(torch.float32,)] if promotes else [(unit.dtypes_of(o.node)[1],), (torch.float32, torch.bfloat16)]
            made = o.node
            for dtype in rng.choice(kinds):
                assert isinstance(dtype, torch.dtype)
                made = unit.cast(made, dtype, before=node)
            ops.map_operands(node, functools.partial(_replaced, {o: made}))
    new.recompile()
    return new, unit.after().decided


def _replaced(new: dict[ops.Operand, Node], operand: ops.Operand) -> Node:
    return new.get(operand, operand.node)


@pytest.mark.parametrize("seeds", [SEEDS[2::4], pytest.param(SEEDS[::2], marks=pytest.mark.matrix)], ids=len)
def test_eliminating_casts_changes_no_output_gradient_write_or_alias(seeds: range) -> None:
    """All rules but that which shares, for it rounds the sum of its readers' gradients."""
    fired: Counter[str] = Counter()
    for seed, level in zip(seeds, itertools.cycle(("O1", "O2", "O3")), strict=False):
        before, assignment = inserted(drawn(seed), Policy(level, dtype=torch.bfloat16, device="cpu"), seed)
        after = copy.deepcopy(before)
        twin = dict(zip(before.graph.nodes, after.graph.nodes, strict=True))
        dtypes = {twin[n]: d for n, d in assignment.dtypes.items()}
        edits = EliminateCasts("never")(unit_of(after.graph, replace(assignment, dtypes=dtypes)))
        after.recompile()
        expected, got = run(before), run(after)
        where = f"seed {seed} at {level}: {edits}"
        assert same(expected[0], got[0]), where
        assert same(expected[1], got[1]), where
        assert same(list(before.buffers()), list(after.buffers())), where
        assert list(storages([*expected[0], *expected[1]])) == list(storages([*got[0], *got[1]])), where
        assert [g is None for g in expected[2]] == [g is None for g in got[2]], where
        for a, b in zip(expected[2], got[2], strict=True):
            assert a is None or b is None or (a.dtype == b.dtype and torch.equal(a, b)), where
        fired.update(edits)
    assert min(fired["no_op"], fired["round_trip"], 100 * fired["promote"]) > 50 * len(seeds) / 30, fired


@pytest.mark.parametrize(("seed", "low"), in_turns(SEEDS[1::10], [torch.bfloat16, torch.float16]))
def test_o2_is_finite_where_fp32_is_and_within_four_times_autocasts_distance(seed: int, low: torch.dtype) -> None:
    original = drawn(seed)
    new = copy.deepcopy(original)
    policy = Policy("O2", dtype=low, device="cpu")
    compile_plain(new, policy)
    new.recompile()
    exact = copy.deepcopy(original).double()
    truth = _draw(exact, [x.double() for x in random_inputs(original)])
    got = _draw(new, random_inputs(original))
    with torch.autocast("cpu", low):
        reference = _draw(original, random_inputs(original))
    for exactly, ours, theirs in zip(truth, got, reference, strict=True):
        assert torch.equal(ours.isfinite(), exactly.isfinite())
        near = (theirs.double() - exactly).norm() + torch.finfo(low).eps * exactly.norm()
        assert (ours.double() - exactly).norm() <= 4 * near


def _draw(gm: GraphModule, inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(0)  # of dropout
    return [o.detach() for o in gm(*inputs)]


def test_compiling_is_the_same_under_ambient_autocast() -> None:
    original = drawn(1)
    plain, plan = compiled(original, "O1")
    with torch.autocast("cpu", torch.float16):
        ambient, ambient_plan = compiled(original, "O1")
    assert plan == ambient_plan
    assert plain.code == ambient.code


def test_compiling_draws_no_random_number_and_keeps_grad_mode() -> None:
    gm = drawn(2)
    before = torch.get_rng_state()
    compiled(gm, "O1")
    assert torch.equal(before, torch.get_rng_state())
    assert torch.is_grad_enabled()


def _seconds_per_node(nodes: int) -> float:
    gm = residual_chain(nodes)
    count = len(gm.graph.nodes)
    start = time.process_time()
    compile_plain(gm, Policy("O1", dtype=torch.bfloat16, device="cpu"))
    return (time.process_time() - start) / count


def test_time_to_compile_grows_linearly_with_the_graph() -> None:
    _seconds_per_node(100)  # fills the caches
    small, large = (min(_seconds_per_node(nodes) for _ in range(2)) for nodes in (500, 2000))  # other runs disturb
    assert large < 2 * small
