"""The numbers that calls combine with values, and the questions that rules ask of them.

A number is a constant, or a node that carries one: Dynamo makes an input of a float that it sees for the second time.
Of a constant the answer is known. Of an input the comparison is evaluated on its symbol while Dynamo collects guards:
another graph is captured where an answer changes, and not where the number does. Where nothing would guard an answer,
as of what `.item()` gives or of a size of an exported graph, it is the one by which nothing is rounded.

A mask filled with `finfo(float32).min` becomes one filled with the low dtype's own; a node with any other number out of
range stays FP32. FP32's minimum is out of range for BF16 too: rounding it gives -inf. A number too small, such as an
eps that FP16 rounds to zero, keeps its node FP32 from O2 on.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from .._torch import SYMBOLS, example_of, is_guarded, is_known, varies
from . import ops
from .table.row import Rule

Number: TypeAlias = "float | Node"
FP32_MAX = torch.finfo(torch.float32).max
_LARGEST = torch.finfo(torch.float64).max  # beyond it is infinity alone


def numbers(node: Node) -> Iterator[Number]:
    """Yield the finite numbers that a call combines with values: floats, and integers given as a Scalar."""
    schema = ops.schema_of(node) if node.op.startswith("call") else None
    kinds = ("number", "Scalar", "Optional[number]", "Tensor")  # a number given as a tensor is combined with values too
    scalars = {a.name for a in schema.arguments if str(a.type) in kinds} if schema is not None else set()
    names = ops.names_of(node)
    arguments = [(names[i] if i < len(names) else "", a) for i, a in enumerate(node.args)] + [*node.kwargs.items()]
    defaults = _defaults(node.target) if node.op == "call_function" else ()
    for name, arg in (*arguments, *((n, d) for n, d in defaults if n not in dict(arguments))):
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            number = value_of(item)
            whole = isinstance(number, (int, torch.SymInt)) and not isinstance(number, bool) and name in scalars
            infinite = isinstance(number, float) and not math.isfinite(number)
            if (whole or isinstance(number, (float, torch.SymFloat))) and not infinite:
                yield item


@functools.lru_cache(maxsize=4096)
def _defaults(target: Any) -> tuple[tuple[str, float], ...]:
    """Return the default values of a Python function that are floats, such as an eps, with their names."""
    if not inspect.isfunction(target):
        return ()
    parameters = inspect.signature(target).parameters.values()
    return tuple((p.name, p.default) for p in parameters if isinstance(p.default, float))


def value_of(argument: Any) -> Any:
    """Return the number or symbol that a node among the arguments of a call carries; other arguments as they are."""
    return argument.meta["val"] if isinstance(argument, Node) and ops.is_number(argument) else argument


def constant_of(node: Node) -> Any:
    """Return the number that a node carries in every call of its graph, as where a guard has fixed it; else None."""
    number = node.meta.get("val") if ops.carries_number(node) else None
    if isinstance(number, SYMBOLS):
        return None if varies(number) else example_of(number)
    return number if isinstance(number, (int, float)) else None


# The questions.


def _answer(condition: bool | torch.SymBool, otherwise: bool) -> bool:
    """Say whether a comparison holds; the answer becomes a guard, and is `otherwise` where nothing can guard it."""
    if isinstance(condition, bool):
        return condition
    return bool(condition) if is_guarded(condition) else is_known(condition, otherwise)


def is_open(number: Number) -> bool:
    """Say whether a number may be any in a later call of the graph, since nothing guards what is asked of it here."""
    value = value_of(number)
    return isinstance(value, SYMBOLS) and varies(value) and not is_guarded(value)


def equals(number: Any, constant: float) -> bool:
    """Say whether a number is this one. Only a yes is guarded: what is done after a no must hold for every number."""
    value = value_of(number)
    if isinstance(value, (int, float)):
        return value == constant
    if not isinstance(value, (torch.SymInt, torch.SymFloat)):
        return False
    same = value == constant
    return _answer(same, False) if not is_guarded(value) or example_of(value) == constant else False


def is_negative(number: Any) -> bool:
    """Say whether an argument is a number below zero."""
    value = value_of(number)
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and _answer(value < 0, True)


def is_extreme(number: Number, low: torch.dtype) -> bool:
    """Say whether a number is out of the low dtype's range; infinity counts as in range."""
    size, largest = abs(value_of(number)), torch.finfo(low).max
    if isinstance(size, torch.SymInt):
        return _answer(size > int(largest), True)
    return _answer(size > largest, True) and _answer(size <= _LARGEST, True)


def is_lowest(number: Number) -> bool:
    """Say whether a number is the smallest or the largest of FP32."""
    return equals(number, -FP32_MAX) or equals(number, FP32_MAX)


def is_exact(number: Number, low: torch.dtype) -> bool:
    """Say whether a dtype represents a number exactly. Only a yes is guarded."""
    value = value_of(number)
    if isinstance(value, (int, float)):
        return torch.tensor(value, dtype=low).item() == value
    if not is_guarded(value):
        return False
    example, whole = example_of(value), int(2 / torch.finfo(low).eps)  # all integers up to this one are exact
    if example == round(example) and abs(example) <= whole:
        return _answer(value == math.floor(value), False) and _answer(abs(value) <= whole, False)
    return torch.tensor(example, dtype=low).item() == example and equals(number, example)


def has_tiny(row: Rule, literals: Iterable[Number], low: torch.dtype) -> bool:
    """Say whether an op combines a value with a number that low rounds to zero, or a bound that it rounds to one."""
    if row.holds_eps:
        return False
    values = [value_of(number) for number in literals]
    bounds = values if row.limits == "bounds" else [1 - x for x in values] if row.limits == "from_one" else []
    return any(_is_tiny(x, low) for x in values) or any(_rounds_to_one(x, low) for x in bounds)


def _is_tiny(value: Any, low: torch.dtype) -> bool:
    info = torch.finfo(low)
    if isinstance(value, (int, torch.SymInt)):
        return False
    return _answer(abs(value) < info.smallest_normal * info.eps, True) and not equals(value, 0)


def _rounds_to_one(value: Any, low: torch.dtype) -> bool:
    eps, size = torch.finfo(low).eps, abs(value)
    near = _answer(size >= 1 - eps / 4, True) and _answer(size <= 1 + eps / 2, True)
    return near and not equals(size, 1)


def within(numbers: Iterable[Number], bound: Number, *, inverse: bool = False) -> bool:
    """Say whether no number is larger than a bound, signs aside, or than the inverse of one."""
    sizes, largest = [abs(value_of(number)) for number in numbers], abs(value_of(bound))
    return all(_answer(size * largest <= 1 if inverse else size <= largest, False) for size in sizes)


def mend(values: Iterable[Number], low: torch.dtype) -> tuple[tuple[Number, float], ...] | None:
    """Return (old, new) for each number that has to be replaced; None if one has no counterpart in the low dtype."""
    out = []
    for x in values:
        if not is_extreme(x, low):
            continue
        if not is_lowest(x):
            return None
        out.append((x, math.copysign(torch.finfo(low).max, example_of(value_of(x)))))
    return tuple(out)
