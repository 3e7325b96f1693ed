"""The longest common subsequence of two sequences, and the longest rising subsequence of pairs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

_EDITS = 1_000  # most insertions and removals that are looked for; sequences with more count as unrelated


def common(before: Sequence[Hashable], after: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return the places of the longest common subsequence, by Myers' algorithm; none if too many edits lie between."""
    n, m = len(before), len(after)
    if not n or not m:
        return []
    reach = {1: 0}
    trail: list[dict[int, int]] = []
    for edits in range(min(n + m, _EDITS) + 1):
        trail.append(dict(reach))
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and reach.get(k - 1, -1) < reach.get(k + 1, -1))
            x = reach.get(k + 1, 0) if down else reach[k - 1] + 1
            while x < n and x - k < m and before[x] == after[x - k]:
                x += 1
            reach[k] = x
            if x >= n and x - k >= m:
                return _walked_back(trail, n, m)
    return []


def _walked_back(trail: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    pairs = []
    for edits in reversed(range(len(trail))):
        reach, k = trail[edits], x - y
        down = k == -edits or (k != edits and reach.get(k - 1, -1) < reach.get(k + 1, -1))
        from_k = k + 1 if down else k - 1
        from_x = reach.get(from_k, 0)
        while edits and x > from_x + (not down) and y > from_x - from_k + down:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        if not edits:
            while x > 0 and y > 0:
                x, y = x - 1, y - 1
                pairs.append((x, y))
            break
        x, y = from_x, from_x - from_k
    return pairs[::-1]


def in_order(pairs: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the largest set of pairs whose first and second places both rise: all other pairs have moved."""
    ends: list[int] = []  # the pair at the end of the best rising run of each length
    previous: list[int | None] = []
    for at, (_, place) in enumerate(pairs):
        low, high = 0, len(ends)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if pairs[ends[middle]][1] < place else (low, middle)
        previous.append(ends[low - 1] if low else None)
        ends[low : low + 1] = [at]
    kept, last = set(), ends[-1] if ends else None
    while last is not None:
        kept.add(pairs[last])
        last = previous[last]
    return kept
