"""The dtypes that recurrent layers give under autocast, passed to a capture.

A device runs them under autocast by a fused kernel, with every operand low. Fake tensors have no such kernel, and run
them step by step, which gives FP32. So where they are captured under autocast their operands are cast, by casts that
the front end takes out of the graph again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from .._torch import pytree
from ..contract.devices import DEVICES
from ..runtime.casts import ELIGIBLE
from .facts import rule_of
from .rules import LOW

_LAYERS: tuple[Callable[..., Any], ...] = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
ALIASES = 3  # `alias` nodes before the cast of an operand


def with_low_operands(func: Callable[..., Any], args: Any, device: str, low: torch.dtype) -> Any:
    """Return the arguments of a call of torch as autocast hands them to the kernel of a recurrent layer."""
    if func not in _LAYERS:
        return args
    node: Any = SimpleNamespace(args=args, kwargs={}, op="call_function", target=func)
    if rule_of(node, device, low)[1] != LOW or not _gives(func, device, low):
        return args

    def cast(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in ELIGIBLE:
            return value
        for _ in range(ALIASES):
            value = torch.ops.aten.alias.default(value)
        return torch.ops.aten.to.dtype(value, low)

    return pytree.tree_map(cast, args)


def ask(model: nn.Module, device: str, low: torch.dtype) -> None:
    """Try the device's own kernels now: during capture there are only fake tensors."""
    if any(isinstance(m, nn.RNNBase) for m in model.modules()):
        for func in _LAYERS:
            _gives(func, device, low)


@functools.cache
def _gives(func: Callable[..., Any], device: str, low: torch.dtype) -> bool:
    """Say whether a layer of size 1 returns low values under autocast; assume so for a device that is not here."""
    if not DEVICES[device].is_here():
        return True
    zeros = functools.partial(torch.zeros, device=device)
    gates = {torch.lstm: 4, torch.gru: 3}.get(func, 1)
    state = (zeros(1, 1, 1), zeros(1, 1, 1)) if func is torch.lstm else zeros(1, 1, 1)
    weights = [zeros(gates, 1), zeros(gates, 1), zeros(gates), zeros(gates)]
    try:
        with torch.no_grad(), torch.autocast(device, low, cache_enabled=False):
            made = func(zeros(1, 1, 1), state, weights, True, 1, 0.0, False, False, False)
    except RuntimeError:  # the device has no kernel for this dtype
        return False
    return bool(made[0].dtype == low)
