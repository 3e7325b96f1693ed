"""The dtypes that recurrent layers give under autocast, passed to a capture.

Under autocast a device runs them by a fused kernel, with every operand low. Fake tensors have no such kernel, and run
the layers step by step, which gives FP32. So when they are captured under autocast, their operands are cast explicitly;
the front end removes these casts from the graph afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from .._torch import pytree
from ..contract.devices import DEVICES
from ..runtime.casts import ELIGIBLE
from .facts import rule_of
from .rules import LOW, ROWS, lookup

ALIASES = 3  # `alias` nodes before the cast of an operand
_GATES = {"lstm": 4, "gru": 3}  # the number of gates of a layer; other layers have one


def with_low_operands(func: Callable[..., Any], args: Any, device: str, low: torch.dtype) -> Any:
    """Return the arguments of a call of torch as autocast hands them to the kernel of a recurrent layer."""
    if func not in run_low(device, low):
        return args
    node: Any = SimpleNamespace(args=args, kwargs={}, op="call_function", target=func)
    if rule_of(node, device, low)[1] != LOW:
        return args

    def cast(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in ELIGIBLE:
            return value
        for _ in range(ALIASES):
            value = torch.ops.aten.alias.default(value)
        return torch.ops.aten.to.dtype(value, low)

    return pytree.tree_map(cast, args)


@functools.cache
def run_low(device: str, low: torch.dtype) -> frozenset[Callable[..., Any]]:
    """Return torch's recurrent layers that return low values under autocast; all, if the device is absent.

    Layers of size 1 are run: the first call in a process must come before a capture, which would record them.
    """
    names = [row.name for row in ROWS if row.recurrent and lookup(row.name, device, low)[1] == LOW]
    here = DEVICES[device].is_here()
    return frozenset(getattr(torch, n) for n in names if not here or _gives_low(n, device, low))


def _gives_low(name: str, device: str, low: torch.dtype) -> bool:
    zeros = functools.partial(torch.zeros, device=device)
    state = zeros(1, 1, 1)
    gates = _GATES.get(name, 1)
    weights = [zeros(gates, 1), zeros(gates, 1), zeros(gates), zeros(gates)]
    states = (state, state) if name == "lstm" else state
    try:
        with torch.no_grad(), torch.autocast(device, low, cache_enabled=False):
            made = getattr(torch, name)(zeros(1, 1, 1), states, weights, True, 1, 0.0, False, False, False)
    except RuntimeError:  # the device has no kernel for this dtype
        return False
    return bool(made[0].dtype == low)
