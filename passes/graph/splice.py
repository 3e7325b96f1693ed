"""Put one graph into another: a copy of a body where a call of it stood."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from .notes import note, note_of


def copy_body(graph: Graph, body: Graph, operands: list[Any]) -> tuple[list[Node], Any]:
    """Copy a body to the insertion point of a graph, with these operands; return the new nodes and the results."""
    copied: dict[Any, Any] = dict(zip((n for n in body.nodes if n.op == "placeholder"), operands, strict=True))
    new = []
    for inner in body.nodes:
        if inner.op not in ("placeholder", "output"):
            copied[inner] = graph.node_copy(inner, copied.__getitem__)
            new.append(copied[inner])
    return new, torch.fx.map_arg(body.output_node().args[0], copied.__getitem__)


def put_in_place(graph: Graph, node: Node, result: Any) -> None:
    """Replace a node by new values for all its readers, item by item if there are several."""
    if isinstance(result, Node):
        before = note_of(node)
        if before.leaves or before.low_of_its_own:
            note(result, leaves=before.leaves, leaves_as=before.leaves_as, low_of_its_own=before.low_of_its_own)
        node.replace_all_uses_with(result)
    else:
        for item in list(node.users):
            item.replace_all_uses_with(result[item.args[1]])
            graph.erase_node(item)
    graph.erase_node(node)
