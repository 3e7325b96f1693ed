"""Report code that has reached Dynamo's recompile limit: further calls that need a new graph run unconverted.

Dynamo leaves such code uncompiled for the rest of the process, for other models of the same code too, and only logs
it. Those calls of a view run under autocast; without autocast they run in FP32, and fxamp warns.
"""

from __future__ import annotations

import warnings
import weakref

import torch
from torch import nn

from passes.contract.devices import DEVICES

from .call import current
from .scope import scope

_REACHED: weakref.WeakKeyDictionary[nn.Module, dict[str, bool]] = weakref.WeakKeyDictionary()


def notice(function: str) -> None:
    """Note that some code has reached the limit, and in which compiled module."""
    found = scope()
    if found is None:
        return
    low = current() is not None or any(torch.is_autocast_enabled(device) for device in DEVICES)
    known = _REACHED.setdefault(found.root, {})
    if function not in known and not low:
        warnings.warn(
            f"{function} of {type(found.root).__name__} has reached Dynamo's recompile limit: calls that need another "
            "graph run unconverted from here on, in FP32. Raise torch._dynamo.config.recompile_limit, compile with "
            "dynamic=True, or use fxamp.compile, which runs them under autocast.",
            stacklevel=2,
        )
    known[function] = low


def anywhere() -> list[str]:
    """Return the functions that have reached the limit, in whichever model."""
    return sorted({function for known in _REACHED.values() for function in known})


def reached(root: nn.Module) -> list[str]:
    """Return the notes on a compiled module: which of its code runs unconverted, and how."""
    return [
        f"{function} has reached the recompile limit: calls that need another graph run unconverted, "
        f"{'under autocast' if low else 'in FP32'}"
        for function, low in _REACHED.get(root, {}).items()
    ]
