"""Guard the sizes 1 and 0 where a model computes something else for them.

The exporter takes every dynamic size for at least 2, and leaves no trace of a branch that this decides, such as
`if x.shape[1] > 1`. So the graph is tried against the model on the example inputs cut down to those sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .call import CallSpec
from .tensors import same

_EQUAL = re.compile(r"args\[(\d+)\]\.size\(\)\[(\d+)\] == args\[(\d+)\]\.size\(\)\[(\d+)\]")
Dimension = tuple[int, int]  # which tensor, which of its dimensions


def guards_of_small_sizes(call: CallSpec, tensors: Sequence[Any], differs: Callable[[list[Any]], bool]) -> list[str]:
    """Return the guards that a graph needs, beside those it has.

    Args:
        call: of the graph.
        tensors: the example's.
        differs: says whether the graph gives something else than the model for tensors such as these.
    """
    if call.in_spec is None:
        return []
    holds, out = call.guard_function(), []
    for dimensions in _dimensions(call):
        if any(tensors[i].shape[d] < 2 for i, d in dimensions):
            continue
        for size in (1, 0):
            cut = [_cut(t, {d for i, d in dimensions if i == at}, size) for at, t in enumerate(tensors)]
            if _hold(holds, cut) and differs(cut):
                tensor, dimension = dimensions[0]
                out.append(f"args[{tensor}].size()[{dimension}] >= {size + 1}")
                break
    return out


def _hold(guards: Callable[..., list[bool]] | None, tensors: list[Any]) -> bool:
    try:
        return guards is None or False not in guards(*tensors)
    except ZeroDivisionError:  # in a guard on divisibility
        return False


def _dimensions(call: CallSpec) -> Iterator[list[Dimension]]:
    """Yield the dynamic dimensions of the inputs, those together that must be equal."""
    leaves = [leaf for leaf in call.leaves if leaf.tensor]
    free = [
        (i, d) for i, leaf in enumerate(leaves) for d in range(leaf.ndim or 0) if d not in {d for d, _ in leaf.static}
    ]
    equal: dict[Dimension, Dimension] = {}
    for guard in call.guards:
        if found := _EQUAL.fullmatch(guard):
            a, b, c, d = map(int, found.groups())
            equal[c, d] = (a, b)
    groups: dict[Dimension, list[Dimension]] = {}
    for dimension in free:
        groups.setdefault(equal.get(dimension, dimension), []).append(dimension)
    return iter(groups.values())


def _cut(tensor: Any, dimensions: set[int], size: int) -> Any:
    for dimension in dimensions:
        tensor = tensor.narrow(dimension, 0, size)
    return tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor


def all_same(expected: Sequence[Any], got: Sequence[Any]) -> bool:
    """Say whether two calls gave the same leaves, bit for bit."""
    return len(expected) == len(got) and all(
        same(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else type(a) is type(b)
        for a, b in zip(expected, got, strict=True)
    )
