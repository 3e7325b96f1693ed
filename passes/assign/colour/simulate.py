"""One forward run over a graph: the dtype of every node, the casts of its operands, and the dtypes of its results.

`Simulation(..., autocast=True)` does what torch's dispatcher does under autocast. Without it, the policy's pins, the
user's casts and the level decide first (`decide.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from ...contract.reasons import ByBody, Code
from ...form import Choice
from ...graph.aliases import Aliases, is_opaque, may_write
from ...graph.bodies import Body, Border
from ...graph.notes import note_of
from ...graph.values import (
    ELIGIBLE,
    LOW_DTYPES,
    Dtypes,
    ValueDtype,
    dtype_reference,
    first_float,
    is_floating,
    module_types,
    original_dtypes,
)
from ...ops import ops
from ...ops.facts import accumulates
from ...ops.rules import KEEP, LOW, row_of
from .decide import decide, site_of
from .fit import fit_kernel, fit_numbers
from .operand_casts import keep
from .state import State


class Simulation(State):
    """A run over one graph, node by node, and its results."""

    def run(self) -> None:
        """Colour all nodes, in order."""
        self.restart()
        self._pinned_before = len(self.pinned)
        for node in self.graph.nodes:
            if not node.op.startswith("call") or ops.carries_number(node):
                continue
            row = row_of(node)
            floats = [o for o in ops.operands(node) if is_floating(self.dtypes[o.node])]
            if row.asks == "item":
                self.dtypes[node] = self.infer(node, self.dtypes.__getitem__)
            elif any(b.first is not None for b in self.border.bodies.get(node, ())):
                self._enter(node, self.border.bodies[node][0])
            elif not row.asks and (floats or is_floating(self.original[node])):
                self._visit(node, floats)
            if not self.autocast:
                self.extremes.visit(node, row, self.dtypes)
                moves = row.commutes and is_floating(self.dtypes[node])
                if moves and floats and all(o.node in self.upcast for o in floats):
                    self.upcast.add(node)

    def settle(self) -> None:
        """Run until no alias set that is written has members of different dtypes."""
        self.run()
        while not self.autocast and self._pin_conflicts():
            self.run()

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

    def _pin_conflicts(self) -> bool:
        """Pin every mutated alias set whose members got different dtypes; say whether one was not pinned before."""
        for root, members in self.aliases.sets().items():
            # A cast to or from 64 bits is a copy at every level.
            several = len({self.dtypes.get(m) for m in members} & {*ELIGIBLE}) > 1
            if several or (self.aggressive and any(map(self._changes_a_copy, members))):
                self.pinned.add(root)
                self.pinned.update(map(self.aliases.find, self._references_of_new_copies(members)))
        keeps_sums = self.policy.level.keeps_sums_fp32 and not self.autocast
        for node, choice in self.colours.items():
            written = may_write(node)
            low = any(self.dtypes[w] in LOW_DTYPES and self.original[w] == torch.float32 for w in written)
            sums_low = keeps_sums and low and accumulates(node, row_of(node))
            if sums_low or any(o.node in written and o.place in choice.casts for o in ops.operands(node)):
                self.pinned.update(self.aliases.find(w) for w in written)
        return len(self.pinned) > self._pinned_before

    def _references_of_new_copies(self, members: Sequence[Node]) -> list[Node]:
        """Return the values that are low only beyond O1, and so turn a cast that did nothing into a copy."""
        known = filter(None, (dtype_reference(m) for m in members if self.aggressive and row_of(m).is_cast))
        return [_indexed(r) for r in known if self.dtypes[r] != self.original[r] == self.under_autocast(r)]

    def _changes_a_copy(self, node: Node) -> bool:
        """Say whether a copy ends, or begins, the sharing of a written storage because a value is low beyond O1.

        A user cast that made a copy no longer does, since its operand is low; or the value is written after a read that
        makes a copy under autocast.
        """
        value = node.args[0] if row_of(node).is_cast else None
        if isinstance(value, Node) and isinstance(self.dtypes[node], torch.dtype):
            # A dtype that may have been read under autocast says nothing of what is a copy without it.
            runs = (self.under_autocast,) if note_of(node).read else (self.original.get, self.under_autocast)
            if any(of(value) != of(node) for of in runs) and self.dtypes[value] == self.dtypes[node]:
                return True
        if self.dtypes[node] not in LOW_DTYPES or self.under_autocast(node) != torch.float32:
            return False
        readers = (r for r in node.users if r in self.colours and self.colours[r].reason.kind == LOW)
        last = self.aliases.epoch(node, self.graph.output_node())
        return any(self.aliases.epoch(node, r) < last for r in readers)

    def _enter(self, node: Node, body: Body) -> None:
        """Run through the body of a higher-order op with the dtypes that its operands have here.

        The body's own passes carry out what this run decides. If its result is written in place, and pinned, the body
        returns its original dtypes.
        """
        pinned = not self.autocast and not is_opaque(node) and self.aliases.find(node) in self.pinned
        border = Border({p: self.dtypes[v] for p, v in body.operands(node).items()}, pinned, bodies=body.bodies())
        original = original_dtypes(body.graph, body.attribute)
        inside = Simulation(
            self.policy, body.graph, original, self.infer, Aliases(body.graph), autocast=self.autocast,
            stacks=module_types(body.graph), border=border,
            reference=None if self.reference is None else self.reference.bodies.get(node),
        )  # fmt: skip
        inside.settle()
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
        choice, results = fit_kernel(self, node, choice)
        if not self.autocast:
            dtypes = (choice.casts.get(o.place, self.dtypes[o.node]) for o in floats)
            # Complex numbers of 16 bits are made of FP16, from torch 2.15 on of BF16 too.
            halves = isinstance(results, torch.dtype) and results.is_complex and results.itemsize == 4
            if halves and results != self.original[node] and any(d in LOW_DTYPES for d in dtypes):
                why = Code.KEEP("complex numbers are not rounded")
                choice, results = fit_kernel(self, node, keep(self, site.of_kind(KEEP), why))
            choice, results = fit_numbers(self, site, choice, results)
        causes = tuple(o.node for o in floats if o.node in self.colours)
        self.colours[node] = replace(choice, reason=replace(choice.reason, causes=causes))
        self.dtypes[node] = results


def _indexed(value: Node) -> Node:
    """Return the container that an item was taken from, or the value itself, since only the container has a colour."""
    while row_of(value).asks == "item" and isinstance(value.args[0], Node):
        value = value.args[0]
    return value
