"""Sum the gradients of a weight in the same order as if it were cast at every use.

A kept cast is an input of the graph. So its gradient is added only after the backward of the graph has summed the
gradients of all other reads of the weight. The order of two summands does not matter. With two other reads in the graph
the order would differ, and so would the rounding. In that case the graph casts the weight itself, and does not read the
kept cast. An example is an embedding that is tied to the head, and that the loss reads once more.

The gradient of a kept cast that is a leaf is added after backward, so that one other read is one too many.

Before: loss(head(x, low), w, embedding(ids, w))
After:  loss(head(x, w.to(bfloat16)), w, embedding(ids, w))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from passes._torch import SET_GRAD

from ..weights.kept import KeptCast, is_trained_leaf

Read = tuple[KeptCast, Tensor, Tensor]  # a kept cast, its weight and the copy


def keep_order_of_sums(gm: GraphModule, example_inputs: Sequence[Any], kept: Iterable[Read]) -> None:
    """Insert casts into a graph from Dynamo where a sum would have another order, and note which weights it reads once.

    Args:
        gm: The graph.
        example_inputs: Its inputs.
        kept: The kept casts; `KeptCast.alone` is set.
    """
    inputs = {id(value): n for n, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False)}
    differentiable = _with_gradients(gm.graph)

    def readers(value: Tensor) -> list[Node]:
        node = inputs.get(id(value))
        return [] if node is None else [n for n in differentiable if node in n.all_input_nodes]

    for kept_cast, weight, copy in kept:
        low, others = readers(copy), readers(weight)
        if others:
            kept_cast.alone = False
        elif low and kept_cast.alone is None:
            kept_cast.alone = True
        if not low or len(others) < (1 if is_trained_leaf(copy) else 2):
            continue
        with gm.graph.inserting_before(low[0]):
            cast = gm.graph.call_method("to", (inputs[id(weight)], copy.dtype))
        cast.meta["example_value"] = inputs[id(copy)].meta.get("example_value")
        for reader in low:
            reader.replace_input_with(inputs[id(copy)], cast)
    gm.recompile()


def _with_gradients(graph: Graph) -> list[Node]:
    """Return the nodes of a graph that run with gradients on, in order."""
    found, enabled = [], True
    for node in graph.nodes:
        if node.target is SET_GRAD:
            enabled = bool(node.args[0])
        elif enabled:
            found.append(node)
    return found
