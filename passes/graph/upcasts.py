"""What a cast restores, where nothing says what its author read: the dtype that the upcast before it was made from.

Before: h = x.float(); h = h * rsqrt(h.square().mean(-1)); h.to(bfloat16)
After:  the last restores what x had
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from ..ops import ops
from .values import literal_dtype, module_path


def restored(cast: Node, dtypes: Mapping[Node, Any]) -> torch.dtype | None:
    """Return the dtype that the nearest upcast before a cast, in the same module, was made from; None without one.

    Args:
        cast: a call.
        dtypes: of the values before it.
    """
    path, seen, front = module_path(cast), {cast}, [cast]
    while front:
        nearer: list[Node] = []
        for reader in front:
            for operand in ops.operands(reader):
                n = operand.node
                if n in seen or not n.op.startswith("call") or module_path(n) != path:
                    continue
                seen.add(n)
                first: Any = n.args[0] if n.args else None
                upcasts = literal_dtype(n) == torch.float32 and n.meta.get("cast") != "relative"
                found = dtypes.get(first)
                if upcasts and isinstance(found, torch.dtype) and found.is_floating_point:
                    return found
                nearer.append(n)
        front = nearer
    return None
