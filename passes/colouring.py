"""The data that passes hand on: the decision on one node, and the decisions on a whole graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from .contract.reasons import Reason

AS_AUTOCAST = "as_autocast"  # a kind: it runs under autocast, whatever is inside
Place = tuple[str, int]  # an operand: argument name, index in a list argument


@dataclass
class Colouring:
    """The decision on one node.

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


@dataclass
class Assignment:
    """The decisions on one graph.

    Attributes:
        colours: the decision of every node that touches a floating value.
        dtypes: the dtype every value will have.
        original: the dtype every value had as captured.
        autocast: the dtype that autocast gives each node of `colours`.
        returned: the dtype that each output of the graph must have.
        infer: gives a node's output dtypes from those of its operands.
        symbolic: dtypes were inferred without shapes.
        bodies: the simulations of the bodies of higher-order ops, which their own passes carry out.
        disagreements: where `torch.autocast` was seen to give other dtypes than the rules say it does.
    """

    colours: dict[Node, Colouring]
    dtypes: dict[Node, Any]
    original: dict[Node, Any]
    autocast: dict[Node, torch.dtype]
    returned: dict[Node, Any]
    infer: Callable[[Node, Callable[[Node], Any]], Any]
    symbolic: bool
    disagreements: list[str] = field(default_factory=list)
    bodies: dict[Node, Any] = field(default_factory=dict)
