"""Give a call the literals that it has under autocast, where the program read them off a dtype.

What the program read was found by comparing two captures; it stands in `replaced` and `constant_read` of the note.

Before: masked_fill(x, m, -3.4028e+38)         ones([8], dtype=float32)         softmax(x, 1, dtype=float32)
After:  masked_fill(x, m, -3.3895e+38)         ones([8], dtype=bfloat16)        softmax(x, 1, dtype=bfloat16)
        and beyond O1, where the op's own rule decides:                         softmax(to(x, bfloat16), 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph.values import dtypes_of, is_floating, retyped
from ..notes import APPLY_READS, note, note_of, origin
from ..ops import ops
from ..ops.rules import row_of

Path = tuple[Any, ...]


def apply_reads(graph: Graph, *, exact: bool) -> int:
    """Put what was read under autocast in the place of what was read without, in place; return how many edits.

    What a value's dtype was without autocast stays in its `val`; the dtype that was read is left in its note, and
    decides on the node.

    Args:
        graph: captured without autocast; its nodes say what autocast has instead.
        exact: take a dtype argument as it is; else what the op converts first is cast, and its rule decides.
    """
    edits = 0
    for node in list(graph.nodes):
        if note_of(node).constant_read:
            _cast_constant(node)
            edits += 1
        replaced = note_of(node).replaced
        for path, value in replaced:
            if isinstance(value, torch.dtype) and not exact and row_of(node).converts_first:
                _cast_first(node, value)
            else:
                node.args, node.kwargs = _with((tuple(node.args), dict(node.kwargs)), path, value)
                if isinstance(value, torch.dtype):
                    note(node, read=value)
            edits += 1
        if replaced:
            note(node, replaced=())
    return edits


def _cast_constant(node: Node) -> None:
    """Before: a: float32. After: to(b, float32), a cast relative to what was read; b is what autocast has for a."""
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


def restore_outputs(graph: Graph, dtypes: Mapping[Node, Any]) -> None:
    """Cast what a graph returns to the dtypes that the model returns, as its author would have."""
    output: Any = graph.output_node()
    made: dict[Node, Node] = {}
    for value, dtype in dtypes.items():
        held = dtypes_of(value.meta.get("val"))
        if isinstance(held, torch.dtype) and held.is_floating_point and is_floating(dtype) and held != dtype:
            with graph.inserting_before(output):
                made[value] = graph.call_function(torch.ops.aten.to.dtype, (value, dtype))
            made[value].meta = origin(value) | {"val": retyped(value.meta["val"], dtype)}
            note(made[value], made_by=APPLY_READS, cast="literal")
    output.args = torch.fx.map_arg(output.args, lambda n: made.get(n, n))


def _cast_first(node: Node, read: torch.dtype) -> None:
    """Before: softmax(x, 1, dtype=float32). After: softmax(to(x, float32), 1), a cast relative to what was read."""
    value: Any = node.args[0]
    literal = ops.argument(node, "dtype")
    with node.graph.inserting_before(node):
        cast = node.graph.call_function(torch.ops.aten.to.dtype, (value, literal))
    cast.meta = origin(node) | {"val": retyped(value.meta.get("val"), literal)}
    note(cast, made_by=APPLY_READS, cast="relative", read=read)
    schema = ops.schema_of(node)
    names = [a.name for a in schema.arguments] if schema is not None else []
    node.args = tuple(
        None if names[i : i + 1] == ["dtype"] else a for i, a in enumerate((cast, *node.args[1:]))
    )
    node.kwargs = {k: v for k, v in node.kwargs.items() if k != "dtype"}


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
