"""Find out whether a device has a low kernel for an op, if that is not known beforehand: try it once.

Recurrent layers in FP16 need a CPU with FP16 arithmetic; a kernel may lack one of the two low dtypes for some
arguments; and nothing says which dtypes a custom op accepts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..._torch import pytree
from ...contract.devices import DEVICES
from ...graph.values import ELIGIBLE, concrete
from ...ops import ops
from ...ops.rules import row_of


def runs_in(
    node: Node, dtype: torch.dtype, device: str, dtype_of: Callable[[Node], Any], tried: dict[Any, bool]
) -> bool:
    """Say whether an op runs with its floating operands in this dtype; True if that cannot be tried.

    The op runs on zeros of the sizes in the graph, and the random state is restored. If the op fails in the original
    dtypes too, nothing is known about the low one.

    Args:
        node: a call.
        dtype: the low dtype.
        device: where it is to run.
        dtype_of: gives the dtype of a value.
        tried: what was found for the same call of this graph before; added to.
    """
    name = ops.name(node)
    if not row_of(node).tries_low and "::" not in name:
        return True
    if not DEVICES[device].is_here():
        return True
    literals = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: None)
    key = (name, dtype, device, repr(literals))
    if key not in tried:
        low = _runs(node, device, lambda n: dtype if dtype_of(n) in ELIGIBLE else None)
        tried[key] = low or not _runs(node, device, lambda n: None)
    return tried[key]


def _runs(node: Node, device: str, dtype_of: Callable[[Node], torch.dtype | None]) -> bool:
    def zeros(arg: Node) -> Any:
        value = arg.meta["val"] if "val" in arg.meta else torch.empty(1, device=device)  # captured without inputs
        return pytree.tree_map(lambda v: _zeros(v, dtype_of(arg)), value)

    target: Any = node.target
    try:
        with torch.random.fork_rng(), torch.no_grad():
            args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), zeros)
            if node.op == "call_method":
                getattr(args[0], target)(*args[1:], **kwargs)
            else:
                target(*args, **kwargs)
    except Exception:  # whatever a kernel raises that does not take the dtype
        return False
    return True


def _zeros(value: Any, dtype: torch.dtype | None) -> Any:
    made = concrete(value, dtype)
    return made.zero_() if isinstance(made, torch.Tensor) else made
