"""The cut is optimal: equal to brute force on small problems, never worse than painting on large ones."""

from __future__ import annotations

import itertools
import random

import pytest

from passes.cut import FP32, LOW, Net, Problem, Variable, regions, solve


def problem(seed: int, free: int) -> Problem:
    """Make a random problem: a chain-like graph with shared casts, fixed readers and implications."""
    draw = random.Random(seed)
    made = Problem()
    names: list[Variable] = [f"n{i}" for i in range(free)]
    for name in names:
        made.add(name, draw.randrange(20), draw.randrange(20))
    for i, name in enumerate([*names, LOW, FP32, LOW, FP32]):
        later = names[i + 1 :] if i < free else names
        readers = draw.sample(later, min(len(later), draw.randrange(4))) + draw.choices(
            [LOW, FP32], k=draw.randrange(2)
        )
        if readers:
            made.nets.append(Net(name, tuple(readers), draw.randrange(1, 15)))
    for _ in range(draw.randrange(3)):
        v, w = draw.sample(names, 2) if free > 1 else (names[0], names[0])
        made.implies.append((v, w))
    if draw.random() < 0.3:
        made.implies.append((draw.choice(names), FP32))
    return made


@pytest.mark.parametrize("block", range(10))
def test_the_cut_equals_brute_force(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        p = problem(seed, 1 + seed % 12)
        subsets = (itertools.compress(p.low, bits) for bits in itertools.product([0, 1], repeat=len(p.low)))
        assert p.cost(solve(p)) == min(p.cost(set(s)) for s in subsets), seed


def paint(p: Problem) -> set[Variable]:
    """Paint greedily, as Grappler's passes do: low spreads from low neighbours to every variable that may be low."""
    neighbours: dict[Variable, set[Variable]] = {v: set() for v in p.low}
    for net in p.nets:
        for reader in net.readers:
            if net.tensor in neighbours:
                neighbours[net.tensor].add(reader)
            if reader in neighbours:
                neighbours[reader].add(net.tensor)
    denied = {v for v, w in p.implies if w == FP32}
    while more := {v for v, w in p.implies if w in denied} - denied:
        denied |= more
    low = {v for v in p.low if LOW in neighbours[v] and v not in denied}
    while more := {v for v in p.low if neighbours[v] & low and v not in denied and v not in low}:
        low |= more
    while undone := {v for v, w in p.implies if v in low and w not in low}:
        low -= undone
    return low


@pytest.mark.parametrize("block", range(4))
def test_the_cut_never_costs_more_than_a_greedy_painter(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        p = problem(1000 + seed, 500)
        assert p.cost(solve(p)) <= p.cost(paint(p)), seed


def test_a_shared_cast_is_paid_once() -> None:
    p = Problem()
    p.add("v", 0, 0)
    p.nets = [Net("v", (FP32, FP32, FP32), 10), Net(LOW, ("v",), 25)]
    assert p.cost(["v"]) == 10
    assert solve(p) == {"v"}


def test_an_implication_binds() -> None:
    p = Problem(implies=[("v", FP32)])
    p.add("v", 0, 100)
    assert solve(p) == set()
    assert p.cost(["v"]) == float("inf")


def test_of_equal_cuts_the_one_with_the_smallest_fp32_side_is_taken() -> None:
    p = Problem()
    p.add("v", 5, 5)
    assert solve(p) == {"v"}


def test_fixed_sides_separate_regions() -> None:
    p = Problem(nets=[Net("a", ("b", LOW), 1), Net(FP32, ("b", "c"), 1), Net("d", (FP32,), 1)])
    for v in "abcd":
        p.add(v, 0, 0)
    assert sorted(sorted(r.low) for r in regions(p)) == [["a", "b", "c"], ["d"]]  # type: ignore[type-var]
