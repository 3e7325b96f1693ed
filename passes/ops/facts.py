"""Measured facts: how an op behaves in low on a device, read from `facts_<device>.json`.

`reports/measure_facts.py` writes those files. A fact holds for (op, device, low dtype, static arguments) on the kind of
machine that it was measured on; on another one it is assumed. Where a device has no file, those of the CPU are assumed.

Key in the file: "softmax[dim=last]", with the static arguments that matter; value: the facts that hold, by low dtype.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from .._torch import OpOverload
from ..contract.devices import DEVICES
from ..contract.policy import dtype_name
from . import ops
from .numbers import equals
from .rules import COMPOSITE, LOW, Rule, lookup, row_named, row_of


@dataclass(frozen=True)
class Facts:
    """The facts about one op in one low dtype."""

    # `low(op(float(x))) == op(x)` for low x, bit for bit: it computes in FP32 and rounds once
    fp32_internal: bool = False
    # The same for the gradient of x: if that is a sum, it is summed in FP32 and rounded once.
    fp32_backward: bool = False
    rounds_once: bool = False  # its error against float64 is at most 1.5 times that of the correctly rounded result
    # Its errors cancel in the mean of a row as roundings do: that mean is at most 3 times that of the correctly rounded
    # result. Where a kernel rounds a sum over the row, all its elements share the error.
    scatters: bool = False
    commutes_forward: bool = False  # `op(low(x)) == low(op(x))` for FP32 x
    commutes_backward: bool = False  # the same for the gradient of x
    # The gradient of an operand that it reads many times, such as a gain, a bias or a row of a table, is summed in low:
    # its error grows as the root of how many times that is. Measured on a CPU alone.
    sums_low: bool = False
    status: str = "assumed"  # "measured" on this kind of machine, or "assumed"


NAMES = tuple(f.name for f in fields(Facts) if f.name != "status")


@dataclass(frozen=True)
class Machine:
    """The properties of a machine that decide whether its facts hold on another."""

    device: str
    capability: str
    torch: str

    def __str__(self) -> str:
        return f"{self.device} {self.capability or '(absent)'}, torch {self.torch}"

    @classmethod
    def parse(cls, text: str) -> Machine | None:
        """Parse the string form of a machine; return None for any other text."""
        match = re.fullmatch(r"(\w+) ([^,]+), torch (\S+)", text)
        return cls(match[1], match[2].replace("(absent)", ""), match[3]) if match else None


_instead: ContextVar[Machine | None] = ContextVar("machine", default=None)


@contextlib.contextmanager
def as_on(machine: Machine | None) -> Iterator[None]:
    """Inside this context, use the facts of another machine for its device; None for this machine."""
    token = _instead.set(machine)
    try:
        yield
    finally:
        _instead.reset(token)


def this_machine(device: str) -> Machine:
    """Return the description of this machine for a device; capability "" if it has no such device."""
    instead = _instead.get()
    if instead is not None and instead.device == device:
        return instead
    version = ".".join(torch.__version__.split(".")[:2])
    known = DEVICES[device]
    return Machine(device, known.capability() if known.is_here() else "", version)


def facts(name: str, device: str, low: torch.dtype, **static: Any) -> Facts:
    """Return the facts of an op by its name, or an in-place one's, for static arguments such as `dim="last"`.

    If they are not given, or were not measured, only facts that hold for all measured variants are returned.
    """
    row = row_named(name)
    base = row.name if row.known else name
    table, on = _table(device)
    variants = {key: set(by_low.get(dtype_name(low), ())) for key, by_low in table.get(base, {}).items()}
    wanted = static_key({k: static[k] for k in _measured(base, device) if k in static})
    if not variants:
        return Facts(commutes_forward=row.commutes != "", commutes_backward=row.commutes == "both")
    names = variants[wanted] if wanted in variants else set.intersection(*variants.values())
    status = "measured" if wanted in variants and on == this_machine(device) else "assumed"
    return Facts(**dict.fromkeys(names, True), status=status)


def facts_of(node: Node, device: str, low: torch.dtype) -> Facts:
    """Return the facts of a node's op for the static arguments of the call."""
    name = ops.name(node)
    return facts(name, device, low, **_static_arguments(node, _measured(name.removesuffix("_"), device)))


def rule_of(node: Node, device: str, low: torch.dtype | None = None) -> tuple[Rule, str]:
    """Return the row of a call's op and its kind on a device, which may depend on the call's arguments."""
    row, kind = lookup(ops.name(node), device, low)
    composite = kind == LOW and DEVICES[device].lists in row.unprojected and ops.is_projected(node)
    return row, COMPOSITE if composite else kind


def absorbs_cast(node: Node, device: str) -> bool:
    """Say whether a call can take `dtype=float32` instead of a cast of its operand on a device."""
    row, names, given = row_of(node), ops.names_of(node), len(node.args)
    # A function or a method takes it in every form; of the overloads of a norm some do not.
    takes = "dtype" in names[given:] if isinstance(node.target, OpOverload) else "dtype" not in names[:given]
    listed = DEVICES[device].lists in row.absorbs_cast and not lacks_low(node, row, device)
    return listed and takes and ops.argument(node, "dtype") is None


def lacks_low(node: Node, row: Rule, device: str) -> bool:
    """Say whether a device has no low kernel for an op, or for these arguments of it."""
    return DEVICES[device].lists in row.no_low or _has(node, row.no_low_for)


def accumulates(node: Node, row: Rule) -> bool:
    """Say whether a write sums or multiplies many values into one; it then counts as a sum."""
    return row.accumulates == ("",) or _has(node, row.accumulates)


def _has(node: Node, column: tuple[Any, ...]) -> bool:
    """Say whether an argument has a value that a column lists: (name of the argument, value, value, ...)."""
    value = ops.argument(node, column[0]) if column else None
    if isinstance(value, (bool, str)):
        return value in column[1:]
    return any(equals(value, number) for number in column[1:] if isinstance(number, (int, float)))


@functools.cache
def _measured(name: str, device: str) -> dict[str, tuple[str, ...]]:
    """Return the static arguments that the facts of an op are keyed by, each with the values that were measured."""
    keys = _table(device)[0].get(name, {})
    pairs = sorted({part.partition("=")[::2] for key in keys for part in key.split(",") if part})
    return {key: tuple(value for k, value in pairs if k == key) for key, _ in pairs}


def static_key(static: dict[str, Any]) -> str:
    """Return the key of static arguments: "dim=last,ord=2"."""
    # One spelling of equal numbers: 2 and 2.0 are "2".
    plain = {k: f"{v:g}" if isinstance(v, (int, float)) and not isinstance(v, bool) else v for k, v in static.items()}
    return ",".join(f"{k}={v}" for k, v in sorted(plain.items()))


def dim_class(dims: Any, rank: int) -> str:
    """Classify the dimensions that a reduction runs over, as its kernels do: "all", "last" or "other"."""
    if dims is None or dims in ([], ()):
        return "all"
    positions = {d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])} if rank else set()
    if len(positions) == rank:
        return "all" if rank > 1 or isinstance(dims, (list, tuple)) else "last"
    return "last" if positions == {rank - 1} else "other"


REDUCTIONS = ("none", "mean", "sum")  # as torch::Reduction numbers them


def _static_arguments(node: Node, names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return a call's static arguments of these names that are words, or numbers that are known or were measured."""
    arguments: dict[str, Any] = {}
    schema = ops.schema_of(node) if names else None
    defaults = {a.name: a.default_value for a in schema.arguments} if schema else {}
    for key in names:
        value = ops.argument(node, key, defaults.get(key))
        if key == "dim":
            operand = next((o.node for o in ops.operands(node)), None)
            shape = getattr(operand.meta.get("val"), "shape", None) if operand else None
            if shape is None or isinstance(value, Node):
                continue
            value = dim_class(value, len(shape))
        if key == "reduction" and isinstance(value, int) and value in range(len(REDUCTIONS)):
            value = REDUCTIONS[value]
        if isinstance(value, Node):
            value = _equal(value, names[key])
        if isinstance(value, (bool, int, float, str)):
            arguments[key] = value
    return arguments


def _equal(number: Node, measured: Sequence[str]) -> str | None:
    """Return the measured value that a number equals; None if there is none."""
    for text in measured:
        with contextlib.suppress(ValueError):  # a word
            if equals(number, float(text)):
                return text
    return None


@functools.cache
def _table(device: str) -> tuple[dict[str, dict[str, dict[str, list[str]]]], Machine]:
    """Return op -> static key -> low dtype -> facts, and the kind of machine that they were measured on."""
    path = Path(__file__).with_name(f"facts_{device}.json")
    data = json.loads((path if path.exists() else path.with_name("facts_cpu.json")).read_text())
    table: dict[str, dict[str, dict[str, list[str]]]] = {}
    for key, by_dtype in data["facts"].items():
        name, _, static = key.rstrip("]").partition("[")
        table.setdefault(name, {})[static] = by_dtype
    return table, Machine(**data["machine"])
