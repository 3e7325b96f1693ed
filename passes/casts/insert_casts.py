"""Pass 3: insert a cast wherever an operand does not have the dtype that its reader was assigned.

Before: linear(x, w)                                   x, w: float32; linear was coloured bfloat16
After:  linear(to(x, bfloat16), to(w, bfloat16))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from ..form import Assignment, Colouring, Ensures, Unit
from ..graph.aliases import Aliases
from ..graph.notes import CLAMP_OPERAND, note, provenance
from ..graph.values import dtype_owner
from ..ops import ops
from ..ops.rules import row_of
from ..runtime.casts import CAST, cast_weight
from .cast import make_cast
from .restore_outputs import restore_outputs

CAST_REWRITES = ("operand", "output", "read")  # the rewrites that insert a cast


@dataclass(frozen=True)
class InsertCasts:
    """Make every operand in a graph have the dtype that was assigned for its reader."""

    name: ClassVar = "insert-casts"
    ensures: ClassVar = Ensures.DTYPES

    def __call__(self, unit: Unit) -> dict[str, int]:
        """Insert a cast before every use that needs another dtype, in place."""
        graph, assignment = unit.graph, unit.decided
        edits = dict.fromkeys(["operand", "clamp", "argument"], 0)
        aliases = Aliases(graph) if any(c.clamped for c in assignment.colours.values()) else None
        for node in list(graph.nodes):
            colouring = assignment.colours.get(node)
            if colouring is not None:
                if aliases is not None:
                    edits["clamp"] += _clamp_operands(graph, node, colouring, assignment, aliases)
                edits["argument"] += _rewrite_arguments(node, colouring)  # first: what it drops needs no cast
                edits["operand"] += _cast_operands(graph, node, colouring, assignment)
        edits |= restore_outputs(graph, assignment)
        edits["assertion"] = loosen_assertions(graph, lambda n: assignment.dtypes.get(n) != assignment.original.get(n))
        return edits


def _cast_operands(graph: Graph, node: Node, colouring: Colouring, assignment: Assignment) -> int:
    """Before: add(x, y). After: add(to(x, float32), y), where x was assigned a cast.

    A value that two arguments read is cast for the last one first, as autocast's C++ does where GCC has compiled it:
    autograd sums the gradients of the casts in the order that they were made in.
    """
    if not colouring.operand_dtypes:
        return 0
    edits = 0
    made: dict[Node, tuple[str, Node]] = {}

    def cast(operand: ops.Operand) -> Node:
        nonlocal edits
        wanted = colouring.operand_dtypes.get(operand.place)
        if wanted is None:
            return operand.node
        edits += 1
        inserted = make_cast(graph, operand.node, wanted, node, assignment)
        argument, first = made.setdefault(operand.node, (operand.name, inserted))
        if argument != operand.name:
            first.prepend(inserted)
            made[operand.node] = operand.name, inserted
        if operand.node.op == "get_attr" and inserted.target is CAST and _folds_by_grad(node):
            inserted.target = cast_weight
        return inserted

    ops.map_operands(node, cast)
    return edits


def _clamp_operands(graph: Graph, node: Node, colouring: Colouring, assignment: Assignment, aliases: Aliases) -> int:
    """Before: where(m, lowest, x). After: where(m, clamp(lowest, -65504, 65504), x), for x in float16.

    Backward of clamp reads what was clamped, which must not be written in between: such a value is copied first.
    """

    def made(op: Any, *args: Any) -> Node:
        with graph.inserting_before(node):
            inserted = graph.call_function(op, args)
        inserted.meta = provenance(node) | {"val": args[0].meta.get("val")}
        note(inserted, made_by=CLAMP_OPERAND)
        for dtypes in (assignment.dtypes, assignment.original):
            dtypes[inserted] = dtypes[args[0]]
        return inserted

    def clamp(operand: ops.Operand) -> Node:
        value = operand.node
        if operand.place not in colouring.clamped:
            return value
        largest = torch.finfo(colouring.operand_dtypes.get(operand.place, colouring.dtype)).max
        kept = made(torch.ops.aten.clone.default, value) if aliases.is_mutated(value) else value
        return made(torch.ops.aten.clamp.default, kept, -largest, largest)

    if colouring.clamped:
        ops.map_operands(node, clamp)
    return len(colouring.clamped)


def _folds_by_grad(node: Node) -> bool:
    """Say whether matmul chooses its kernel by `requires_grad` of the weight."""
    first = next(ops.operands(node)).node.meta.get("val")
    if not row_of(node).folds or not isinstance(first, Tensor) or first.dim() < 3:
        return False
    try:
        return not first.is_contiguous()
    except RuntimeError:  # sizes that only data decides
        return True


def _rewrite_arguments(node: Node, colouring: Colouring) -> int:
    """Before: x.to(float32), a relative cast; masked_fill(x, m, -3.4e38). After: in the dtype that the node runs in."""
    low = colouring.set_dtype
    if low is not None and not _replace(
        node, lambda a: low if isinstance(a, torch.dtype) or (isinstance(a, Node) and dtype_owner(a)) else a
    ):
        node.op, node.target, node.args, node.kwargs = "call_function", CAST, (node.args[0], low), {}  # for x.float()
    for old, new in colouring.literals:
        _replace(node, lambda a, old=old, new=new: new if isinstance(a, (float, Node)) and a == old else a)
    return (low is not None) + len(colouring.literals)


def _replace(node: Node, change: Any) -> bool:
    """Change the leaves of a node's arguments; say whether any leaf changed."""
    args, kwargs = map_aggregate(node.args, change), map_aggregate(node.kwargs, change)
    changed = (args, kwargs) != (node.args, node.kwargs)
    node.args, node.kwargs = args, kwargs
    return changed


def loosen_assertions(graph: Graph, recoloured: Callable[[Node], bool]) -> int:
    """Drop the device from the exporter's assertions, since a module can be moved, and the dtype if it has changed.

    Before: _assert_tensor_metadata(x, None, None, float32, device=cpu)
    After:  _assert_tensor_metadata(x, None, None)
    """
    edits = 0
    for node in graph.nodes:
        if ops.name(node) != "_assert_tensor_metadata" or not isinstance(node.args[0], Node):
            continue
        before = (node.args, node.kwargs)
        dropped = {"device"} | ({"dtype"} if recoloured(node.args[0]) else set())
        node.args = node.args[:3] if "dtype" in dropped else node.args
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in dropped}
        edits += (node.args, node.kwargs) != before
    return edits
