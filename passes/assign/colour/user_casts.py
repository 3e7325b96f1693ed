"""The meaning of the user's own casts: literal (`.float()`, `.half()`) or relative (`.to(q.dtype)`, `type_as`).

Capture records both as `to(x, float32)`; comparing it with a capture under autocast tells them apart. A literal cast
keeps its dtype. A relative cast follows its reference: if the input has become low, `.to(input.dtype)` gives a low
value.
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
from ...graph.values import (
    ANY,
    ELIGIBLE,
    LOW_DTYPES,
    Dtypes,
    dtype_owner,
    dtype_reference,
    is_floating,
    literal_dtype,
    module_path,
)
from ...ops import ops
from ...ops.rules import Rule, row_of

_NOTHING = "under autocast the cast does nothing"


@dataclass(frozen=True)
class Intent:
    """The dtype a user cast gives in the converted graph, whether it is literal, and why."""

    dtype: torch.dtype | None
    literal: bool
    reason: Reason


def observed(graph: Graph) -> Iterator[Node]:
    """Yield the values whose bits or element size the program sees: viewed, measured, or filled at random."""
    for node in graph.nodes:
        name, value = ops.name(node), node.args[0] if node.args else None
        if name == "view":
            seen = any(isinstance(a, torch.dtype) for a in (*node.args[1:], *node.kwargs.values()))
        elif dtype_owner(node) is not None:
            seen = any(_uses_dtype(user) for user in node.users)
        else:
            seen = (
                name == "element_size"
                or (name == "getattr" and node.args[1] in ("itemsize", "nbytes"))
                or (name.endswith("_") and _draws_anew(row_of(node)))
            )
        if seen and isinstance(value, Node):
            yield value


def uncopied_without_grad(graph: Graph, original: Dtypes) -> Iterator[Node]:
    """Yield the values with gradients that a cast in a no_grad region returns as they are, gradients included.

    If such a value were low the cast would make another value, to which no gradient flows.
    """
    modes, grad = grad_modes(graph), requires_grad(graph)
    for node in graph.nodes:
        value = node.args[0] if node.args and row_of(node).is_cast and modes[node][0] is False else None
        if isinstance(value, Node) and value in grad and original[value] == original[node]:
            yield value


def _draws_anew(row: Rule) -> bool:
    """Say whether a random fill draws different numbers for another dtype, instead of rounding the same ones."""
    return row.redraws == "always" or (row.redraws != "" and torch.__version__ < row.redraws)


def _uses_dtype(node: Node) -> bool:
    """Say whether a call uses a dtype for anything but making a value of that dtype."""
    return node.op != "output" and ops.name(node) != "to" and not isinstance(ops.argument(node, "dtype"), Node)


class Casts:
    """Reads the user casts of one graph."""

    def __init__(self, original: Dtypes) -> None:
        self.original = original

    def baked(self, node: Node) -> torch.dtype | None:
        """Return the dtype that capture wrote into the node, None if the node reads a dtype at run time."""
        return literal_dtype(node)

    def read(self, node: Node, dtypes: Dtypes, observed: torch.dtype | None = None, exact: bool = True) -> Intent:
        """Return what a cast means.

        Args:
            node: a cast.
            dtypes: the dtypes of the values that come before the cast.
            observed: the dtype that the cast took in a capture under autocast, if there was one.
            exact: values must be those of autocast; else more of them may be low.
        """
        value: Any = node.args[0]
        held = dtypes.get(value)
        baked = self.baked(node)
        reference = dtype_reference(node)
        if reference is not None and (self.original[reference] is ANY or is_floating(self.original[reference])):
            dtype = dtypes[reference]
            dtype = dtype if isinstance(dtype, torch.dtype) else None
            return Intent(dtype, False, Code.CAST("takes the dtype of another tensor"))
        if baked is None:
            return Intent(held if isinstance(held, torch.dtype) else None, False, Code.FOLLOW("it names no dtype"))
        if note_of(node).cast == "autocast":
            given = note_of(node).read or baked
            if given == held == torch.float32:
                return Intent(given, False, Code.CAST(_NOTHING))
            return Intent(given, True, Code.CAST("the dtype that it has under autocast"))
        kind = self._kind(node)
        if kind == "relative" and observed is not None:
            return Intent(observed, False, Code.CAST("takes the dtype that was read under autocast"))
        floats = baked.is_floating_point and is_floating(self.original.get(value))
        if not floats or not isinstance(held, torch.dtype):
            return Intent(baked, True, Code.CAST("your code names this dtype"))
        if kind == "baked" and held in LOW_DTYPES and baked == torch.float32:
            return Intent(baked, True, Code.USER_CAST("intent unknown: assumed to be an upcast"))
        if self._is_literal(value, baked, kind):
            return Intent(baked, True, Code.CAST("your code names this dtype"))
        return self._by_use(node, dtypes, held, observed, exact)

    def _by_use(
        self, node: Node, dtypes: Dtypes, held: torch.dtype, observed: torch.dtype | None, exact: bool
    ) -> Intent:
        """Return the meaning of a cast to the dtype seen under autocast, or to the dtype before an earlier upcast."""
        if observed is None:
            told = self._kind(node) == "relative"
            why = "takes the dtype of another tensor" if told else "intent unknown: it keeps its operand's dtype"
            return Intent(self._restores(node, dtypes) or held, False, Code.USER_CAST(why))
        restored = None if exact else self._restores(node, dtypes)
        return Intent(restored or observed, False, Code.CAST(_NOTHING))

    def _is_literal(self, value: Node, baked: torch.dtype, kind: str) -> bool:
        """Say whether a cast must mean the dtype that was captured, and not the dtype of another value."""
        if kind == "literal" or baked in LOW_DTYPES:  # capture was in FP32, so a low dtype is the user's
            return True
        changes = self.original[value] != baked or baked != torch.float32
        return changes and kind != "relative"  # else it may restore what an earlier cast changed

    def _kind(self, node: Node) -> str:
        """Return "literal", "relative" or "undecided"; in a traced Python graph the name of the method tells."""
        return note_of(node).cast or ("literal" if node.op == "call_method" else "undecided")

    def _restores(self, node: Node, dtypes: Dtypes) -> torch.dtype | None:
        """Return the dtype that the nearest upcast before this cast, in the same module, was made from."""
        path, seen, front = module_path(node), {node}, [node]
        while front:
            nearer: list[Node] = []
            for reader in front:
                for operand in ops.operands(reader):
                    n = operand.node
                    if n in seen or not n.op.startswith("call") or module_path(n) != path:
                        continue
                    seen.add(n)
                    first: Any = n.args[0] if n.args else None
                    upcasts = literal_dtype(n) == torch.float32 and self._kind(n) != "relative"
                    found = dtypes.get(first)
                    if upcasts and isinstance(found, torch.dtype) and found in ELIGIBLE:  # else it was no upcast
                        return found
                    nearer.append(n)
            front = nearer
        return None
