"""Give a call the literals that it has under autocast, where the program read them off a dtype.

What the program read was found by comparing two captures; it stands in `replaced` and `constant_read` of the note.

Before: masked_fill(x, m, -3.4028e+38)         ones([8], dtype=float32)         softmax(x, 1, dtype=float32)
After:  masked_fill(x, m, -3.3895e+38)         ones([8], dtype=bfloat16)        softmax(x, 1, dtype=bfloat16)
        and beyond O1, where the op's own rule decides:                         softmax(to(x, bfloat16), 1)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph.notes import APPLY_READS, note, note_of, origin
from ..graph.values import LOW_DTYPES, dtypes_of, retyped
from ..ops import ops
from ..ops.rules import row_of

Path = tuple[Any, ...]


def apply_reads(graph: Graph, *, exact: bool) -> int:
    """Replace, in place, what was read without autocast by what was read under it; return the number of edits.

    The `val` of a value keeps its dtype without autocast. The dtype that was read stays in the node's note, and decides
    the node's colour.

    Args:
        graph: captured without autocast; its nodes say what autocast has instead.
        exact: keep `dtype=` arguments; otherwise a cast of the operand replaces them, and the op's rule decides.
    """
    edits = 0
    for node in list(graph.nodes):
        if note_of(node).constant_read:
            _cast_constant(node)
            edits += 1
        replaced = note_of(node).replaced
        for path, value in replaced:
            row = row_of(node)
            first = row.never_narrows or (row.converts_first and not exact)
            if isinstance(value, torch.dtype) and first:
                _cast_first(node, cast="relative", read=value)
            else:
                node.args, node.kwargs = _with((tuple(node.args), dict(node.kwargs)), path, value)
                if isinstance(value, torch.dtype):
                    note(node, read=value)
            edits += 1
        if replaced:
            note(node, replaced=())
    return edits


def _cast_constant(node: Node) -> None:
    """Before: a: float32. After: to(b, float32), a relative cast; b is the constant that is used under autocast."""
    found = note_of(node)
    note(node, read=None, constant_read="")
    node.target = found.constant_read
    literal = node.meta["val"].dtype if isinstance(node.meta.get("val"), torch.Tensor) else torch.float32
    with node.graph.inserting_after(node):
        cast = node.graph.call_function(torch.ops.aten.to.dtype, (node, literal))
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    cast.meta = origin(node)
    note(cast, made_by=APPLY_READS, cast="relative", read=found.read)
    if "val" in node.meta:
        cast.meta["val"] = node.meta["val"]


def cast_before_norms(graph: Graph) -> int:
    """Cast the operand of a norm to the low `dtype=` that user code passes to it, in place; return how many edits.

    A norm takes nothing wider than its `dtype=`, so in the user's program the cast does nothing; here its operand may
    be FP32. The same holds for a dtype that is read when the graph runs.

    Before: linalg_vector_norm(x, dtype=bfloat16)        After: linalg_vector_norm(to(x, bfloat16))
    """
    edits = 0
    for node in list(graph.nodes):
        told = ops.argument(node, "dtype") if row_of(node).never_narrows else None
        if isinstance(told, Node) or told in LOW_DTYPES:
            _cast_first(node)
            note(node, dtype_argument=told if told in LOW_DTYPES else None)
            edits += 1
    return edits


def _cast_first(node: Node, **means: Any) -> None:
    """Before: softmax(x, 1, dtype=float32). After: softmax(to(x, float32), 1), with a literal or relative cast."""
    value: Any = node.args[0] if node.args else next(ops.operands(node)).node
    told: Any = ops.argument(node, "dtype")
    gives: Any = dtypes_of(node.meta.get("val"))  # its dtypes without autocast
    with node.graph.inserting_before(node):
        if isinstance(told, Node):
            cast = node.graph.call_method("to", (value, told))
        else:
            cast = node.graph.call_function(torch.ops.aten.to.dtype, (value, gives or told))
    cast.meta = origin(node)
    note(cast, made_by=APPLY_READS, **(means if gives in (None, told) else {"cast": "autocast", "read": told}))
    if gives is not None:
        cast.meta["val"] = retyped(value.meta.get("val"), gives)
    schema = ops.schema_of(node)
    names = [a.name for a in schema.arguments] if schema is not None else []
    node.args = tuple(None if names[i : i + 1] == ["dtype"] else a for i, a in enumerate(node.args))
    node.kwargs = {k: v for k, v in node.kwargs.items() if k != "dtype"}
    node.replace_input_with(value, cast)


def _with(value: Any, path: Path, new: Any) -> Any:
    """Return arguments with one literal replaced."""
    if not path:
        return new
    at, rest = path[0], path[1:]
    if isinstance(value, slice):
        parts = {k: getattr(value, k) for k in ("start", "stop", "step")}
        return slice(*(_with(v, rest, new) if k == at else v for k, v in parts.items()))
    if isinstance(value, dict):
        return {k: _with(v, rest, new) if k == at else v for k, v in value.items()}
    return type(value)(_with(v, rest, new) if i == at else v for i, v in enumerate(value))
