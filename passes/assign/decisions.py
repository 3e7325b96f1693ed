"""The decisions on a graph in the form of a plan."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from ..colouring import Colours
from ..contract.dtypes import dtype_name
from ..contract.plan import Decision
from ..graph.values import keys, module_path, source
from ..ops import ops


def decisions_on(
    graph: Graph, colours: Colours, autocast: Mapping[Node, torch.dtype], index: int
) -> tuple[Decision, ...]:
    """Return the decisions on a graph, in its order.

    Args:
        graph: before any cast is inserted.
        colours: the decision on each node that touches a floating value.
        autocast: the dtype that autocast runs each of them in.
        index: the number of the graph in the plan.
    """
    names = keys(graph.nodes)
    return tuple(
        Decision(
            key=names[node],
            graph=index,
            op=ops.name(node),
            module_path=module_path(node),
            source=source(node),
            colour=dtype_name(colours[node].dtype),
            autocast_dtype=dtype_name(autocast.get(node, colours[node].dtype)),
            kind=colours[node].kind,
            reason=str(colours[node].reason),
            code=colours[node].reason.code.value,
            causes=tuple(names[c] for c in colours[node].causes if c in names),
        )
        for node in graph.nodes
        if node in colours
    )
