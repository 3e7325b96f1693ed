"""Nodes are found again by what they are made of, what is made of them, and what lies between."""

from __future__ import annotations

import itertools
import random

import pytest

from fxamp.report.diff.match import Item, common, in_order, match


def longest(a: str, b: str) -> int:
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def test_sequences_are_aligned_by_the_fewest_edits() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        a, b = ("".join(draw.choices("abc", k=draw.randrange(10))) for _ in range(2))
        pairs = common(a, b)
        assert all(a[i] == b[j] for i, j in pairs)
        assert all(p[0] < q[0] and p[1] < q[1] for p, q in itertools.pairwise(pairs))
        assert len(pairs) == longest(a, b), (a, b)


def test_what_has_moved_is_what_the_longest_run_in_order_leaves_out() -> None:
    draw = random.Random(0)
    for _ in range(300):
        places = draw.sample(range(8), 8)
        kept = sorted(in_order(list(enumerate(places))))
        assert all(p[1] < q[1] for p, q in itertools.pairwise(kept))
        best = max(
            bin(chosen).count("1") for chosen in range(256)
            if sorted(run := [p for i, p in enumerate(places) if chosen >> i & 1]) == run
        )  # fmt: skip
        assert len(kept) == best


def items(*nodes: tuple[str, str, tuple[int, ...]]) -> list[Item]:
    return [Item(f"{module}/{op}#{at}", module, op, operands, {}) for at, (module, op, operands) in enumerate(nodes)]


def test_branches_in_another_order_are_found_by_their_edges() -> None:
    before = items(("", "x", ()), ("a", "relu", (0,)), ("a", "exp", (1,)), ("b", "tanh", (0,)), ("", "add", (2, 3)))
    after = items(("", "x", ()), ("b", "tanh", (0,)), ("a", "relu", (0,)), ("a", "exp", (2,)), ("", "add", (3, 1)))
    assert match(before, after)[0] == {0: 0, 1: 3, 2: 1, 3: 2, 4: 4}


def test_an_op_in_a_module_that_is_another_is_another() -> None:
    def model(middle: str, *ops: str) -> list[Item]:
        nodes = [("stem", op, ()) for op in ("conv", "norm", "pool")]
        nodes += [(middle, op, ()) for op in ops] + [("head", op, ()) for op in ("mean", "linear", "softmax")]
        return items(*nodes)

    pairs = match(model("old", "sort", "relu", "where"), model("new", "roll", "relu", "diff"))[0]
    assert pairs == {0: 0, 1: 1, 2: 2, 4: 4, 6: 6, 7: 7, 8: 8}  # relu stands where it stood
    before = [*model("old", "relu"), *items(("far", "exp", ()), ("far", "sin", ()))]
    after = [*model("new", "exp"), *items(("far", "exp", ()), ("far", "sin", ()))]
    assert 3 not in match(before, after)[0]


@pytest.mark.parametrize("size", [0, 1, 5])
def test_graphs_of_any_size_match_themselves(size: int) -> None:
    graph = items(*(("m", "relu", (at - 1,) if at else ()) for at in range(size)))
    assert match(graph, graph)[0] == {at: at for at in range(size)}
    assert match(graph, [])[0] == match([], graph)[0] == {}
