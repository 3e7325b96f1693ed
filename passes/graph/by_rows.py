"""Output dtypes of a graph without shapes: only from the rows of its ops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from .._torch import SET_GRAD, enter_autocast, exit_autocast
from ..ops import ops
from ..ops.rules import COMPOSITE, KEEP, Rule, row_of
from ..runtime import rnn
from ..runtime.regions import grad_mode
from .values import (
    ANY,
    COMPLEX,
    Dtypes,
    Unknown,
    ValueDtype,
    dtype_reference,
    dtypes_of,
    is_complex,
    is_floating,
    literal_dtype,
)  # fmt: skip


def original_dtypes(graph: Graph, attribute: Callable[[str], Any]) -> Dtypes:
    """Return the dtype of every value of the graph as captured: a dtype, a tuple of them, None, or ANY.

    `attribute` resolves the target of a get_attr.
    """
    infer = SymbolicInference()
    out: Dtypes = {}
    for node in graph.nodes:
        if node.op == "output":
            out[node] = None
        elif "val" in node.meta:
            out[node] = dtypes_of(node.meta["val"])
        elif node.op == "get_attr":
            out[node] = dtypes_of(attribute(str(node.target)))
        elif node.op == "placeholder":
            out[node] = ANY
        else:
            out[node] = infer(node, out.__getitem__)
    return out


class SymbolicInference:
    """Output dtypes without shapes, only from the rules. An answer is always right; ANY means that there is none.

    A list of unknown length whose elements have one dtype is written as a tuple of one item.
    """

    def __call__(self, node: Node, dtype_of: Callable[[Node], ValueDtype]) -> ValueDtype:
        """Return the dtypes of the node's output when its operands have the given dtypes."""
        name = ops.name(node)
        if row_of(node).asks == "item":
            return _item(dtype_of(node.args[0]), node.args[1])  # type: ignore[arg-type]
        if not row_of(node).out or node.target in SWITCHES:
            return None
        reference = dtype_reference(node)
        if reference is not None:
            return dtype_of(reference)
        given = [(o.name, dtype_of(o.node)) for o in ops.operands(node)]
        if "out" in node.kwargs:
            return _only([d for n, d in given if n == "out"])
        literal = literal_dtype(node)
        if literal is not None:
            return literal
        first: Any = node.args[0] if node.args else None
        if name.startswith("_foreach_") and name.endswith("_") and isinstance(first, (list, tuple)):
            return tuple(map(dtype_of, first))
        return _by_row(node, given)


# What switches a mode.
SWITCHES = (grad_mode, SET_GRAD, enter_autocast, exit_autocast)


Given: TypeAlias = "list[tuple[str, ValueDtype]]"  # the name of each operand, and its dtype


def _item(held: ValueDtype, index: object) -> ValueDtype:
    """Return the dtypes of an item: of a container, of a list of unknown length, or of an indexed tensor."""
    if not isinstance(held, tuple):
        return held
    if len(held) == 1:
        return held if isinstance(index, slice) else held[0]
    return held[index] if isinstance(index, (int, slice)) else ANY


def _by_row(node: Node, given: Given) -> ValueDtype:
    """Return the dtypes of a call with these operands, as far as the row of the op gives them."""
    row = row_of(node)
    if node.op == "call_module" or not row.known or isinstance(ops.argument(node, "dtype"), Node):
        return ANY
    if all(d is None for _, d in given):
        return None if getattr(node.target, "__module__", "") == "_operator" else ANY
    if ops.name(node).endswith("_"):
        return given[0][1]
    return _made(node, row, given)


def _made(node: Node, row: Rule, given: Given) -> ValueDtype:
    """Return the dtypes of an op's outputs according to its row."""
    name, schema = ops.name(node), ops.schema_of(node)
    if row.cpu == COMPOSITE or row.depends:
        return ANY
    if name == "to":  # a move to a device; `type` takes a dtype as text
        return ANY if node.target == "type" or any(isinstance(a, str) for a in node.args) else given[0][1]
    returns = [str(r.type) for r in schema.returns] if schema is not None else ["Tensor"] * len(row.out)
    if not any("Tensor" in r for r in returns):
        return None
    if inspect.isfunction(node.target) and len(row.out) > 1:
        return ANY  # the flags of a Python function choose its outputs
    if any(isinstance(a, complex) for a in (*node.args, *node.kwargs.values())):
        given = [*given, ("", COMPLEX)]
    ran = _ran(row, given)
    kinds = _kinds(node, row, given, ran)
    if returns == ["List[Tensor]"]:
        return (kinds[row.out[0]],)
    if node.target is rnn.lstm:  # output, (h_n, c_n)
        return ran, (ran, ran)
    if row.recurrent:
        return (ran,) * len(returns)
    out = tuple(kinds[o] for o in row.out[: len(returns)])
    return out[0] if len(returns) == 1 else out + (ANY,) * (len(returns) - len(out))


def _kinds(node: Node, row: Rule, given: Given, ran: ValueDtype) -> dict[str, ValueDtype]:
    """Return the dtype that each word of the column `out` means for a call that ran in the dtype `ran`."""
    small = ops.argument(node, "out_int32", False) is not False
    not_floating = row.cpu == KEEP and isinstance(ran, torch.dtype) and not is_floating(ran)
    return {
        "float": ANY if not_floating else ran,
        "first": _first(row, given),
        "bool": torch.bool,
        "int": torch.int32 if small else torch.int64,
        "integer": ANY,
        "complex": COMPLEX,
    }


def _ran(row: Rule, given: Given) -> ValueDtype:
    """Return the dtype that an op runs in: that of its floating operands, if they agree and nothing else decides."""
    kinds = {d for d in _leaves([d for _, d in given]) if d is not None}
    floats = {d for d in kinds if is_floating(d)}
    if any(map(is_complex, kinds)):
        return ANY if row.real else COMPLEX
    if len(floats) > 1:
        return ANY
    if len(floats) == 1:
        return ANY if ANY in kinds and not row.same_dtype else floats.pop()
    return _only(list(kinds)) if row.commutes else ANY  # an op that only moves values keeps their dtype


def _first(row: Rule, given: Given) -> ValueDtype:
    """Return the dtype of the operand that the column `out_of` names, or else of the first operand."""
    held = dict(given).get(row.out_of) if row.out_of else given[0][1]
    return held if isinstance(held, (torch.dtype, Unknown)) else ANY


def _only(dtypes: list[ValueDtype]) -> ValueDtype:
    return dtypes[0] if len(dtypes) == 1 else ANY


def _leaves(dtypes: Iterable[ValueDtype]) -> list[ValueDtype]:
    return [x for d in dtypes for x in (_leaves(d) if isinstance(d, tuple) else [d])]
