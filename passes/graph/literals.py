"""Python numbers that the low dtype cannot hold.

A mask filled with `finfo(float32).min` becomes one filled with the low dtype's own; a node with any other number out of
range stays FP32. FP32's minimum is out of range for BF16 too: rounding it gives -inf. A number too small, such as an
eps that FP16 rounds to zero, keeps its node FP32 from O2 on.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node

from ..ops import ops
from ..ops.rules import Rule

FP32_MAX = torch.finfo(torch.float32).max


def numbers(node: Node) -> Iterator[float]:
    """Yield the finite numbers that a call combines with values: floats, and integers given as a Scalar."""
    schema = ops.schema_of(node) if node.op.startswith("call") else None
    kinds = ("number", "Scalar", "Optional[number]", "Tensor")  # a number given as a tensor is combined with values too
    scalars = {a.name for a in schema.arguments if str(a.type) in kinds} if schema is not None else set()
    names = ops.names_of(node)
    arguments = [(names[i] if i < len(names) else "", a) for i, a in enumerate(node.args)] + [*node.kwargs.items()]
    defaults = _defaults(node.target) if node.op == "call_function" else ()
    for name, arg in (*arguments, *((n, d) for n, d in defaults if n not in dict(arguments))):
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            whole = isinstance(item, int) and not isinstance(item, bool) and name in scalars
            if (whole or isinstance(item, float)) and math.isfinite(item):
                yield item


@functools.lru_cache(maxsize=4096)
def _defaults(target: Any) -> tuple[tuple[str, float], ...]:
    """Return the default values of a Python function that are floats, such as an eps, with their names."""
    if not inspect.isfunction(target):
        return ()
    parameters = inspect.signature(target).parameters.values()
    return tuple((p.name, p.default) for p in parameters if isinstance(p.default, float))


def is_extreme(number: float, low: torch.dtype) -> bool:
    """Say whether a number is out of the low dtype's range; infinity counts as in range."""
    return math.isfinite(number) and abs(number) > torch.finfo(low).max


def has_tiny(row: Rule, literals: Iterable[float], low: torch.dtype) -> bool:
    """Say whether an op combines a value with a number that is too fine for the low dtype.

    These are numbers that it rounds to zero, and bounds that it rounds to one, after which logarithms are infinite.
    """
    if row.holds_eps:
        return False
    info, values = torch.finfo(low), list(literals)
    bounds = values if row.limits == "bounds" else [1 - x for x in values] if row.limits == "from_one" else []
    if any(0 < abs(x) < info.smallest_normal * info.eps for x in values):
        return True
    return any(abs(x) != 1 and abs(torch.tensor(x, dtype=low).item()) == 1 for x in bounds)


def mend(values: Iterable[float], low: torch.dtype) -> tuple[tuple[float, float], ...] | None:
    """Return (old, new) for each number that has to be replaced; None if one has no counterpart in the low dtype."""
    out = []
    for x in values:
        if not is_extreme(x, low):
            continue
        if abs(x) != FP32_MAX:
            return None
        out.append((x, math.copysign(torch.finfo(low).max, x)))
    return tuple(out)
