"""Inline the exporter's grad-mode and autocast regions; mode switches before and after the body replace the region.

Before: wrap_with_set_grad_enabled(False, body, x)
After:  a = grad_mode(); set_grad(False); ...; set_grad(a)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, GraphModule, Node

from passes._torch import SET_GRAD, enter_autocast, exit_autocast
from passes.graph.bodies import copy_body, put_in_place
from passes.graph.notes import note, note_of
from passes.ops.rules import row_of
from passes.runtime.regions import grad_mode

_CONSTANTS = "_fxamp."  # prefix of attributes that front ends add to those of the model


def inline_regions(graph: Graph, constants: dict[str, Any]) -> int:
    """Replace the exporter's grad-mode and autocast regions by their bodies; return how many.

    Each becomes a switch before and one after its nodes. The settings of an autocast region are also noted on its
    nodes, since the colours replace its switches.

    Args:
        graph: changed in place.
        constants: the values of get_attr targets `_fxamp.NAME`; bodies are removed, and their own constants added.
    """
    edits = 0
    regions = [n for n in graph.nodes if _is_region(n)]
    while regions:
        regions += _inline(graph, regions.pop(), constants)
        edits += 1
    return edits


def _is_region(node: Node) -> bool:
    return row_of(node).switches != ""


def _inline(graph: Graph, node: Node, constants: dict[str, Any]) -> list[Node]:
    """Replace one region by its body; return the regions inside it."""
    settings: list[Any] = list(node.args)
    at = next(i for i, a in enumerate(settings) if isinstance(a, Node))
    settings, holder, operands = settings[:at], settings[at], settings[at + 1 :]
    body: GraphModule = constants[str(holder.target).removeprefix(_CONSTANTS)]
    region = note_of(node).region
    leave: Callable[..., Any]
    with graph.inserting_before(node):
        if row_of(node).switches == "grad":
            leave, entered = SET_GRAD, graph.call_function(grad_mode)
            graph.call_function(SET_GRAD, tuple(settings))
        else:
            device, dtype, enabled, _ = settings
            region = (str(device), bool(enabled), dtype)
            leave, entered = exit_autocast, graph.call_function(enter_autocast, tuple(settings))
        copied, result = copy_body(graph, body.graph, operands)
        graph.call_function(leave, (entered,))
    for new in copied:
        if region is not None and note_of(new).region is None:
            note(new, region=region)
        if new.op == "get_attr":
            held = functools.reduce(getattr, str(new.target).split("."), body)
            new.target = _lift(f"{holder.name}_{new.target}", held, constants)
    put_in_place(graph, node, result)
    if not holder.users:
        graph.erase_node(holder)
        if not any(n.op == "get_attr" and n.target == holder.target for n in graph.nodes):
            del constants[str(holder.target).removeprefix(_CONSTANTS)]
    return [new for new in copied if _is_region(new)]


def _lift(name: str, value: Any, constants: dict[str, Any]) -> str:
    """Keep an attribute of a body as a constant with a new name; return the get_attr target."""
    name = name.replace(".", "_")
    while constants.setdefault(name, value) is not value:
        name += "_"
    return _CONSTANTS + name
