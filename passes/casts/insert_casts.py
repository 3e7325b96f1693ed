"""Pass 3: insert a cast wherever an operand does not have the dtype that its reader was assigned.

Before: linear(x, w)                                   x, w: float32; linear was coloured bfloat16
After:  linear(to(x, bfloat16), to(w, bfloat16))
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from ..form import Choice, Clamp, Ensures, Replace, SetDtype, Unit
from ..graph.aliases import Aliases
from ..graph.notes import CAST_OPERAND, CLAMP_OPERAND, READ_OUTPUT, RESTORE_OUTPUT, note_of
from ..graph.values import dtype_owner
from ..ops import ops
from ..ops.rules import row_of
from ..runtime.casts import CAST, cast_weight
from .restore_outputs import restore_outputs

CAST_REWRITES = ("operand", "output", "read")  # the rewrites that insert a cast


@dataclass(frozen=True)
class InsertCasts:
    """Make every operand in a graph have the dtype that was assigned for its reader."""

    name: ClassVar = "insert-casts"
    ensures: ClassVar = Ensures.DTYPES

    def __call__(self, unit: Unit) -> dict[str, int]:
        """Apply the edits that were decided on, and give the outputs their dtypes, in place."""
        graph, colours = unit.graph, unit.decided.colours
        edits = Counter(type(edit) for node in graph.nodes if node in colours for edit in colours[node].edits)
        aliases = Aliases(graph) if edits[Clamp] else None  # before anything is inserted
        for node in [n for n in graph.nodes if n in colours and colours[n].edits]:
            if aliases is not None and colours[node].has(Clamp):
                _clamp_operands(unit, node, colours[node], aliases)
            _change_arguments(node, colours[node])  # before casts: what it drops needs none
            if colours[node].casts:
                _cast_operands(unit, node, colours[node])
        restore_outputs(unit)
        makers = Counter(note_of(node).made_by for node in unit.inserted)
        return {
            "operand": makers[CAST_OPERAND],
            "clamp": edits[Clamp],
            "argument": edits[SetDtype] + edits[Replace],
            "output": makers[RESTORE_OUTPUT],
            "read": makers[READ_OUTPUT],
            "assertion": loosen_assertions(graph, lambda n: operator.ne(*unit.dtypes_of(n))),
        }


def _cast_operands(unit: Unit, node: Node, choice: Choice) -> None:
    """Before: add(x, y). After: add(to(x, float32), y), where x was assigned a cast.

    A value that two arguments read is cast for the last one first, as autocast's C++ does where GCC has compiled it:
    autograd sums the gradients of the casts in the order that they were made in.
    """
    made: dict[Node, tuple[str, Node]] = {}

    def cast(operand: ops.Operand) -> Node:
        wanted = choice.casts.get(operand.place)
        if wanted is None:
            return operand.node
        inserted = unit.cast(operand.node, wanted, before=node)
        argument, first = made.setdefault(operand.node, (operand.name, inserted))
        if argument != operand.name:
            first.prepend(inserted)
            made[operand.node] = operand.name, inserted
        if operand.node.op == "get_attr" and inserted.target is CAST and _folds_by_grad(node):
            inserted.target = cast_weight
        return inserted

    ops.map_operands(node, cast)


def _clamp_operands(unit: Unit, node: Node, choice: Choice, aliases: Aliases) -> None:
    """Before: where(m, lowest, x). After: where(m, clamp(lowest, -65504, 65504), x), for x in float16."""
    places = [e.place for e in choice.edits if isinstance(e, Clamp)]

    def insert(op: Any, *args: Any) -> Node:
        return unit.insert(op, args, before=node, by=CLAMP_OPERAND)

    def clamp(operand: ops.Operand) -> Node:
        value = operand.node
        if operand.place not in places:
            return value
        largest = torch.finfo(choice.casts.get(operand.place, choice.dtype)).max
        # Backward reads what was clamped, which must not be written in between.
        value = insert(torch.ops.aten.clone.default, value) if aliases.is_mutated(value) else value
        return insert(torch.ops.aten.clamp.default, value, -largest, largest)

    ops.map_operands(node, clamp)


def _folds_by_grad(node: Node) -> bool:
    """Say whether matmul chooses its kernel by `requires_grad` of the weight."""
    first = next(ops.operands(node)).node.meta.get("val")
    if not row_of(node).folds or not isinstance(first, Tensor) or first.dim() < 3:
        return False
    try:
        return not first.is_contiguous()
    except RuntimeError:  # sizes that only data decides
        return True


def _change_arguments(node: Node, choice: Choice) -> None:
    """Before: x.to(float32); masked_fill(x, m, -3.4e38). After: x.to(float16); masked_fill(x, m, -65504.0)."""
    for edit in choice.edits:
        if isinstance(edit, Replace):
            old, new = edit
            _change(node, lambda a, old=old, new=new: new if isinstance(a, (float, Node)) and a == old else a)
        elif isinstance(edit, SetDtype) and not _change(node, lambda a, d=edit.dtype: d if _names_dtype(a) else a):
            node.op, node.target, node.args = "call_function", CAST, (node.args[0], edit.dtype)  # such as x.float()
            node.kwargs = {}


def _names_dtype(argument: Any) -> bool:
    return isinstance(argument, torch.dtype) or (isinstance(argument, Node) and dtype_owner(argument) is not None)


def _change(node: Node, change: Any) -> bool:
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
        if row_of(node).asks != "asserts" or not isinstance(node.args[0], Node):
            continue
        before = (node.args, node.kwargs)
        dropped = {"device"} | ({"dtype"} if recoloured(node.args[0]) else set())
        node.args = node.args[:3] if "dtype" in dropped else node.args
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in dropped}
        edits += (node.args, node.kwargs) != before
    return edits
