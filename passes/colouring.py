"""What is decided for one node, as the passes hand it on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from .contract.reasons import Reason

AS_AUTOCAST = "as_autocast"  # a kind: it runs under autocast, whatever is inside
Place = tuple[str, int]  # an operand: argument name, index in a list argument


@dataclass
class Colouring:
    """What was decided for one node.

    Attributes:
        dtype: what the node runs in.
        kind: the kind of the rule, or "override", "region", "cast", "as_autocast".
        reason: why.
        casts: the operands that must be cast, and to what.
        set_dtype: the new dtype argument of a relative user cast.
        literals: Python numbers to replace, (old, new).
        clamped: operands to bring into the low dtype's range first.
        causes: the nodes whose decisions this one follows from.
    """

    dtype: torch.dtype
    kind: str
    reason: Reason
    casts: dict[Place, torch.dtype] = field(default_factory=dict)
    set_dtype: torch.dtype | None = None
    literals: tuple[tuple[float, float], ...] = ()
    clamped: tuple[Place, ...] = ()
    causes: tuple[Node, ...] = ()
