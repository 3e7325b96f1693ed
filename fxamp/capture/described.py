"""A captured graph as the compiler takes it. Plans under other prices are made of it without another capture."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from passes import Origin, compile_graph
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
        origins: of each node, and of those of the graphs inside, in order.
        notes: what capture has to say, for the plan.
        under_autocast: the graph is called under autocast.
    """

    graph: GraphModule
    policy: Policy
    origins: tuple[Origin, ...]
    notes: tuple[str, ...]
    under_autocast: bool

    @staticmethod
    def of(
        gm: GraphModule, origins: Mapping[Node, Origin], policy: Policy, notes: tuple[str, ...], under_autocast: bool
    ) -> Described:
        """Keep a copy of a graph, and the origins of its nodes."""
        known = tuple(origins.get(node, Origin()) for node in _nodes(gm))
        return Described(copied(gm), policy, known, notes, under_autocast)

    def compile(self, gm: GraphModule, **how: Any) -> Plan:
        """Run the passes over the graph itself or a copy, in place; `how` is for `compile_graph`."""
        origins = dict(zip(_nodes(gm), self.origins, strict=True))
        return compile_graph(
            gm.graph, self.policy, functools.partial(attribute_of, gm), origins, capture="dynamo", notes=self.notes,
            under_autocast=self.under_autocast, **how,
        )  # fmt: skip

    def plan(self, costs: CostModel) -> Plan:
        """Return what is decided under these costs: the passes run over a copy."""
        return self.compile(copied(self.graph), costs=costs)


def _nodes(gm: GraphModule) -> Iterator[Node]:
    """Yield the nodes of a graph, and of the graphs inside it."""
    for node in gm.graph.nodes:
        yield node
        inside = attribute_of(gm, str(node.target)) if node.op == "get_attr" else None
        if isinstance(inside, GraphModule):
            yield from _nodes(inside)
