"""Which values a node reads in the graph before conversion: inserted casts are skipped.

Before: linear(to_dtype(x), to_dtype(weight))        After: linear reads x and weight, each by way of a cast
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch.fx import Graph, Node

from passes.contract.dtypes import dtype_name
from passes.graph.notes import is_inserted, note_of
from passes.graph.values import keys

from .record import Read


def named(graph: Graph, inputs: Sequence[str]) -> dict[Node, str]:
    """Return the name of every input, parameter, buffer and call of a graph.

    Args:
        graph: graph of a converted module.
        inputs: the user's names of the inputs, in order; empty if they are unknown.
    """
    placeholders = graph.find_nodes(op="placeholder")
    given = inputs if len(inputs) == len(placeholders) else [str(node.target) for node in placeholders]
    attributes = {node: str(node.target) for node in graph.find_nodes(op="get_attr")}
    author = keys(n for n in graph.nodes if not is_inserted(n))  # without inserted casts, so that keys stay the same
    return {**dict(zip(placeholders, given, strict=True)), **attributes, **author}


def origins(graph: Graph, names: Mapping[Node, str], decided: Collection[str]) -> dict[Node, tuple[Read, ...]]:
    """Return the origins of every value of a converted graph, as a reading node sees them.

    A node without a decision, mostly on integers, has the origins of its operands.

    Args:
        graph: graph of a converted module.
        names: as `named` gives them.
        decided: keys of the nodes that a plan decides on.
    """
    found: dict[Node, tuple[Read, ...]] = {}
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            found[node] = ()  # a size, which has no dtype to follow
        elif node.op in ("placeholder", "get_attr"):
            attribute = node.op == "get_attr" or note_of(node).role == "parameter"
            found[node] = (Read(names[node], "attribute" if attribute else "input", ""),)
        elif is_inserted(node):
            found[node] = tuple(Read(r.value, r.kind, dtype(node)) for r in found[node.all_input_nodes[0]])
        elif names.get(node) in decided:
            found[node] = (Read(names[node], "node", ""),)
        else:
            found[node] = tuple(Read(r.value, r.kind, "") for r in reads(node, found))
    return found


def reads(node: Node, found: Mapping[Node, tuple[Read, ...]]) -> tuple[Read, ...]:
    """Return the values that a node is given, each once."""
    return tuple(dict.fromkeys(read for operand in node.all_input_nodes for read in found[operand]))


def dtype(node: Node) -> str:
    """Return the dtype of a value, without "torch."."""
    value = node.meta.get("val")
    return dtype_name(value.dtype) if isinstance(value, torch.Tensor) else "unknown"
