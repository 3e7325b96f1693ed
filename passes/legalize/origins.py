"""Before the first pass: what a front end says of each node is checked, and noted on the node.

What the compiler can see for itself no front end has to say: what a get_attr refers to, the type of a module, and
whether the body of a higher-order op is pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, Node

from ..contract.errors import CaptureError
from ..graph.bodies import bodies_of, is_pure
from ..graph.notes import note
from ..graph.origin import Origin, buffer_origin

_FIELDS = tuple(field.name for field in dataclasses.fields(Origin))


def note_origins(graph: Graph, attribute: Callable[[str], Any], origins: Mapping[Node, Origin]) -> None:
    """Note on every node of a graph, and of those inside it, where it comes from.

    Raises:
        CaptureError: an input or a call has no origin.
    """
    for node in graph.nodes:
        origin = _of_attribute(attribute(str(node.target))) if node.op == "get_attr" else origins.get(node)
        if node.op == "output":
            continue
        if not isinstance(origin, Origin):
            raise CaptureError(
                f"node '{node.name}' has no Origin: whoever captured the graph gives compile_graph one for every input "
                "and call, also of the graphs inside it. Origin() says that nothing more is known of a node."
            )
        leaf = type(attribute(str(node.target))).__name__ if node.op == "call_module" else ""
        note(node, **{name: getattr(origin, name) for name in _FIELDS}, leaf=leaf)
    for node, bodies in bodies_of(graph, attribute).items():
        for body in bodies:
            note_origins(body.graph, body.attribute, origins)
        note(node, pure=is_pure(bodies))  # neither an alias nor a write: see `aliases.is_opaque`


def _of_attribute(value: Any) -> Origin:
    buffer = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    return buffer_origin(value) if buffer else Origin()
