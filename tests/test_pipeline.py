"""The whole pipeline on graphs drawn at random: exact at O0, equal to autocast at O1, in time that grows linearly."""

from __future__ import annotations

import copy
import functools
import time

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from passes import compile_graph
from passes.plan import Plan
from passes.policy import Policy
from tests.graphs import random_graph, random_inputs, residual_chain, run, storages

SEEDS = range(60)


@functools.cache
def _drawn(seed: int) -> GraphModule:
    return random_graph(seed)


def drawn(seed: int) -> GraphModule:
    """Return the graph of a seed, drawn once."""
    return copy.deepcopy(_drawn(seed))


def compiled(gm: GraphModule, level: str) -> tuple[GraphModule, Plan]:
    """Return a compiled copy of a graph and its plan."""
    new = copy.deepcopy(gm)
    plan = compile_graph(new.graph, Policy(level, dtype=torch.bfloat16, device="cpu"), new.get_parameter, capture="fx")
    new.recompile()
    return new, plan


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
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


@pytest.mark.parametrize("seed", SEEDS)
def test_o1_is_autocast_bit_for_bit(seed: int) -> None:
    original = drawn(seed)
    new, _ = compiled(original, "O1")
    with torch.autocast("cpu", torch.bfloat16):
        outputs, inputs, _ = run(original)
    got_outputs, got_inputs, _ = run(new)
    assert same([o.float() for o in outputs], got_outputs)
    assert same(inputs, got_inputs)
    assert same(list(original.buffers()), list(new.buffers()))


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("seed", SEEDS[::4])
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
    compile_graph(gm.graph, Policy("O1", dtype=torch.bfloat16, device="cpu"), gm.get_parameter, capture="fx")
    return (time.process_time() - start) / count


def test_time_to_compile_grows_linearly_with_the_graph() -> None:
    _seconds_per_node(100)  # fills the caches
    assert _seconds_per_node(4000) < 2 * _seconds_per_node(1000)
