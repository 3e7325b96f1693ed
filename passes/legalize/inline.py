"""The call of a graph, replaced by a copy of that graph.

Before: y = body(x, w)                    body: linear(x, w)
After:  y = linear(x, w)
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node, map_arg

from ..graph.notes import note, note_of


def copy_body(graph: Graph, body: Graph, operands: list[Any]) -> tuple[list[Node], Any]:
    """Copy a body to the insertion point of a graph, with these operands; return the new nodes and the results."""
    copied: dict[Any, Any] = dict(zip((n for n in body.nodes if n.op == "placeholder"), operands, strict=True))
    new = []
    for inner in body.nodes:
        if inner.op not in ("placeholder", "output"):
            copied[inner] = graph.node_copy(inner, copied.__getitem__)
            new.append(copied[inner])
    return new, map_arg(body.output_node().args[0], copied.__getitem__)


def put_in_place(graph: Graph, node: Node, result: Any) -> None:
    """Replace a node by new values for all its readers, item by item if there are several."""
    if isinstance(result, Node):
        before = note_of(node)
        if before.leaves or before.low_of_its_own:
            note(result, leaves=before.leaves, leaves_as=before.leaves_as, low_of_its_own=before.low_of_its_own)
        node.replace_all_uses_with(result)
    elif isinstance(result, (tuple, list)):
        for item in list(node.users):
            put_in_place(graph, item, result[item.args[1]])  # type: ignore[index]
    graph.erase_node(node)
