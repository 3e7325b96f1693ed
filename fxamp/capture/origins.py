"""The origins of a graph's nodes while a front end describes them, one fact after another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from passes.graph.origin import Origin


class Origins(dict[Node, Origin]):
    """What a front end knows of each node so far; of one that it has not come to, nothing."""

    def __missing__(self, node: Node) -> Origin:
        return Origin()

    def add(self, node: Node, **facts: Any) -> None:
        """Add facts, fields of an Origin, to what is known of a node."""
        self[node] = replace(self[node], **facts)
