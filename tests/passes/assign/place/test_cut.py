"""The cut is optimal: equal to brute force on small problems, never worse than painting on large ones."""

from __future__ import annotations

import itertools
import random
from unittest import mock

import networkx as nx
import pytest
from networkx.algorithms.flow import boykov_kolmogorov

from passes.assign.place.cut import Problem, Side, Variable, blocks, solve
from passes.contract.costs import PricedNet


def problem(seed: int, free: int) -> Problem:
    """Make a random problem: a chain-like graph with shared casts, fixed readers and implications."""
    draw = random.Random(seed)
    made = Problem()
    names: list[Variable] = [f"n{i}" for i in range(free)]
    for name in names:
        made.add(name, draw.randrange(20), draw.randrange(20))
    for i, name in enumerate([*names, Side.LOW, Side.FP32, Side.LOW, Side.FP32]):
        later = names[i + 1 :] if i < free else names
        readers = draw.sample(later, min(len(later), draw.randrange(4))) + draw.choices(
            [Side.LOW, Side.FP32], k=draw.randrange(2)
        )
        if readers:
            absorbs = tuple(draw.choice([None, None, 0, draw.randrange(9)]) for _ in readers) * draw.randrange(2)
            made.nets.append(PricedNet(name, tuple(readers), draw.randrange(1, 15), draw.randrange(1, 15), absorbs))
    for _ in range(draw.randrange(3)):
        v, w = draw.sample(names, 2) if free > 1 else (names[0], names[0])
        made.implies.append((v, w))
    if draw.random() < 0.3:
        made.implies.append((draw.choice(names), Side.FP32))
    return made


def chain(seed: int, layers: int) -> Problem:
    """Make a random chain of layers, which have only the stream that runs through them in common."""
    draw = random.Random(seed)
    made = Problem()
    made.add("x0", draw.randrange(20), draw.randrange(20))
    for i in range(layers):
        inner: list[Variable] = [f"{i}.{j}" for j in range(draw.randrange(1, 4))]
        for name in (*inner, f"x{i + 1}"):
            made.add(name, draw.randrange(20), draw.randrange(20))
        ends: list[Variable] = [*inner, Side.LOW, Side.FP32, f"x{i + 1}"]
        made.nets.append(
            PricedNet(
                f"x{i}", (inner[0], f"x{i + 1}", *draw.sample(ends, 1)), draw.randrange(1, 15), draw.randrange(1, 15)
            )
        )
        made.nets += [
            PricedNet(
                name, tuple(draw.sample(ends, draw.randrange(1, 4))), draw.randrange(1, 15), draw.randrange(1, 15)
            )
            for name in inner
        ]
        if draw.random() < 0.3:
            made.implies.append((draw.choice(inner), draw.choice([f"x{i}", f"x{i + 1}", Side.FP32])))
        if draw.random() < 0.1:
            made.implies.append((Side.LOW, draw.choice([f"x{i}", inner[0]])))
    return made


def brute_force(p: Problem) -> set[Variable]:
    """Try every placement; of equally cheap ones the one with the most variables low."""
    subsets = (set(itertools.compress(p.low, bits)) for bits in itertools.product([0, 1], repeat=len(p.low)))
    return min(subsets, key=lambda low: (p.cost(low), -len(low)))


@pytest.mark.parametrize("block", range(10))
def test_the_cut_equals_brute_force(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        p = problem(seed, 1 + seed % 12)
        assert solve(p) == brute_force(p), seed


@pytest.mark.parametrize("part", range(4))
def test_a_chain_of_blocks_is_cut_as_brute_force_would(part: int) -> None:
    split = 0
    for seed in range(50 * part, 50 * part + 50):
        p = chain(seed, 1 + seed % 3)
        expected = brute_force(p)
        if p.cost(expected) == float("inf"):
            continue
        split += len(blocks(p)) > 1
        assert solve(p) == expected, seed
    assert split > 20


def test_an_implication_is_felt_through_the_blocks_between() -> None:
    p = chain(0, 0)
    p.nets = [PricedNet(f"x{i}", (f"x{i + 1}",), 1, 1) for i in range(50)]
    for i in range(51):
        p.add(f"x{i}", 0, 0)
    p.implies = [*((f"x{i}", f"x{i + 1}") for i in range(50)), ("x50", Side.FP32)]
    assert solve(p) == set()
    p.implies[-1] = (Side.LOW, "x0")
    assert len(solve(p)) == 51


def test_a_placement_that_cannot_be_is_no_answer() -> None:
    p = chain(0, 2)
    p.implies += [(Side.LOW, "x0"), ("x0", "x1"), ("x1", "x2"), ("x2", Side.FP32)]
    with pytest.raises(nx.NetworkXUnbounded):
        solve(p)


def test_the_time_of_a_chain_of_blocks_grows_with_its_length() -> None:
    cuts = []
    for layers in (20, 40):
        with mock.patch("networkx.algorithms.flow.boykov_kolmogorov", wraps=boykov_kolmogorov) as cut:
            solve(chain(1, layers))
        cuts.append([len(call.args[0]) for call in cut.call_args_list])
    assert max(map(max, cuts)) < 30
    assert len(cuts[1]) < 2.5 * len(cuts[0])


def paint(p: Problem) -> set[Variable]:
    """Paint greedily, as Grappler's passes do: low spreads from low neighbours to every variable that may be low."""
    neighbours: dict[Variable, set[Variable]] = {v: set() for v in p.low}
    for net in p.nets:
        for reader in net.readers:
            if net.value in neighbours:
                neighbours[net.value].add(reader)
            if reader in neighbours:
                neighbours[reader].add(net.value)
    denied = {v for v, w in p.implies if w == Side.FP32}
    while more := {v for v, w in p.implies if w in denied} - denied:
        denied |= more
    low = {v for v in p.low if Side.LOW in neighbours[v] and v not in denied}
    while more := {v for v in p.low if neighbours[v] & low and v not in denied and v not in low}:
        low |= more
    while undone := {v for v, w in p.implies if v in low and w not in low}:
        low -= undone
    return low


@pytest.mark.parametrize(
    "seeds", [range(5), *(pytest.param(range(i, i + 20), marks=pytest.mark.matrix) for i in range(0, 200, 20))]
)
def test_the_cut_never_costs_more_than_a_greedy_painter(seeds: range) -> None:
    for seed in seeds:
        p = problem(1000 + seed, 500)
        assert p.cost(solve(p)) <= p.cost(paint(p)), seed


def test_a_shared_cast_is_paid_once() -> None:
    p = Problem()
    p.add("v", 0, 0)
    p.nets = [PricedNet("v", (Side.FP32, Side.FP32, Side.FP32), 10, 99), PricedNet(Side.LOW, ("v",), 25, 99)]
    assert p.cost(["v"]) == 10
    assert solve(p) == {"v"}


def test_an_implication_binds() -> None:
    p = Problem(implies=[("v", Side.FP32)])
    p.add("v", 0, 100)
    assert solve(p) == set()
    assert p.cost(["v"]) == float("inf")


def test_of_equal_cuts_the_one_with_the_smallest_fp32_side_is_taken() -> None:
    p = Problem()
    p.add("v", 5, 5)
    assert solve(p) == {"v"}


def test_fixed_sides_and_shared_variables_separate_blocks() -> None:
    read = (("a", ("b", Side.LOW)), (Side.FP32, ("b", "c")), ("d", (Side.FP32,)), ("c", ("e", "f")))
    p = Problem(nets=[PricedNet(tensor, readers, 1, 1) for tensor, readers in read])
    for v in "abcdef":
        p.add(v, 0, 0)
    found = {"".join(sorted(map(str, (*part.low, *([] if top is None else [top]))))): top for part, top in blocks(p)}
    assert found.keys() == {"ab", "bc", "cef", "d"}
    assert len([top for top in found.values() if top is None]) == 2  # one for each of the two that share nothing
    assert {top for top in found.values() if top is not None} == {"b", "c"}
