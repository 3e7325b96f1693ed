"""Recurrent layers that a trace left whole, as functions of their weights.

`torch.fx.symbolic_trace` cannot follow their branches, and calls the module. Autocast has rules for what the module
calls, and casts each of its weights.

Before: rnn(x)                                   rnn: nn.LSTM(8, 16)
After:  lstm(x, None, [rnn.weight_ih_l0, ...], True, 1, ...)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from typing import Any

from torch import nn
from torch.fx import Graph, Node

from .._torch import FakeTensor, FakeTensorMode, pytree, runs_its_forward_alone
from ..graph.notes import OPEN, provenance
from ..runtime import rnn

_FUNCTIONS: dict[type[nn.RNNBase], Callable[..., Any]] = {nn.LSTM: rnn.lstm, nn.GRU: rnn.gru, nn.RNN: rnn.rnn}
_LAST = {nn.LSTM: "proj_size", nn.RNN: "nonlinearity"}  # the setting that only this layer has


def open_layers(graph: Graph, attribute: Callable[[str], Any], whole: Container[Node] = ()) -> int:
    """Replace calls of recurrent layers, but for `whole` and those with hooks or their own forward; return how many."""
    edits = 0
    for node in graph.find_nodes(op="call_module"):
        layer, mode = attribute(str(node.target)), _mode_of(node)
        if node in whole or mode is None or not _is_plain(layer):
            continue
        call = inspect.signature(layer.forward).bind(*node.args, **node.kwargs)
        call.apply_defaults()
        with graph.inserting_before(node):
            weights = [_weight(graph, node, layer, name, mode) for name, _ in layer.named_parameters()]
            opened = graph.call_function(_FUNCTIONS[type(layer)], (*call.args, weights, *_settings(layer)))
        opened.meta = {**provenance(node, OPEN), "val": node.meta["val"]}
        node.replace_all_uses_with(opened)
        graph.erase_node(node)
        edits += 1
    return edits


def _is_plain(layer: nn.Module) -> bool:
    """Say whether a call of a module runs nothing but the function of its type over its own parameters."""
    if type(layer) not in _FUNCTIONS or not runs_its_forward_alone(layer):
        return False
    recurrent: Any = layer
    weights = sum(map(len, recurrent.all_weights))
    return "forward" not in vars(layer) and len(dict(layer.named_parameters())) == weights


def _mode_of(node: Node) -> FakeTensorMode | None:
    """Return the mode of the fake tensors that a call gives, if its result is known."""
    fakes = (v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, FakeTensor))
    return next((v.fake_mode for v in fakes), None)


def _weight(graph: Graph, node: Node, layer: nn.RNNBase, name: str, mode: FakeTensorMode) -> Node:
    weight = graph.get_attr(f"{node.target}.{name}")
    weight.meta = {**provenance(node, OPEN), "val": mode.from_tensor(getattr(layer, name), static_shapes=True)}
    return weight


def _settings(layer: nn.RNNBase) -> tuple[Any, ...]:
    """Return what the function of a layer takes behind its weights."""
    own = _LAST.get(type(layer))
    plain = layer.bias, layer.num_layers, float(layer.dropout), layer.training, layer.bidirectional, layer.batch_first
    return plain if own is None else (*plain, getattr(layer, own))
