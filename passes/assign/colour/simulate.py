"""One forward run over a graph: the dtype of every node, the casts of its operands, and the dtypes of its results.

What decides, and in which order, is the strategy's: autocast's or a policy's (`strategies.py`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from ...contract.reasons import ByBody, Code
from ...form import Choice
from ...graph.aliases import Aliases, is_opaque
from ...graph.bodies import Body, Border
from ...graph.notes import note_of
from ...graph.values import (
    ELIGIBLE,
    LOW_DTYPES,
    Dtypes,
    ValueDtype,
    first_float,
    is_floating,
    module_types,
    original_dtypes,
)
from ...ops import ops
from ...ops.rules import row_of
from .decide import decide, site_of
from .state import State


class Simulation(State):
    """A run over one graph, node by node, and its results."""

    def run(self) -> None:
        """Colour all nodes, in order."""
        self.restart()
        for node in self.graph.nodes:
            floats: list[ops.Operand] = []
            if node.op.startswith("call"):
                if ops.carries_number(node):
                    continue
                row = row_of(node)
                floats = [o for o in ops.operands(node) if is_floating(self.dtypes[o.node])]
                if row.asks == "item":
                    self.dtypes[node] = self.infer(node, self.dtypes.__getitem__)
                elif any(b.first is not None for b in self.border.bodies.get(node, ())):
                    self._enter(node, self.border.bodies[node][0])
                elif not row.asks and (floats or is_floating(self.original[node])):
                    self._visit(node, floats)
            self.rules.learn(self, node, floats)

    def returned(self) -> Dtypes:
        """Return the dtype that each output of the graph must have."""
        values = self.graph.output_node().all_input_nodes
        if self.border.autocast_outputs:
            return {n: self._output_under_autocast(n) for n in values}
        dtypes = self.original if self.border.restore_outputs else self.dtypes
        return {n: dtypes[n] for n in values}

    def _output_under_autocast(self, value: Node) -> ValueDtype:
        """Return the dtype of an output that is read under autocast: its dtype here or autocast's, if that is wider.

        It is autocast's in any case if the policy asks for that.
        """
        if note_of(value).leaves:
            return note_of(value).leaves_as or self.original[value]
        ours, autocast = note_of(value).low_of_its_own or self.dtypes[value], self.under_autocast(value)
        if isinstance(ours, torch.dtype) and isinstance(autocast, torch.dtype) and {ours, autocast} <= {*ELIGIBLE}:
            low = {ours, autocast} <= {*LOW_DTYPES}  # of the two neither is wider
            return autocast if low or self.policy.output_dtype == "autocast" else torch.promote_types(ours, autocast)
        return ours

    def _enter(self, node: Node, body: Body) -> None:
        """Run through the body of a higher-order op with the dtypes that its operands have here.

        The body's own passes carry out what this run decides. If its result is written in place, and pinned, the body
        returns its original dtypes.
        """
        pinned = not is_opaque(node) and self.aliases.find(node) in self.pinned
        border = Border({p: self.dtypes[v] for p, v in body.operands(node).items()}, pinned, bodies=body.bodies())
        original = original_dtypes(body.graph, body.attribute)
        inside = Simulation(
            self.rules, self.policy, self.target, body.graph, original, self.infer, Aliases(body.graph),
            stacks=module_types(body.graph), border=border,
            reference=None if self.reference is None else self.reference.bodies.get(node),
        )  # fmt: skip
        self.rules.settle(inside)
        self.bodies[node] = inside
        self.dtypes[node] = self.original[node] if pinned else body.dtypes(inside.dtypes)
        why = Code.BODY("its body is rewritten, for the dtypes of its operands")
        why = Code.MUTATED(Code.MUTATED.meaning) if pinned else why
        dtype = first_float(self.dtypes[node]) or torch.float32
        self.colours[node] = Choice(dtype, ByBody(why.code, why.detail))

    def _visit(self, node: Node, floats: list[ops.Operand]) -> None:
        """Decide on one node, and infer the dtypes of its results."""
        site = site_of(self, node, ops.name(node), floats)
        choice = decide(self, site)
        if choice is None:
            return
        choice, results = self.rules.fit(self, site, choice)
        causes = tuple(o.node for o in floats if o.node in self.colours)
        self.colours[node] = replace(choice, reason=replace(choice.reason, causes=causes))
        self.dtypes[node] = results
