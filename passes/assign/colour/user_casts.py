"""The meaning of the user's own casts: literal (`.float()`, `.half()`) or relative (`.to(q.dtype)`, `type_as`).

A literal cast keeps its dtype. A relative cast follows its reference: if the input has become low, `.to(input.dtype)`
gives a low value. A trace under autocast has recorded the dtype that it gives there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ...contract.reasons import Code, Reason
from ...graph.grad import grad_modes, requires_grad
from ...graph.notes import note_of
from ...graph.values import LOW_DTYPES, Dtypes, dtype_owner, dtype_reference, is_floating, literal_dtype, module_path
from ...ops import ops
from ...ops.rules import row_of

_NOTHING = "under autocast the cast does nothing"


@dataclass(frozen=True)
class Intent:
    """The dtype a user cast gives in the converted graph, whether it is literal, why, and whether it may be another."""

    dtype: torch.dtype | None
    literal: bool
    reason: Reason
    free: bool = False


def observed(graph: Graph) -> Iterator[Node]:
    """Yield the values whose bits or element size the program sees: viewed, measured, or filled at random."""
    for node in graph.nodes:
        row, value = row_of(node), node.args[0] if node.args else None
        if row.shows_bits == "dtype":
            seen = any(isinstance(a, torch.dtype) for a in (*node.args[1:], *node.kwargs.values()))
        elif dtype_owner(node) is not None:  # for anything but making a value of that dtype
            seen = any(
                user.op != "output" and not row_of(user).is_cast and not isinstance(ops.argument(user, "dtype"), Node)
                for user in node.users
            )
        else:
            # A random fill may draw other numbers for another dtype, instead of rounding the same ones.
            redraws = row.redraws == "always" or (row.redraws != "" and torch.__version__ < row.redraws)
            seen = row.shows_bits == "always" or (ops.name(node).endswith("_") and redraws)
        if seen and isinstance(value, Node):
            yield value


def uncopied_without_grad(graph: Graph, original: Dtypes) -> Iterator[Node]:
    """Yield values with gradients that a cast in a no_grad region returns as they are; a low copy would have none."""
    modes, grad = grad_modes(graph), requires_grad(graph)
    for node in graph.nodes:
        value = node.args[0] if node.args and row_of(node).is_cast and modes[node][0] is False else None
        if isinstance(value, Node) and value in grad and original[value] == original[node]:
            yield value


def meaning(
    node: Node, original: Dtypes, dtypes: Dtypes, observed: torch.dtype | None = None, exact: bool = True
) -> Intent:
    """Return what a cast means: `observed` was seen under autocast; if `exact`, values must be autocast's."""
    value: Any = node.args[0]
    operand, baked, reference = dtypes.get(value), literal_dtype(node), dtype_reference(node)
    if reference is not None and is_floating(original[reference]):
        dtype = taken if isinstance(taken := dtypes[reference], torch.dtype) else None
        return Intent(dtype, False, Code.CAST("takes the dtype of another tensor"))
    if baked is None:
        return Intent(operand if isinstance(operand, torch.dtype) else None, False, Code.FOLLOW("it names no dtype"))
    if note_of(node).cast == "autocast":
        under = note_of(node).read or baked
        why = _NOTHING if under == operand == torch.float32 else "the dtype that it has under autocast"
        free = not exact and under in LOW_DTYPES and baked == torch.float32 == original.get(value)
        return Intent(under, why != _NOTHING and not free, Code.CAST(why), free)
    kind = note_of(node).cast or ("literal" if node.op == "call_method" else "")  # the name of a method tells
    floats = baked.is_floating_point and is_floating(original.get(value))
    if not floats or not isinstance(operand, torch.dtype):
        return Intent(baked, True, Code.CAST("your code names this dtype"))
    if kind == "baked" and operand in LOW_DTYPES and baked == torch.float32:
        return Intent(baked, True, Code.USER_CAST("intent unknown: assumed to be an upcast"))
    # Capture was in FP32, so a low dtype is the user's. Another cast may restore what an earlier one changed.
    if kind == "literal" or original[value] != baked or baked != torch.float32:
        return Intent(baked, True, Code.CAST("your code names this dtype"))
    restored = None if exact and observed is not None else _restores(node, original, dtypes)
    if observed is not None:
        return Intent(restored or observed, False, Code.CAST(_NOTHING), restored is not None)
    return Intent(restored or operand, False, Code.USER_CAST("intent unknown: it keeps its operand's dtype"))


def _restores(node: Node, original: Dtypes, dtypes: Dtypes) -> torch.dtype | None:
    """Return the dtype that the nearest upcast before this cast, in the same module, was made from."""
    path, visited, front = module_path(node), {node}, [node]
    while front:
        nearer: list[Node] = []
        for n in (o.node for reader in front for o in ops.operands(reader)):
            if n in visited or not n.op.startswith("call") or module_path(n) != path:
                continue
            visited.add(n)
            value: Any = n.args[0] if n.args else None
            upcasts = literal_dtype(n) == torch.float32 == original.get(value)
            dtype = dtypes.get(value)
            if upcasts and isinstance(dtype, torch.dtype):
                return dtype
            nearer.append(n)
        front = nearer
    return None
