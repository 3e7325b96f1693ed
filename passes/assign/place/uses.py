"""Who reads each value of a graph, at which operand, and in which dtype it must find it there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from ...colouring import Position
from ...graph.values import ELIGIBLE, ValueDtype, mutated_operands
from ...ops import ops
from ...ops.rules import FOLLOW, PROMOTE, row_of
from ..colour.simulate import Simulation


class Uses:
    """The uses of all values of one graph, as the simulation left them.

    Attributes:
        free: the nodes whose dtype is open.
        readers: for each value, who reads it, and at which operand.
        needs: the dtype that each operand of a node must have, given the node's present dtype.
    """

    def __init__(self, simulation: Simulation, free: Mapping[Node, None]) -> None:
        self.simulation, self.free, self._returned = simulation, free, simulation.returned()
        self.needs = {n: self._needs(n) for n in simulation.graph.nodes}
        self.readers: dict[Node, list[tuple[Node, Position]]] = {n: [] for n in simulation.graph.nodes}
        for node in simulation.graph.nodes:
            for o in ops.operands(node):
                self.readers[o.node].append((node, o.place))

    def follows(self, reader: Node, where: Position) -> bool:
        """Say whether an operand must have the dtype of its reader, whichever dtype is chosen for that."""
        if reader not in self.free:
            return False
        row = row_of(reader)
        return where[0] not in row.uncast and (not row.cast_arguments or where[0] in row.cast_arguments)

    def upcasts(self, node: Node) -> bool:
        """Say whether the user casts a value up here."""
        colouring = self.simulation.colours.get(node)
        if colouring is None or colouring.kind != "cast" or colouring.dtype != torch.float32:
            return False
        value: Any = node.args[0]
        return self.simulation.dtypes[value] in ELIGIBLE

    def takes_either(self, node: Node) -> bool:
        """Say whether a fixed node reads its operands in whatever dtype they are stored: a comparison, from O2 on."""
        colouring = self.simulation.colours.get(node)
        if colouring is None or not self.simulation.policy.level.stores_low or node in self.free:
            return False
        row = row_of(node)
        plain = colouring.kind in (PROMOTE, FOLLOW) and not (
            colouring.settled or colouring.operand_dtypes or colouring.literals
        )
        return plain and row.gives in ("bool", "int") and not row.same_dtype and not mutated_operands(node)

    def _needs(self, node: Node) -> dict[Position, ValueDtype]:
        simulation, places = self.simulation, {o.place: o.node for o in ops.operands(node)}
        if simulation.policy.level.stores_low and self.upcasts(node):
            return dict.fromkeys(places, torch.float32)  # the user's upcast needs an FP32 operand to do nothing
        if node.op == "output":
            return {p: self._returned[n] for p, n in places.items()}
        casts = simulation.colours[node].operand_dtypes if node in simulation.colours else {}
        return {p: casts[p] if p in casts else simulation.dtypes[n] for p, n in places.items()}
