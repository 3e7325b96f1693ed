"""Let the exporter record the casts and copies that do nothing, as calls of their own.

If `x` is FP32, `x.float()` returns `x` itself, and the exporter would record every later use of `x` as a use of the
cast. If `x` is contiguous, `x.contiguous()` is not recorded at all. Whether such a call does nothing depends on
autocast and on the kernels that ran before, so two captures of one model would not line up. Therefore each call is
given an alias of its operand, which `drop_aliases` removes from the graph afterwards:

    h.float()       ->  to(alias(h), float32)           a method that names its dtype: the cast is literal
    h.to(dtype)     ->  to(alias(alias(h)), dtype)      `dtype` may be written out, or have been read off a tensor
    h.contiguous()  ->  contiguous(alias(h))
    lstm(h)         ->  lstm(to(alias(alias(alias(h))), bf16))    under autocast: see `passes/ops/recurrent.py`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from passes._torch import TorchFunctionMode
from passes.graph.notes import note
from passes.ops import ops
from passes.ops.recurrent import ALIASES, with_low_operands
from passes.ops.rules import row_of

from .model.captured import Autocast

_ALIAS = torch.ops.aten.alias.default
_METHODS = frozenset(getattr(torch.Tensor, n) for n in ops.CAST_METHODS)
_CASTS = _METHODS | {getattr(torch.Tensor, n) for n in ops.CASTS_TO_GIVEN}
_CONTIGUOUS = torch.ops.aten.contiguous.default


class ExplicitCasts(TorchFunctionMode):
    """Give every cast and every `contiguous()` an alias of its operand.

    Args:
        autocast: the autocast to capture under, whose casts recurrent layers need.
        watch: called with the arguments of each call of torch; may raise to end the capture.
    """

    def __init__(self, autocast: Autocast | None = None, watch: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self._autocast = autocast
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._watch is not None:
            self._watch(args)
        if func in _CASTS and args[0].is_floating_point():
            value = _ALIAS(args[0]) if func in _METHODS else _ALIAS(_ALIAS(args[0]))
            return func(value, *args[1:], **kwargs)
        if func is torch.Tensor.contiguous and args[0].layout is torch.strided:
            return _CONTIGUOUS(_ALIAS(args[0]), **_memory_format(args, kwargs))
        if self._autocast is not None:
            args = with_low_operands(func, args, self._autocast.wanted, self._autocast.dtype)
        return func(*args, **kwargs)


def _memory_format(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"memory_format": args[1]} if len(args) > 1 else kwargs


def drop_aliases(graph: Graph) -> None:
    """Remove the aliases, and note on each cast the meaning of their number.

    After one alias a cast is literal, after more it is undecided. After three, before a recurrent layer, it is removed,
    since the user did not write it.
    """
    behind: dict[Node, int] = {}
    for node in list(graph.nodes):
        if node.target is _ALIAS:
            value: Any = node.args[0]
            behind[node] = behind.get(value, 0) + 1
    for node in list(graph.nodes):
        count = behind.get(node.args[0], 0) if node.args and isinstance(node.args[0], Node) else 0
        if row_of(node).is_cast and count == ALIASES and all(row_of(user).recurrent for user in node.users):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
        elif row_of(node).is_cast and count:
            note(node, cast="literal" if count == 1 else "undecided")
    for node in behind:
        first: Any = node.args[0]
        node.replace_all_uses_with(first)
        graph.erase_node(node)
