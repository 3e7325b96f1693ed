"""Sum the gradients of a weight in the same order as if it were cast at every use.

A kept cast is an input of the graph. So its gradient is added only after the backward of the graph has summed the
gradients of all other reads of the weight. The order of two summands does not matter. With two other reads in the graph
the order would differ, and so would the rounding. In that case the graph casts the weight itself, and does not read the
kept cast. An example is an embedding that is tied to the head, and that the loss reads once more.

Before: loss(head(x, low), w, embedding(ids, w))
After:  loss(head(x, w.to(bfloat16)), w, embedding(ids, w))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from passes._torch import SET_GRAD


def keep_order_of_sums(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Insert casts into a graph from Dynamo for each weight that it reads more than once besides the kept cast."""
    given = dict(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False))
    weights = {id(value): node for node, value in given.items() if isinstance(value, nn.Parameter)}
    differentiable = _with_gradients(gm.graph)
    for low, value in given.items():
        weight = weights.get(id(_cast_from(value)))
        readers = [node for node in differentiable if low in node.all_input_nodes]
        if weight is None or not readers or sum(weight in node.all_input_nodes for node in differentiable) < 2:
            continue
        with gm.graph.inserting_before(readers[0]):
            cast = gm.graph.call_method("to", (weight, value.dtype))
        cast.meta["example_value"] = low.meta.get("example_value")
        for reader in readers:
            reader.replace_input_with(low, cast)
    gm.recompile()


def _cast_from(value: Any) -> Any:
    """Return the leaf that an input of a graph was cast from, None where it was not."""
    made_by = value.grad_fn if isinstance(value, Tensor) else None
    if made_by is None or len(made_by.next_functions) != 1:
        return None
    return getattr(made_by.next_functions[0][0], "variable", None)


def _with_gradients(graph: Graph) -> list[Node]:
    """Return the nodes of a graph that run with gradients on, in order."""
    found, enabled = [], True
    for node in graph.nodes:
        if node.target is SET_GRAD:
            enabled = bool(node.args[0])
        elif enabled:
            found.append(node)
    return found
