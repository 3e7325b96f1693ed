"""One forward run over a graph: the dtype of every node, the casts of its operands, and the dtypes of its results.

`Simulation(..., autocast=True)` does what torch's dispatcher does under autocast. Without it, the policy's pins, the
user's casts and the level decide first (`decide.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from ...colouring import Colouring
from ...contract.reasons import Code
from ...graph.aliases import is_opaque, may_write
from ...graph.bodies import Body, Border
from ...graph.by_rows import original_dtypes
from ...graph.notes import note_of
from ...graph.values import (
    ANY,
    ELIGIBLE,
    LOW_DTYPES,
    Aliases,
    Dtypes,
    ValueDtype,
    dtype_reference,
    first_float,
    is_floating,
    is_known,
    module_types,
)
from ...ops import ops
from ...ops.facts import accumulates
from ...ops.rules import KEEP, row_of
from .decide import decide, site_of
from .fit_numbers import fit_numbers
from .operand_casts import keep
from .result_dtypes import fit_kernel
from .state import State


class Simulation(State):
    """A run over one graph, node by node, and its results."""

    def run(self) -> None:
        """Colour all nodes, in order."""
        self.restart()
        self._pinned_before = len(self.pinned)
        for node in self.graph.nodes:
            if not node.op.startswith("call"):
                continue
            name = ops.name(node)
            floats = [o for o in ops.operands(node) if is_floating(self.dtypes[o.node]) or self.dtypes[o.node] is ANY]
            if row_of(node).asks:
                if row_of(node).asks == "item":
                    self.dtypes[node] = self.infer(node, self.dtypes.__getitem__)
            elif any(b.first is not None for b in self.border.bodies.get(node, ())):
                self._enter(node, self.border.bodies[node][0])
            elif floats or is_floating(self.original[node]):
                self._visit(node, name, floats)
            if not self.autocast:
                self._learn(node, name)

    def settle(self) -> None:
        """Run until no alias set that is written has members of different dtypes."""
        self.run()
        while not self.autocast and self.pin_conflicts():
            self.run()

    def returned(self) -> Dtypes:
        """Return the dtype that each output of the graph must have."""
        values = self.graph.output_node().all_input_nodes
        if self.border.autocast_outputs:
            return {n: self._output_under_autocast(n) for n in values}
        held = self.original if self.border.restore_outputs else self.dtypes
        return {n: held[n] for n in values}

    def _output_under_autocast(self, value: Node) -> ValueDtype:
        """Return the dtype of an output that is read under autocast: its dtype here or autocast's, if that is wider.

        It is autocast's in any case if the policy asks for that.
        """
        if note_of(value).leaves:
            return note_of(value).leaves_as or self.original[value]
        held = note_of(value).low_of_its_own or self.dtypes[value]
        autocast = self.under_autocast(value)
        if isinstance(held, torch.dtype) and isinstance(autocast, torch.dtype) and {held, autocast} <= {*ELIGIBLE}:
            return autocast if self.policy.output_dtype == "autocast" else torch.promote_types(held, autocast)
        return held

    def pin_conflicts(self) -> bool:
        """Pin every mutated alias set whose members got different dtypes; say whether one was not pinned before."""
        for root, members in self.aliases.sets().items():
            if self._sharing_changes(members):
                self.pinned.add(root)
                self.pinned.update(map(self.aliases.find, self._references_of_new_copies(members)))
        for node, colouring in self.colours.items():
            written = may_write(node)
            sums_low = self.policy.level.keeps_sums_fp32 and not self.autocast and self._sums_low(node, written)
            if sums_low or any(o.node in written and o.place in colouring.operand_dtypes for o in ops.operands(node)):
                self.pinned.update(self.aliases.find(w) for w in written)
        return len(self.pinned) > self._pinned_before

    def _sharing_changes(self, members: Sequence[Node]) -> bool:
        """Say whether casts would end, or begin, the sharing of a storage that is written."""
        held = {self.dtypes.get(m) for m in members}
        # Without shapes the dtype of `y.to(x.dtype)` is unknown; at run time the cast may return y itself.
        unknown = any(self.dtypes.get(m) is ANY and not is_opaque(m) for m in members)
        changed = any(self.dtypes.get(m) != self.original.get(m) for m in members)
        if len(held & {*ELIGIBLE}) > 1 or (unknown and changed):  # a cast to or from 64 bits is a copy at every level
            return True
        return any(self._copy_vanishes(m) or self._written_after_copy(m) for m in members)

    def _references_of_new_copies(self, members: Sequence[Node]) -> list[Node]:
        """Return the values that are low only beyond O1, and so turn a cast that did nothing into a copy."""
        references = [dtype_reference(m) for m in members if self.aggressive and row_of(m).is_cast]
        known = [r for r in references if r is not None and self.original[r] == self.under_autocast(r)]
        return [_indexed(r) for r in known if self.dtypes[r] != self.original[r]]

    def _copy_vanishes(self, node: Node) -> bool:
        """Say whether a user cast that made a copy no longer does, because its operand is low beyond O1."""
        value = node.args[0] if self.aggressive and row_of(node).is_cast else None
        if not isinstance(value, Node) or not isinstance(self.dtypes[node], torch.dtype):
            return False
        copied = any(held(value) != held(node) for held in (self.original.get, self.under_autocast))
        return copied and bool(self.dtypes[value] == self.dtypes[node])

    def _written_after_copy(self, value: Node) -> bool:
        """Say whether a value that is low beyond O1 is written after a read that makes a copy under autocast."""
        if not self.aggressive or self.autocast or self.dtypes[value] not in LOW_DTYPES:
            return False
        if self.under_autocast(value) != torch.float32:
            return False
        seeds = (r for r in value.users if r in self.colours and self.colours[r].kind == "low")
        last = self.graph.output_node()
        return any(self.aliases.epoch(value, r) < self.aliases.epoch(value, last) for r in seeds)

    def _sums_low(self, node: Node, written: Sequence[Node]) -> bool:
        """Say whether many values are summed in place into a low value that is FP32 in the user's code."""
        row = row_of(node)
        low = any(self.dtypes[w] in LOW_DTYPES and self.original[w] == torch.float32 for w in written)
        return low and accumulates(node, row)

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
        dtype = first_float(self.dtypes[node]) or torch.float32
        why = (
            Code.MUTATED(Code.MUTATED.meaning)
            if pinned
            else Code.BODY("its body is rewritten, for the dtypes of its operands")
        )
        self.colours[node] = Colouring(dtype, "body", why)

    def _visit(self, node: Node, name: str, floats: list[ops.Operand]) -> None:
        """Decide on one node, and infer the dtypes of its results."""
        site = site_of(self, node, name, floats)
        colouring = decide(self, site)
        if colouring is None:
            return
        colouring, made = fit_kernel(self, node, colouring)
        why = self._refused(node, made) if not self.autocast and self._runs_low(floats, colouring) else ""
        if why:
            colouring, made = fit_kernel(self, node, keep(self, site.of_kind(KEEP), Code.KEEP(why)))
        if not self.autocast:
            colouring, made = fit_numbers(self, site, colouring, made)
        causes = tuple(o.node for o in floats if o.node in self.colours)
        self.colours[node], self.dtypes[node] = replace(colouring, causes=causes), made

    def _refused(self, node: Node, made: ValueDtype) -> str:
        """Return why a node that reads low values must keep its captured dtypes, "" if it may run with low operands."""
        if not is_known(made):
            return "the dtype of its result is not known without shapes"
        # Of FP16 numbers; from torch 2.15 on of BF16 ones too.
        low = isinstance(made, torch.dtype) and made.is_complex and made.itemsize == 4
        return "complex numbers are not rounded" if low and made != self.original[node] else ""

    def _runs_low(self, floats: list[ops.Operand], colouring: Colouring) -> bool:
        return any(colouring.operand_dtypes.get(o.place, self.dtypes[o.node]) in LOW_DTYPES for o in floats)

    def _learn(self, node: Node, name: str) -> None:
        """Derive from the operands whether the result was upcast by the user, or is out of the low range."""
        row = row_of(node)
        self.extremes.visit(node, name, row, self.dtypes)
        if not is_floating(self.dtypes[node]):
            return
        inputs = [o.node for o in ops.operands(node) if is_floating(self.dtypes[o.node])]
        if inputs and row.commutes and all(i in self.upcast for i in inputs):
            self.upcast.add(node)


def _indexed(value: Node) -> Node:
    """Return the container that an item was taken from, or the value itself, since only the container has a colour."""
    while row_of(value).asks == "item" and isinstance(value.args[0], Node):
        value = value.args[0]
    return value
