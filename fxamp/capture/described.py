"""A captured graph as the compiler takes it. Plans under other prices are made of it without another capture."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from passes import compile_graph
from passes.contract.costs import CostModel
from passes.contract.plan import Plan
from passes.contract.policy import Policy

from .capture_jit import attribute_of
from .compiled import copied


@dataclass(frozen=True)
class Described:
    """A graph of Dynamo's that was described, before any pass.

    Attributes:
        graph: a copy, which no pass changes.
        policy: with dtype and device filled in.
        notes: what capture has to say, for the plan.
        under_autocast: the graph is called under autocast.
    """

    graph: GraphModule
    policy: Policy
    notes: tuple[str, ...]
    under_autocast: bool

    def compile(self, gm: GraphModule, **how: Any) -> Plan:
        """Run the passes over the graph itself or a copy, in place; `how` is for `compile_graph`."""
        return compile_graph(
            gm.graph, self.policy, functools.partial(attribute_of, gm), capture="dynamo", notes=self.notes,
            under_autocast=self.under_autocast, **how,
        )  # fmt: skip

    def plan(self, costs: CostModel) -> Plan:
        """Return what is decided under these costs: the passes run over a copy."""
        return self.compile(copied(self.graph), costs=costs)
