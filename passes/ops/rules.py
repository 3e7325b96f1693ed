"""The rows of all ops by name, those that torch's own registrations and users add, and how they are looked up.

The rows are in `table`, a file a kind of op; `table/row.py` says what each column means. Names are those of ATen
operators without their overload ("softmax" for aten.softmax.int). An in-place form shares the row of its base.

`torch.autocast` is the source of the kinds: its lists are in the dispatcher, and a test compares. An op that calls a
listed op internally gets the kind of its overall effect; if that depends on shapes or arguments, it is a `composite`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from .._torch import OpOverload, OpOverloadPacket, autocast_registrations, registered_autocast_dtype
from ..contract.devices import DEVICES
from ..contract.errors import PolicyError
from ..contract.policy import nearest
from . import ops
from .table import elementwise, images, linalg, moves, products, queries, reductions
from .table.row import BANNED as BANNED
from .table.row import COMPOSITE as COMPOSITE
from .table.row import FOLLOW as FOLLOW
from .table.row import FP32 as FP32
from .table.row import HIGHER_ORDER, KIND_NAMES, UNKNOWN, UNKNOWN_HIGHER_ORDER, Kinds
from .table.row import KEEP as KEEP
from .table.row import LOW as LOW
from .table.row import PROMOTE as PROMOTE
from .table.row import Rule as Rule

_FILES = (products, reductions, elementwise, images, linalg, moves, queries)
ROWS = tuple(row for file in _FILES for row in file.ROWS)
RULES: Mapping[str, Rule] = {row.name: row for row in ROWS}
_ALL = {**RULES, **{row.name: row for row in (*queries.QUERIES, *queries.HIGHER_ORDER)}}

# Rules of custom ops, which their users register. The one state of this module, and only `register_rule` writes it.
_custom: dict[str, Rule] = {}


def row_named(name: str) -> Rule:
    """Return the row of an op, an in-place name giving that of its base; a row that is not `known` if it has none."""
    return _ALL.get(name) or _custom.get(name) or _ALL.get(name.removesuffix("_")) or _unknown(name)


def _unknown(name: str) -> Rule:
    return UNKNOWN_HIGHER_ORDER if name.startswith(HIGHER_ORDER) else UNKNOWN


def row_of(node: Node) -> Rule:
    """Return the row of a call's op, as `row_named` does."""
    view = ops.view_of(node)
    row: Rule | None = view.row
    if row is None:
        row = row_named(ops.name(node))
        view.row = row if row.known or not node.op.startswith("call") else None  # its rule may yet be registered
    return row


def is_registered(name: str) -> bool:
    """Say whether a user registered the rule of an op."""
    return name in _custom


def lookup(name: str, device: str, low: torch.dtype | None = None) -> tuple[Rule, str]:
    """Return the row of an op and its kind on a device; unknown ops are kept, and one registered for another `low`."""
    row = row_named(name)
    if not row.known:
        row = ("::" in name and _from_register_autocast(name, device, low)) or replace(row, name=name)
    kind = row.kind(device)
    listed = is_of_this_torch(row) and row.name not in _unlisted(device)  # else this torch casts nothing there
    return row, kind if listed or kind not in (LOW, FP32, BANNED) else PROMOTE


def is_of_this_torch(row: Rule) -> bool:
    """Say whether this release of torch has the op of a row, and has it on the lists that the row says."""
    return _version(row.since or "0") <= _version(torch.__version__) < _version(row.until or "9")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


@functools.cache
def _unlisted(device: str) -> frozenset[str]:
    """Return the ATen ops on the autocast lists that a device shares but not registered for the device itself."""
    row = DEVICES[device]
    own, shared = (
        {n.removeprefix("aten::").partition(".")[0] for n in autocast_registrations(d) if n.startswith("aten::")}
        for d in (device, row.lists)
    )
    if not own:
        raise PolicyError(
            f"device={device}: torch {torch.__version__} has no autocast lists for this device, so nothing is known of "
            "what it runs low; use a release of torch that has them, or plan for another device"
        )
    return frozenset(shared - own - row.kinds.keys())


class Table(tuple[Rule, ...]):
    """Rows of the table, in order; prints as one line a row."""

    __slots__ = ()

    def __str__(self) -> str:
        """Write name, kinds and reason of every row."""
        width = max((len(r.name) for r in self), default=0)
        kinds = max(map(len, KIND_NAMES))
        return "\n".join(f"{r.name:{width}}  cpu: {r.cpu:{kinds}}  cuda: {r.cuda:{kinds}}  {r.reason}" for r in self)


def rules() -> Table:
    """Return every row of the op table, custom ops last. `print` writes one line for each row.

    Example:
        >>> {rule.name: (rule.cpu, rule.cuda) for rule in fxamp.rules()}["softmax"]
        ('follow', 'fp32')
    """
    return Table((*RULES.values(), *_custom.values()))


def register_rule(op: Any, kind: str, **facts: Any) -> Rule:
    """Register the rule of a custom op, for all devices and for this process.

    An op that is registered with PyTorch's `register_autocast` needs no rule here.

    Args:
        op: The op or its name: `torch.ops.my_lib.my_op`, an overload of it, or "my_lib::my_op".
        kind: The dtype that the op runs in: "low", "fp32", "promote" (the widest dtype of its operands), "follow" (the
            dtype of its operand) or "keep" (the dtypes that its operands have before conversion).
        **facts: Columns of the table, such as `sensitive="range"`, `same_dtype=True`, or `cuda=` for its kind on CUDA.

    Returns:
        The row of the table.

    Raises:
        PolicyError: The kind or a fact is unknown, the op is torch's own, or it was registered before with other facts.

    Example:
        >>> rule = fxamp.register_rule("my_lib::attention", "low", same_dtype=True)
        >>> rule.name, rule.cpu, rule.cuda
        ('my_lib::attention', 'low', 'low')
    """
    name = _op_name(op)
    where = f"register_rule({name!r})"
    if name in RULES:
        raise PolicyError(f"{where}: torch's own op has a rule; override it with Policy(ops={{{name!r}: ...}})")
    kinds = [k for k in KIND_NAMES if k not in (BANNED, COMPOSITE)]
    for word in (kind, facts.get("cuda", kind)):
        if word not in kinds:
            raise PolicyError(f"{where}: {word!r} is not a kind{nearest(word, kinds)}; one of {', '.join(kinds)}")
    for fact, value in facts.items():
        _check_fact(where, fact, value)
    by_device = Kinds(kind, **({"cuda": facts.pop("cuda")} if "cuda" in facts else {}))
    plain: dict[str, Any] = {fact: tuple(value) if isinstance(value, list) else value for fact, value in facts.items()}
    new = replace(Rule(name, by_device, "registered by the user", higher_order=_unknown(name).higher_order), **plain)
    before = _custom.setdefault(name, new)
    if before != new:
        values = new.columns()
        other = ", ".join(f"{k}={value!r}" for k, value in before.columns().items() if value != values[k])
        raise PolicyError(f"{where}: it was registered before with {other}; register it once, or start a new process")
    return new


_WORDS = {"sensitive": ("", "range", "rounding"), "commutes": ("", "forward", "both")}


def _check_fact(where: str, fact: str, value: Any) -> None:
    """Raise unless `fact` is a field of `Rule` that can hold `value`."""
    known = [name for name in UNKNOWN.columns() if name not in ("name", "cpu", "known")]
    if fact not in known:
        raise PolicyError(f"{where}: there is no fact {fact!r}{nearest(fact, known)}")
    wanted = type(getattr(UNKNOWN, fact))
    if not isinstance(value, (list, tuple) if wanted is tuple else wanted):
        raise PolicyError(f"{where}: {fact}= takes a {wanted.__name__}, not {value!r}")
    words = _WORDS.get(fact)
    if words and value not in words:
        raise PolicyError(
            f"{where}: {fact}={value!r}{nearest(str(value), words)}; one of {', '.join(map(repr, words))}"
        )


def _op_name(op: Any) -> str:
    """Return "namespace::op" for an op in any of its forms, the bare name for an op of ATen."""
    if isinstance(op, (OpOverload, OpOverloadPacket)):
        return ops.of_target(op)
    op = op if isinstance(op, str) else getattr(op, "_qualname", op)  # what `custom_op` of PyTorch returns
    if not isinstance(op, str):
        raise PolicyError(f"register_rule: {op!r} is not an operator; give torch.ops.my_lib.my_op or 'my_lib::my_op'")
    return op.removeprefix("aten::")


def _from_register_autocast(name: str, device: str, low: torch.dtype | None) -> Rule | None:
    """Return the rule that `register_autocast` of PyTorch gave a custom op, or None."""
    if name not in autocast_registrations(device):
        return None
    dtype = registered_autocast_dtype(name, device)
    if dtype is None:
        return Rule(name, Kinds(KEEP), "it has an autocast kernel of its own, which cannot be read")
    reason = f"registered for autocast: {dtype}"
    if dtype == torch.float32:
        return Rule(name, Kinds(FP32), reason)
    if dtype in (torch.float16, torch.bfloat16) and low in (None, dtype):
        return Rule(name, Kinds(LOW), reason)
    return Rule(name, Kinds(KEEP), f"{reason}, which this conversion does not use")
