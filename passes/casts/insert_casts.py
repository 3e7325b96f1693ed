"""Pass 3: insert a cast wherever an operand does not have the dtype that its reader was assigned.

Before: linear(x, w)                                   x, w: float32; linear was coloured bfloat16
After:  linear(to(x, bfloat16), to(w, bfloat16))
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from ..form import Cast, Choice, Clamp, Edit, Ensures, Replace, SetDtype, Unit
from ..graph.aliases import Aliases
from ..graph.notes import CLAMP_OPERAND
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
        fired = dict.fromkeys(["operand", "clamp", "argument"], 0)
        clamps = any(c.has(Clamp) for c in colours.values())
        aliases: Any = Aliases(graph) if clamps else None  # before anything is inserted
        apply: dict[type[Edit], tuple[str, Callable[[Unit, Node, Choice, list[Any]], int]]] = {
            Clamp: ("clamp", functools.partial(_clamp_operands, aliases)),
            SetDtype: ("argument", _set_dtype),  # before casts: what it drops needs none
            Replace: ("argument", _replace_numbers),
            Cast: ("operand", _cast_operands),
        }
        for node in [n for n in graph.nodes if n in colours and colours[n].edits]:
            for kind, (rewrite, function) in apply.items():
                if edits := [e for e in colours[node].edits if isinstance(e, kind)]:
                    fired[rewrite] += function(unit, node, colours[node], edits)
        fired |= restore_outputs(unit)
        fired["assertion"] = loosen_assertions(graph, lambda n: operator.ne(*unit.dtypes_of(n)))
        return fired


def _cast_operands(unit: Unit, node: Node, choice: Choice, edits: list[Cast]) -> int:
    """Before: add(x, y). After: add(to(x, float32), y), where x was assigned a cast.

    A value that two arguments read is cast for the last one first, as autocast's C++ does where GCC has compiled it:
    autograd sums the gradients of the casts in the order that they were made in.
    """
    count = 0
    made: dict[Node, tuple[str, Node]] = {}

    def cast(operand: ops.Operand) -> Node:
        nonlocal count
        wanted = choice.casts.get(operand.place)
        if wanted is None:
            return operand.node
        count += 1
        inserted = unit.cast(operand.node, wanted, before=node)
        argument, first = made.setdefault(operand.node, (operand.name, inserted))
        if argument != operand.name:
            first.prepend(inserted)
            made[operand.node] = operand.name, inserted
        if operand.node.op == "get_attr" and inserted.target is CAST and _folds_by_grad(node):
            inserted.target = cast_weight
        return inserted

    ops.map_operands(node, cast)
    return count


def _clamp_operands(aliases: Aliases, unit: Unit, node: Node, choice: Choice, edits: list[Clamp]) -> int:
    """Before: where(m, lowest, x). After: where(m, clamp(lowest, -65504, 65504), x), for x in float16.

    Backward of clamp reads what was clamped, which must not be written in between: such a value is copied first.
    """
    places = {e.place for e in edits}

    def insert(op: Any, *args: Any) -> Node:
        return unit.insert(op, args, before=node, by=CLAMP_OPERAND)

    def clamp(operand: ops.Operand) -> Node:
        value = operand.node
        if operand.place not in places:
            return value
        largest = torch.finfo(choice.casts.get(operand.place, choice.dtype)).max
        value = insert(torch.ops.aten.clone.default, value) if aliases.is_mutated(value) else value
        return insert(torch.ops.aten.clamp.default, value, -largest, largest)

    ops.map_operands(node, clamp)
    return len(edits)


def _folds_by_grad(node: Node) -> bool:
    """Say whether matmul chooses its kernel by `requires_grad` of the weight."""
    first = next(ops.operands(node)).node.meta.get("val")
    if not row_of(node).folds or not isinstance(first, Tensor) or first.dim() < 3:
        return False
    try:
        return not first.is_contiguous()
    except RuntimeError:  # sizes that only data decides
        return True


def _set_dtype(unit: Unit, node: Node, choice: Choice, edits: list[SetDtype]) -> int:
    """Before: x.to(float32), a relative cast. After: x.to(bfloat16), the dtype that the node runs in."""
    dtype = edits[0].dtype

    def names(argument: Any) -> bool:
        return isinstance(argument, torch.dtype) or (isinstance(argument, Node) and dtype_owner(argument) is not None)

    if not _change(node, lambda a: dtype if names(a) else a):
        node.op, node.target, node.args, node.kwargs = "call_function", CAST, (node.args[0], dtype), {}  # for x.float()
    return len(edits)


def _replace_numbers(unit: Unit, node: Node, choice: Choice, edits: list[Replace]) -> int:
    """Before: masked_fill(x, m, -3.4e38). After: masked_fill(x, m, -65504.0), for x in float16."""
    for old, new in edits:
        _change(node, lambda a, old=old, new=new: new if isinstance(a, (float, Node)) and a == old else a)
    return len(edits)


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
