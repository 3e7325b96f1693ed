"""Cast the operand of a norm to the low `dtype=` that user code passes to it, since a norm takes nothing wider.

Before: linalg_vector_norm(x, dtype=bfloat16)        After: linalg_vector_norm(to(x, bfloat16))
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph.notes import CAST_NORM, note, origin
from ..graph.values import LOW_DTYPES, dtypes_of, retyped
from ..ops import ops
from ..ops.rules import row_of


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


def _cast_first(node: Node) -> None:
    """Before: norm(x, dtype=bfloat16). After: norm(to(x, bfloat16))."""
    value: Any = node.args[0] if node.args else next(ops.operands(node)).node
    told: Any = ops.argument(node, "dtype")
    gives: Any = dtypes_of(node.meta.get("val"))  # its dtypes without autocast
    with node.graph.inserting_before(node):
        if isinstance(told, Node):
            cast = node.graph.call_method("to", (value, told))
        else:
            cast = node.graph.call_function(torch.ops.aten.to.dtype, (value, gives or told))
    cast.meta = origin(node)
    note(cast, made_by=CAST_NORM)
    if gives not in (None, told):
        note(cast, cast="autocast", read=told)
    if gives is not None:
        cast.meta["val"] = retyped(value.meta.get("val"), gives)
    schema = ops.schema_of(node)
    names = [a.name for a in schema.arguments] if schema is not None else []
    node.args = tuple(None if names[i : i + 1] == ["dtype"] else a for i, a in enumerate(node.args))
    node.kwargs = {k: v for k, v in node.kwargs.items() if k != "dtype"}
    node.replace_input_with(value, cast)
