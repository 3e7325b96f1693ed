"""Python numbers that the low dtype cannot hold.

A mask filled with `finfo(float32).min` becomes one filled with the low dtype's own; a node with any other number out of
range stays FP32. FP32's minimum is out of range for BF16 too: rounding it gives -inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from . import ops

_FP32_MAX = torch.finfo(torch.float32).max


def numbers(node: Node) -> Iterator[float]:
    """Yield the finite numbers among a call's arguments that meet a value: floats, and integers given as a Scalar."""
    scalars = _scalar_arguments(node)
    names = ops.arg_names(node.target) if node.op == "call_function" else ()
    placed = [(names[i] if i < len(names) else "", a) for i, a in enumerate(node.args)]
    for name, arg in (*placed, *node.kwargs.items()):
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            counts = isinstance(item, float) or (
                isinstance(item, int) and not isinstance(item, bool) and name in scalars
            )
            if counts and math.isfinite(item):
                yield item


def _scalar_arguments(node: Node) -> frozenset[str]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return frozenset()
    kinds = ("number", "Scalar", "Optional[number]")
    return frozenset(a.name for a in node.target._schema.arguments if str(a.type) in kinds)


def is_extreme(node: Node, low: torch.dtype) -> bool:
    """Say whether a call has a number that the low dtype cannot hold."""
    return any(abs(x) > torch.finfo(low).max for x in numbers(node))


def mend(node: Node, low: torch.dtype) -> tuple[tuple[float, float], ...] | None:
    """Return (old, new) for the numbers to replace so that all fit; None when one has no counterpart that does."""
    out = []
    for x in numbers(node):
        if abs(x) <= torch.finfo(low).max:
            continue
        if abs(x) != _FP32_MAX:
            return None
        out.append((x, math.copysign(torch.finfo(low).max, x)))
    return tuple(out)


def replace_numbers(node: Node, pairs: tuple[tuple[float, float], ...]) -> None:
    """Write the new numbers into a call."""
    new = dict(pairs)

    def replace(a: Any) -> Any:
        if isinstance(a, (list, tuple)):
            return type(a)(replace(x) for x in a)
        return new.get(a, a) if isinstance(a, float) else a

    node.args = tuple(replace(a) for a in node.args)
    node.kwargs = {k: replace(a) for k, a in node.kwargs.items()}
