"""The exporter's assertions about values whose dtype or device has changed."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Graph, Node

from ..ops import ops


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
