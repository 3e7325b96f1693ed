"""The one way in which passes insert a cast."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ..form import Assignment
from ..graph.notes import CAST_OPERAND, note, provenance
from ..graph.values import recast
from ..runtime.casts import CAST, cast_floating


def make_cast(
    graph: Graph, value: Node, dtype: torch.dtype, reader: Node, assignment: Assignment, rule: str = CAST_OPERAND
) -> Node:
    """Insert a cast of a value just before its reader."""
    before = assignment.dtypes[value]
    with graph.inserting_before(reader):
        cast = graph.call_function(cast_floating if isinstance(before, tuple) else CAST, (value, dtype))
    cast.meta = provenance(reader)
    note(cast, made_by=rule)
    if "val" in value.meta:
        cast.meta["val"] = value.meta["val"]
    assignment.dtypes[cast] = recast(before, dtype) if isinstance(before, tuple) else dtype
    assignment.original[cast] = assignment.original[value]
    return cast
