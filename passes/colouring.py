"""The data that passes hand on: the decision on one node, and the decisions on a whole graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from .contract.plan import Decision
from .contract.reasons import Reason
from .graph.values import Dtypes, Infer

AS_AUTOCAST = "as_autocast"  # a kind: it runs under autocast, whatever is inside
Position = tuple[str, int]  # an operand: argument name, index in a list argument


@dataclass(frozen=True)
class Colouring:
    """The decision on one node.

    Attributes:
        dtype: what the node runs in.
        kind: the kind of the rule, or "override", "region", "cast", "body", "as_autocast".
        reason: why.
        operand_dtypes: the operands that must be cast, and to what.
        set_dtype: the new dtype argument of a relative user cast.
        literals: Python numbers to replace, (old, new).
        clamped: operands to bring into the low dtype's range first.
        causes: the nodes whose decisions this one follows from.
        settled: no placement of values may change the dtype that the node runs in.
    """

    dtype: torch.dtype
    kind: str
    reason: Reason
    operand_dtypes: Mapping[Position, torch.dtype] = field(default_factory=dict)
    set_dtype: torch.dtype | None = None
    literals: tuple[tuple[float, float], ...] = ()
    clamped: tuple[Position, ...] = ()
    causes: tuple[Node, ...] = ()
    settled: bool = False


Colours = dict[Node, Colouring]


@dataclass(frozen=True)
class Assignment:
    """The decisions on one graph.

    Attributes:
        colours: the decision of every node that touches a floating value.
        dtypes: the dtype every value will have; passes add those of the nodes that they insert.
        original: the dtype every value had as captured.
        returned: the dtype that each output of the graph must have.
        infer: gives a node's output dtypes from those of its operands.
        disagreements: where `torch.autocast` was seen to give other dtypes than the rules say it does.
        bodies: the simulations of the bodies of higher-order ops, which their own passes carry out.
        autocast: the dtype that autocast runs each node of `colours` in.
        decisions: the colours in the form of the plan.
    """

    colours: Colours
    dtypes: Dtypes
    original: Dtypes
    returned: Dtypes
    infer: Infer
    disagreements: tuple[str, ...] = ()
    bodies: Mapping[Node, Any] = field(default_factory=dict)
    autocast: Mapping[Node, torch.dtype] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
