"""Where gradients flow: the grad mode of each call, and the values that a trainable parameter reaches."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from .._torch import SET_GRAD
from ..runtime.regions import grad_mode
from .notes import note_of


def grad_modes(graph: Graph) -> dict[Node, tuple[bool | None, int]]:
    """Return, for each node, the grad mode and the number of switches of `torch.func` transforms before it.

    Two casts may be merged only where both agree. The grad mode is True, False, or None if it is that of the caller.
    """
    mode: bool | None = None
    transforms = 0
    asked: dict[Node, bool | None] = {}
    out: dict[Node, tuple[bool | None, int]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is grad_mode:
            asked[node] = mode
        elif node.op == "call_function" and node.target is SET_GRAD:
            wanted: Any = node.args[0]
            mode = asked.get(wanted) if isinstance(wanted, Node) else bool(wanted)
        transforms += "functorch" in (getattr(node.target, "__module__", None) or "")
        out[node] = mode, transforms
    return out


def requires_grad(graph: Graph) -> frozenset[Node]:
    """Return the values that gradients flow through: made from a trainable parameter outside no_grad regions.

    An attribute that is not known to be a buffer may be trainable, and so may anything inside an opaque module.
    """
    out: set[Node] = set()
    modes = grad_modes(graph)
    for node in graph.nodes:
        if not node.op.startswith("call"):
            unknown = node.op == "get_attr" and "val" not in node.meta and note_of(node).role != "buffer"
            if unknown or getattr(node.meta.get("val"), "requires_grad", False):
                out.add(node)
        elif modes[node][0] is not False and (node.op == "call_module" or any(n in out for n in node.all_input_nodes)):
            out.add(node)
    return frozenset(out)
