"""A call that runs under `torch.autocast`, as one node of a graph.

Graphs that were saved name this function, so it stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def under_autocast(op: Callable[..., Any], device: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """Call an op under `torch.autocast`, which casts what the op calls inside.

    The region is one call, and not two nodes that enter and leave it, since an op may raise: a recomputed checkpoint
    stops by an exception, and autocast would stay on.

    Args:
        op: an operator, or a higher-order op.
        device: the device type of the region.
        dtype: its low dtype.
        *args: what the op is given.
        **kwargs: what the op is given by name.
    """
    with torch.autocast(device, dtype):
        return op(*args, **kwargs)
