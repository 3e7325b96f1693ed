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
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .sequences import common, in_order

_NUMBER = re.compile(r"\d+")
# Graphs of at least MANY nodes are of two models if less than ALIKE of the nodes match by more than their op.
ALIKE, MANY = 0.2, 10


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


@dataclass(frozen=True)
class Matching:
    """The matched items (new place -> old place), and whether the two graphs are of one model at all."""

    pairs: dict[int, int]
    alike: bool


def match(before: Sequence[Item], after: Sequence[Item]) -> Matching:
    """Find the nodes of one graph in another."""
    found = _Matcher(before, after)
    below, above = found.cones(_operands), found.cones(_readers)
    keys = tuple([i.key for i in side] for side in (before, after))
    found.anchor(*(list(zip(*both, strict=True)) for both in zip(keys, below, strict=True)))
    found.anchor(*(list(zip(*both, strict=True)) for both in zip(keys, above, strict=True)))
    found.anchor(*below)
    found.anchor(*above)
    found.propagate()
    sure = dict(found.pairs)
    found.assign(*([(_NUMBER.sub("*", i.module), i.label) for i in side] for side in (before, after)))
    least = min(len(before), len(after))
    if least >= MANY and len(found.pairs) < ALIKE * least:
        return Matching(found.pairs, alike=False)
    found.anchor(*([(i.key, i.label) for i in side] for side in (before, after)))
    found.assign(*([i.label for i in side] for side in (before, after)))
    found.verify(sure)
    return Matching(found.pairs, alike=True)


def corresponding(before: Sequence[Item], after: Sequence[Item], pairs: Mapping[int, int]) -> dict[str, str]:
    """Map each old module to the new module with most of its nodes; on a tie, to the one of the same name."""
    votes: dict[str, Counter[str]] = {}
    for new, old in pairs.items():
        votes.setdefault(before[old].module, Counter())[after[new].module] += 1
    return {a: max(found, key=lambda b: (found[b], b == a)) for a, found in votes.items()}


def _operands(items: Sequence[Item]) -> list[tuple[int, ...]]:
    return [item.operands for item in items]


def _readers(items: Sequence[Item]) -> list[tuple[int, ...]]:
    out: list[list[int]] = [[] for _ in items]
    for at, item in enumerate(items):
        for operand in item.operands:
            out[operand].append(at)
    return [tuple(readers) for readers in out]


class _Matcher:
    """The pairs found so far (new place -> old place)."""

    def __init__(self, before: Sequence[Item], after: Sequence[Item]) -> None:
        self.before, self.after = before, after
        self.pairs: dict[int, int] = {}
        self.taken: set[int] = set()

    def pair(self, old: int, new: int) -> None:
        self.pairs[new] = old
        self.taken.add(old)

    def cones(self, edges: object) -> tuple[list[int], list[int]]:
        """Return a hash for every item of both sides, of its label and of all items that its edges lead to."""
        numbers: dict[Hashable, int] = {}  # equal structures have equal numbers
        out: tuple[list[int], list[int]] = ([], [])
        for items, made in zip((self.before, self.after), out, strict=True):
            leads = edges(items)  # type: ignore[operator]
            made.extend([0] * len(items))
            for at in range(len(items)) if edges is _operands else reversed(range(len(items))):
                shape = (items[at].label, *(made[other] for other in leads[at]))
                made[at] = numbers.setdefault(shape, len(numbers))
        return out

    def anchor(self, before: Sequence[Hashable], after: Sequence[Hashable]) -> None:
        """Pair two items whose token no other unmatched item of their side has."""
        old = dict(_unique((t, at) for at, t in enumerate(before) if at not in self.taken))
        for token, new in _unique((t, at) for at, t in enumerate(after) if at not in self.pairs):
            if token in old:
                self.pair(old[token], new)

    def propagate(self) -> None:
        """Follow the edges from every pair: operand by operand, and reader by reader if only one of its kind exists."""
        readers = _readers(self.before), _readers(self.after)
        work = list(self.pairs.items())
        while work:
            new, old = work.pop()
            sides: list[tuple[Iterable[int], Iterable[int]]] = []
            if len(self.before[old].operands) == len(self.after[new].operands):
                sides.append((self.before[old].operands, self.after[new].operands))
            ours = dict(_unique((self._slot(self.after, at, new), at) for at in readers[1][new]))
            theirs = dict(_unique((self._slot(self.before, at, old), at) for at in readers[0][old]))
            both = [slot for slot in theirs if slot in ours]
            sides.append(([theirs[slot] for slot in both], [ours[slot] for slot in both]))
            for olds, news in sides:
                for o, n in zip(olds, news, strict=True):
                    free = n not in self.pairs and o not in self.taken
                    if free and self.before[o].label == self.after[n].label and self._modules_agree(o, n):
                        self.pair(o, n)
                        work.append((n, o))

    def _slot(self, items: Sequence[Item], reader: int, operand: int) -> tuple[str, tuple[int, ...]]:
        places = tuple(i for i, at in enumerate(items[reader].operands) if at == operand)
        return items[reader].label, places

    def _modules_agree(self, old: int, new: int) -> bool:
        """Say whether two items lie in modules of the same name, apart from numbers."""
        return _NUMBER.sub("*", self.before[old].module) == _NUMBER.sub("*", self.after[new].module)

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


def _unique(found: Iterable[tuple[Hashable, int]]) -> Iterable[tuple[Hashable, int]]:
    """Yield the items whose token no other item has."""
    once: dict[Hashable, int | None] = {}
    for token, at in found:
        once[token] = None if token in once else at
    return ((token, at) for token, at in once.items() if at is not None)
