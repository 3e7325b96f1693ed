"""From O2 on: a cross-entropy is split into its parts, so that only the part that needs FP32 runs in FP32.

Before: cross_entropy_loss(logits: [N, V], target)
After:  picked = nll_loss(log_softmax(logits), target, reduction none); to(picked: [N], f32).sum() / count

The logarithms are rounded where the errors of that kernel scatter on the device; the sum over examples is FP32, and the
cast that it then needs is of the N picked numbers instead of the N x V logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from .._torch import FakeTensor
from ..graph.notes import SPLIT_LOSS, note, origin
from ..ops import ops

aten = torch.ops.aten
_NONE, _MEAN, _SUM = range(3)  # as torch::Reduction has them


def split_losses(graph: Graph) -> int:
    """Split every cross-entropy of FP32 over class indices without weights or smoothing; return how many."""
    edits = 0
    for node in list(graph.nodes):
        if ops.name(node) == "cross_entropy_loss" and _is_plain(node):
            _split(graph, node)
            edits += 1
    return edits


def _is_plain(node: Node) -> bool:
    logits, target = _logits(node), ops.argument(node, "target")
    values = [v.meta.get("val") if isinstance(v, Node) else None for v in (logits, target)]
    if not all(isinstance(v, FakeTensor) for v in values):
        return False
    smooth = ops.argument(node, "label_smoothing", 0.0)
    plain = ops.argument(node, "weight") is None and isinstance(smooth, (int, float)) and smooth == 0
    plain = plain and _reduction(node) is not None and not {"size_average", "reduce"} & node.kwargs.keys()
    given: Any = values[0]
    # The loss of other logits has another dtype than FP32, and the program may read that dtype.
    return plain and given.dtype == torch.float32 and given.dim() == 2 and not values[1].is_floating_point()  # type: ignore[union-attr]


def _logits(node: Node) -> Any:
    return ops.argument(node, "self", ops.argument(node, "input"))  # torch.nn.functional calls it otherwise


def _reduction(node: Node) -> int | None:
    """Return the number of a reduction; None if it is not known."""
    given = ops.argument(node, "reduction", _MEAN)
    if isinstance(given, str):
        # The words of torch.nn.functional.
        return _NONE if given == "none" else _MEAN if given == "mean" else _SUM if given == "sum" else None
    return given if isinstance(given, int) else None


def _split(graph: Graph, node: Node) -> None:
    logits, target = _logits(node), ops.argument(node, "target")
    reduction, ignored = _reduction(node), ops.argument(node, "ignore_index", -100)

    def call(op: Any, *args: Any, **kwargs: Any) -> Node:
        with graph.inserting_before(node):
            made = graph.call_function(op, args, kwargs)
        made.meta = origin(node)
        note(made, made_by=SPLIT_LOSS)
        with logits.meta["val"].fake_mode, torch.no_grad():
            made.meta["val"] = op(*torch.fx.map_arg(args, _value), **torch.fx.map_arg(kwargs, _value))
        return made

    picked = call(aten.nll_loss.default, call(aten.log_softmax.int, logits, 1), target, None, _NONE, ignored)
    result = picked
    if reduction != _NONE:
        result = call(aten.sum.default, picked, dtype=torch.float32)
    if reduction == _MEAN:
        result = call(aten.div.Tensor, result, call(aten.sum.default, call(aten.ne.Scalar, target, ignored)))
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _value(node: Node) -> Any:
    return node.meta["val"]
