"""Match the nodes of two graphs by structure, so that an edit does not appear as a change of all nodes after it.

    before   embed  ln.0  fc.0  ln.1  fc.1  head
    after    embed  ln.0  fc.0  adapter  ln.1  fc.1  head        "adapter" is new, and nothing else

label -> fingerprint -> anchor -> propagate along edges -> assign the rest -> verify each pair. Each node gets two
hashes: of its label with everything that it is computed from, and with everything that is computed from it. Nodes whose
hash is unique on both sides are matched. Starting from these pairs, operands are matched with operands, and the
remaining nodes are aligned with the fewest insertions and removals. Two nodes that share nothing but their label match
only if their modules correspond.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

_NUMBER = re.compile(r"\d+")
# Graphs of at least MANY nodes are of two models if less than ALIKE of the nodes match by more than their op.
ALIKE, MANY = 0.2, 10
_EDITS = 1_000  # most insertions and removals that are looked for; sequences with more count as unrelated


@dataclass(frozen=True)
class Item:
    """One node as it is matched.

    Attributes:
        key: `module.path/op#ordinal`, with the number of its graph in front where that is not the first.
        module: path of its module, with the number of its graph likewise.
        label: is equal for two nodes that may match.
        operands: places of the items that it reads, all before its own.
        fields: the values that are compared between matched nodes.
    """

    key: str
    module: str
    label: str
    operands: tuple[int, ...]
    fields: dict[str, str] = field(hash=False)


def match(before: Sequence[Item], after: Sequence[Item]) -> tuple[dict[int, int], bool]:
    """Return the matched items (new place -> old place), and whether the two graphs are of one model at all."""
    found = _Matcher(before, after)
    cones = found.cones(found.each(lambda item: item.operands)), found.cones(found.readers, backwards=True)
    keys = found.each(lambda item: item.key)
    for cone in cones:
        found.anchor(*(list(zip(*both, strict=True)) for both in zip(keys, cone, strict=True)))
    for cone in cones:
        found.anchor(*cone)
    found.propagate()
    sure = dict(found.pairs)
    labels = found.each(lambda item: item.label)
    found.assign(*(list(zip(*both, strict=True)) for both in zip(found.modules, labels, strict=True)))
    least = min(len(before), len(after))
    if least >= MANY and len(found.pairs) < ALIKE * least:
        return found.pairs, False
    found.anchor(*found.each(lambda item: (item.key, item.label)))
    found.assign(*labels)
    found.verify(sure)
    return found.pairs, True


def corresponding(before: Sequence[Item], after: Sequence[Item], pairs: Mapping[int, int]) -> dict[str, str]:
    """Map each old module to the new module with most of its nodes; on a tie, to the one of the same name."""
    votes: dict[str, Counter[str]] = {}
    for new, old in pairs.items():
        votes.setdefault(before[old].module, Counter())[after[new].module] += 1
    return {a: max(found, key=lambda b: (found[b], b == a)) for a, found in votes.items()}


def common(before: Sequence[Hashable], after: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return the places of the longest common subsequence, by Myers' algorithm; none if too many edits lie between.

    difflib's is not the longest: of "aaa" in "axyzaa" it finds two.
    """
    n, m = len(before), len(after)
    if not n or not m:
        return []
    # By diagonal, the furthest place in `before`, and the pairs on the way: the last one and those before it.
    best: dict[int, tuple[int, Any]] = {1: (0, None)}
    for edits in range(min(n + m, _EDITS) + 1):
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and best[k - 1][0] < best[k + 1][0])
            x, way = best[k + 1] if down else (best[k - 1][0] + 1, best[k - 1][1])
            while x < n and x - k < m and before[x] == after[x - k]:
                way = (x, x - k), way
                x += 1
            best[k] = x, way
            if x >= n and x - k >= m:
                pairs = []
                while way is not None:
                    pair, way = way
                    pairs.append(pair)
                return pairs[::-1]
    return []


def in_order(pairs: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the largest set of pairs whose first and second places both rise: all other pairs have moved."""
    ends: list[int] = []  # the pair at the end of the best rising run of each length
    previous: list[int | None] = []
    for at, (_, place) in enumerate(pairs):
        length = bisect_left(ends, place, key=lambda end: pairs[end][1])
        previous.append(ends[length - 1] if length else None)
        ends[length : length + 1] = [at]
    kept, last = set(), ends[-1] if ends else None
    while last is not None:
        kept.add(pairs[last])
        last = previous[last]
    return kept


class _Matcher:
    """The pairs found so far (new place -> old place)."""

    def __init__(self, before: Sequence[Item], after: Sequence[Item]) -> None:
        self.sides = self.before, self.after = before, after
        self.readers = [_readers(side) for side in self.sides]
        self.modules = self.each(lambda item: _NUMBER.sub("*", item.module))  # equal for layers of one list
        self.pairs: dict[int, int] = {}
        self.taken: set[int] = set()

    def each(self, of: Callable[[Item], T]) -> list[list[T]]:
        return [[of(item) for item in side] for side in self.sides]

    def pair(self, old: int, new: int) -> None:
        self.pairs[new] = old
        self.taken.add(old)

    def cones(self, edges: Sequence[Sequence[tuple[int, ...]]], *, backwards: bool = False) -> list[list[int]]:
        """Return a hash for every item of both sides, of its label and of all items that its edges lead to."""
        numbers: dict[Hashable, int] = {}  # equal structures have equal numbers
        out = [[0] * len(items) for items in self.sides]
        for items, leads, made in zip(self.sides, edges, out, strict=True):
            for at in reversed(range(len(items))) if backwards else range(len(items)):
                shape = (items[at].label, *(made[other] for other in leads[at]))
                made[at] = numbers.setdefault(shape, len(numbers))
        return out

    def anchor(self, before: Sequence[Hashable], after: Sequence[Hashable]) -> None:
        """Pair two items whose token no other unmatched item of their side has."""
        old = _unique((t, at) for at, t in enumerate(before) if at not in self.taken)
        for token, new in _unique((t, at) for at, t in enumerate(after) if at not in self.pairs).items():
            if token in old:
                self.pair(old[token], new)

    def propagate(self) -> None:
        """Follow the edges from every pair: operand by operand, and reader by reader if only one of its kind exists."""
        work = list(self.pairs.items())
        while work:
            new, old = work.pop()
            theirs, ours = (
                _unique((self._slot(items, at, place), at) for at in readers[place])
                for items, readers, place in zip(self.sides, self.readers, (old, new), strict=True)
            )
            found = [(theirs[slot], ours[slot]) for slot in theirs if slot in ours]
            if len(self.before[old].operands) == len(self.after[new].operands):
                found = [*zip(self.before[old].operands, self.after[new].operands, strict=True), *found]
            for o, n in found:
                same = self.before[o].label == self.after[n].label and self.modules[0][o] == self.modules[1][n]
                if same and n not in self.pairs and o not in self.taken:
                    self.pair(o, n)
                    work.append((n, o))

    def _slot(self, items: Sequence[Item], reader: int, operand: int) -> tuple[str, tuple[int, ...]]:
        return items[reader].label, tuple(i for i, at in enumerate(items[reader].operands) if at == operand)

    def assign(self, before: Sequence[Hashable], after: Sequence[Hashable]) -> None:
        """Align the items that are left between pairs, in order, with the fewest insertions and removals."""
        order = in_order(sorted((old, new) for new, old in self.pairs.items()))
        fences = [(-1, -1), *sorted(order), (len(before), len(after))]
        for (old, new), (old_end, new_end) in itertools.pairwise(fences):
            olds = [at for at in range(old + 1, old_end) if at not in self.taken]
            news = [at for at in range(new + 1, new_end) if at not in self.pairs]
            for i, j in common([before[at] for at in olds], [after[at] for at in news]):
                self.pair(olds[i], news[j])

    def verify(self, sure: dict[int, int]) -> None:
        """Separate pairs that match only by label, if their modules correspond to other modules."""
        votes: dict[tuple[bool, str], Counter[str]] = {}
        for new, old in self.pairs.items():
            a, b = self.before[old].module, self.after[new].module
            votes.setdefault((False, a), Counter())[b] += 1
            votes.setdefault((True, b), Counter())[a] += 1
        for new, old in list(self.pairs.items()):
            a, b = self.before[old].module, self.after[new].module
            here, there = votes[False, a], votes[True, b]
            if sure.get(new) != old and (here[b] < max(here.values()) or there[a] < max(there.values())):
                del self.pairs[new]


def _readers(items: Sequence[Item]) -> list[tuple[int, ...]]:
    out: list[list[int]] = [[] for _ in items]
    for at, item in enumerate(items):
        for operand in item.operands:
            out[operand].append(at)
    return [tuple(readers) for readers in out]


def _unique(found: Iterable[tuple[T, int]]) -> dict[T, int]:
    """Return the places of the tokens that are there once."""
    once: dict[T, int | None] = {}
    for token, at in found:
        once[token] = None if token in once else at
    return {token: at for token, at in once.items() if at is not None}
