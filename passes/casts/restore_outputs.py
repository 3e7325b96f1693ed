"""The part of pass 3 that gives the outputs of a graph the dtypes that they must have.

Before: h = linear(x, w): bfloat16; return h, linear(h, v): bfloat16
After:  h = linear(x, w); a = to(h, float32); return a, to(linear(to(a, bfloat16), v), float32)

An output from which another output is computed is the very tensor that is read, so that gradients by it, hooks on it
and `retain_grad` work. Where one cast of it is all that reads it, that cast is handed out. Else the graph reads through
the cast that is handed out: from 16 bits to FP32 and back is exact, forwards and backwards, and the gradients of the
readers are summed in 16 bits as before. Only a gradient by the output itself is added to their sum in FP32.

Views are no readers: outputs that share a storage are views of one cast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from .._torch import pytree
from ..form import Assignment, Unit
from ..graph.notes import READ_OUTPUT, RESTORE_OUTPUT, VIEW_OUTPUT, is_inserted, note
from ..graph.outputs import Outputs, tensor_of, viewed, views_of
from ..graph.values import is_floating, literal_dtype, recast
from ..ops.rules import row_of


def restore_outputs(unit: Unit) -> None:
    """Give each output the dtype that was assigned to it, in place."""
    wanted, output = dict(_wanted(unit.graph, unit.decided)), unit.graph.output_node()
    restoring = _Restoring(unit)
    if widened := unit.decided.widened:
        restoring.hand_out(Outputs(unit.graph, widened))
    for value, dtype in wanted.items():
        if value not in restoring.restored:
            restoring.restored[value] = unit.cast(value, dtype, before=output, by=RESTORE_OUTPUT)
    output.args = torch.fx.map_arg(output.args, lambda n: restoring.restored.get(n, n))


def _wanted(graph: Graph, assignment: Assignment) -> Iterator[tuple[Node, torch.dtype]]:
    """Yield each output that has another dtype than it must have, with that dtype."""
    for value in graph.output_node().all_input_nodes:
        dtype, returned = assignment.dtypes.get(value), assignment.returned.get(value)
        floats = {d for d in pytree.tree_leaves(returned, is_leaf=lambda d: d is None) if is_floating(d)}
        target = floats.pop() if len(floats) == 1 and is_floating(dtype) else None
        if dtype == torch.complex64 and returned == torch.complex32:  # FP16 numbers, which autocast casts up
            yield value, torch.complex32
        elif target is not None and recast(dtype, target) != dtype:
            yield value, target


class _Restoring:
    """The outputs of one graph on their way to the dtypes that they must have."""

    def __init__(self, unit: Unit) -> None:
        self._unit, self._graph = unit, unit.graph
        self._wide: dict[Node, Node] = {}  # what is handed out, by the tensor that it is a cast of
        self.restored: dict[Node, Node] = {}  # for each output, what is handed out

    def hand_out(self, outputs: Outputs) -> None:
        """Hand out low outputs in FP32, so that what reads one reads what is handed out."""
        for root, values in outputs.families.items():
            base = tensor_of(values[0])
            first = base if all(base in views_of(value) for value in values) else root
            read = any(outputs.readers[value] for value in values)
            for value in values:
                at = outputs.after_last_write(value) if read else self._graph.output_node()
                self.restored[value] = self._hand_out(value, first, at, outputs)

    def _hand_out(self, value: Node, first: Node, at: Node, outputs: Outputs) -> Node:
        """Return what is handed out for an output, made before a node, and let its readers read through it."""
        tensor, readers = tensor_of(value), outputs.readers[value]
        if tensor in self._wide:
            return self._wide[tensor]
        if tensor is first and len(readers) == 1 and _is_cast_up(readers[0]) and not outputs.aliases.is_mutated(value):
            return self._wide.setdefault(tensor, readers[0])
        wide = self._widened(value, first, at)
        for cast in [r for r in readers if is_inserted(r) and _is_cast_up(r) and _is_only_viewed(r)]:
            cast.replace_all_uses_with(wide)
            self._graph.erase_node(cast)
            readers.remove(cast)
        if readers:
            low: Any = self._unit.decided.dtypes[value]
            back = self._unit.cast(wide, low, before=at, by=READ_OUTPUT)
            for reader in readers:
                for name in outputs.names(value):
                    reader.replace_input_with(name, back)
        return wide

    def _widened(self, value: Node, first: Node, at: Node) -> Node:
        """Return a cast of a value or, of a view, the same view of a cast of what it views, made before a node."""
        tensor = tensor_of(value)
        if tensor not in self._wide:
            base = None if tensor is first else viewed(tensor)
            if base is None:
                self._wide[tensor] = self._unit.cast(value, torch.float32, before=at, by=RESTORE_OUTPUT)
            else:
                self._wide[tensor] = self._copied(tensor, base, self._widened(base, first, at), at)
        return self._wide[tensor]

    def _copied(self, view: Node, base: Node, wide: Node, at: Node) -> Node:
        with self._graph.inserting_before(at):
            copy = self._graph.node_copy(view, lambda n: wide if n is base else n)
        note(copy, made_by=VIEW_OUTPUT)
        captured, assigned = self._unit.dtypes_of(view)
        self._unit.inserted[copy] = captured, recast(assigned, torch.float32)
        return copy


def _is_cast_up(reader: Node) -> bool:
    """Say whether a node is a plain cast to FP32, fxamp's or the author's, which does nothing in the model itself."""
    plain = is_inserted(reader) or (row_of(reader).is_cast and not reader.kwargs and len(reader.args) <= 2)
    return plain and literal_dtype(reader) == torch.float32


def _is_only_viewed(value: Node) -> bool:
    """Say whether nothing is computed from a value: outputs are views of it."""
    return all(u.op == "output" or (viewed(u) is not None and _is_only_viewed(u)) for u in value.users)
