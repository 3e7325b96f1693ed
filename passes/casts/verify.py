"""The checks before the first pass and after every pass. A graph that fails a check is not returned.

Dtypes are recomputed as they were decided, which finds what is inconsistent. A table of laws says what is legal in a
graph with inserted casts. The laws do not ask how a cast came about: they say where none may stand, and where one may
not be missing.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from ..contract.errors import VerificationError
from ..contract.reasons import OVERRIDE
from ..form import Assignment, SetDtype, UnderAutocast
from ..graph.aliases import Aliases, may_alias, may_write, shared_operands
from ..graph.grad import grad_modes
from ..graph.notes import CAST_OPERAND, is_inserted, note_of
from ..graph.values import ELIGIBLE, LOW_DTYPES, Dtypes, ValueDtype, dtype_owner, module_path, refuse_mixed, source
from ..ops import ops
from ..ops.rules import KEEP, LOW, row_of
from ..runtime.casts import cast_weight

_REPORT = "This is a bug in fxamp; please report it."


def verify(graph: Graph, assignment: Assignment | None = None) -> None:
    """Check the graph's structure and, once casts are in, the dtype that every value was assigned, and the laws."""
    _verify_structure(graph)
    if assignment is None:
        return
    dtypes: Dtypes = {}
    for node in graph.nodes:
        if node.op.startswith("call") and node not in assignment.dtypes:
            raise VerificationError(f"{_name(node)} has no dtype: a pass inserts what it needs with Unit.insert.")
        dtypes[node] = _dtypes(node, dtypes, assignment)
        expected = assignment.dtypes.get(node)
        if node.op.startswith("call") and dtypes[node] != expected:
            raise VerificationError(f"{_name(node)} gives {dtypes[node]}, its plan says {expected}. {_REPORT}")
    breach = broken(graph, assignment)
    if breach is not None:
        node, operand, law = breach
        raise VerificationError(f"{_name(node)}, operand {operand.name}: {law.says} (law: {law.name}). {_REPORT}")


def _verify_structure(graph: Graph) -> None:
    seen: set[Node] = set()
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            if operand not in seen:
                raise VerificationError(
                    f"{_name(node)} reads {operand.name} before it is made, or after it was erased. {_REPORT}"
                )
        seen.add(node)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a get_attr of a training flag is no parameter; fx warns
        try:
            graph.lint()
        except Exception as e:
            raise VerificationError(f"the graph is malformed: {e}. {_REPORT}") from e


def _dtypes(node: Node, operands: Dtypes, assignment: Assignment) -> ValueDtype:
    """Return the dtypes that a node gives, from those that its operands have."""
    if node.op == "placeholder":
        return assignment.dtypes.get(node)  # an input of a body has the dtype that its caller passes
    if not node.op.startswith("call"):
        return assignment.original.get(node)
    choice = assignment.colours.get(node)
    region = choice is not None and choice.has(UnderAutocast)
    opaque = node.op == "call_module" or row_of(node).higher_order
    if opaque or region or "functorch" in (getattr(node.target, "__module__", None) or ""):
        return assignment.dtypes.get(node)  # the operands are checked where they are cast
    sources = [dtype_owner(n) or n for n in node.all_input_nodes]
    # During capture an autocast region cast operands; a node in it that has a colour is cast by fxamp instead.
    region = choice is not None and choice.reason.kind != KEEP and note_of(node).region is not None
    as_captured = not region and all(operands[n] == assignment.original.get(n) for n in sources)
    # Casts of operands may have become the user's own cast, so that operands have their captured dtypes again.
    touched = is_inserted(node) or note_of(node).absorbed_cast
    touched |= choice is not None and (choice.has(SetDtype) or bool(choice.casts))
    before = assignment.original.get(node)
    unknown = before is None and assignment.dtypes.get(node) is not None  # capture tells no value of `requires_grad_`
    if as_captured and not unknown and not touched:
        return before
    try:
        refuse_mixed(node, operands.__getitem__)
        return assignment.infer(node, operands.__getitem__)
    except Exception as e:
        if as_captured or not _runs_as_captured(node, assignment):
            return assignment.dtypes.get(node)  # fake tensors cannot run it, whatever was changed
        read = [str(operands[n]) for n in node.all_input_nodes]
        raise VerificationError(f"{_name(node)} rejects its operands {read}: {type(e).__name__}: {e}. {_REPORT}") from e


def _runs_as_captured(node: Node, assignment: Assignment) -> bool:
    """Say whether a fake kernel accepts the original dtypes; some accept none, for example with an empty batch."""
    try:
        assignment.infer(node, lambda n: assignment.original.get(n, assignment.dtypes.get(n)))
    except Exception:  # whatever a fake kernel raises
        return False
    return True


def _name(node: Node) -> str:
    return f"{ops.name(node) or node.op} (node {node.name}, module '{module_path(node)}', {source(node)})"


class Emitted:
    """A graph with inserted casts, and what was decided on it; what the laws ask of it is computed once."""

    def __init__(self, graph: Graph, assignment: Assignment) -> None:
        self.graph, self.assignment = graph, assignment
        self.order, self.grad_modes = {node: i for i, node in enumerate(graph.nodes)}, grad_modes(graph)

    @functools.cached_property
    def copies(self) -> dict[Node, Node]:
        """Values that an inserted cast made, or that may be views of such a value, each with the cast."""
        casts: dict[Node, Node] = {}
        for node in self.graph.nodes:
            if is_inserted(node):
                casts[node] = node
            elif node.op.startswith("call") and not casts.keys().isdisjoint(node.all_input_nodes) and may_alias(node):
                bases = (casts[n] for n in shared_operands(node) if n in casts and not self._is_copied(n, node))
                casts.update((node, base) for base in [*bases][:1])
        return casts

    def _is_copied(self, value: Node, node: Node) -> bool:
        """Say whether a node is a user cast that makes a copy of a value, as captured and as emitted."""
        dtypes, original = self.assignment.dtypes, self.assignment.original
        return row_of(node).is_cast and dtypes[value] != dtypes[node] and original.get(value) != original.get(node)

    @functools.cached_property
    def writes(self) -> dict[Node, list[int]]:
        """Where each alias set of the model's values is written, or may be; by representative."""
        times: dict[Node, list[int]] = {}
        for node, at in self.order.items():
            for value in may_write(node):
                times.setdefault(self.aliases.find(value), []).append(at)
        return times

    @functools.cached_property
    def aliases(self) -> Aliases:
        """Which values share storage, if casts are none; computed if something is written."""
        return Aliases(self.graph)

    def is_written_between(self, value: Node, first: Node, last: Node) -> bool:
        """Say whether the storage of a value may be written after one node and before another."""
        times = self.writes.get(self.aliases.find(value), []) if self.writes else []
        return any(self.order[first] < at < self.order[last] for at in times)


class Law(NamedTuple):
    """One law: `broken` gives the operand by which a node breaks it, or the node; `says` ends a sentence about that."""

    name: str
    broken: Callable[[Emitted, Node], Node | None]
    says: str


def _first(nodes: Any) -> Node | None:
    return next(iter(nodes), None)


def _written_copy(emitted: Emitted, node: Node) -> Node | None:
    """Illegal: add_(to(x, bf16), y), whose sum the model looks for in x."""
    if not node.op.startswith("call") or emitted.copies.keys().isdisjoint(node.all_input_nodes):
        return None
    return _first(n for n in may_write(node) if n in emitted.copies)


def _stale_copy(emitted: Emitted, node: Node) -> Node | None:
    """Illegal: v = view(to(x, bf16)); add_(x, y); relu(v), which the model runs on the sum."""
    casts = {n: emitted.copies[n] for n in node.all_input_nodes if n in emitted.copies}
    return _first(n for n, c in casts.items() if emitted.is_written_between(c.all_input_nodes[0], c, node))


def _missing_cast(emitted: Emitted, node: Node) -> Node | None:
    """Illegal: linear(x: f32, to(w, bf16)), decided to run in BF16. An op with a dtype argument casts by itself."""
    choice = emitted.assignment.colours.get(node)
    if choice is None or choice.dtype not in LOW_DTYPES or ops.argument(node, "dtype") is not None:
        return None
    if choice.reason.kind not in (LOW, OVERRIDE):
        return None
    dtypes = emitted.assignment.dtypes
    casts = (o.node for o in ops.operands(node) if o.name not in row_of(node).uncast and dtypes[o.node] in ELIGIBLE)
    return _first(n for n in casts if dtypes[n] != choice.dtype)


def _cast_statistics(emitted: Emitted, node: Node) -> Node | None:
    """Illegal: batch_norm(x, w, b, to(mean, bf16), var, ...): the kernel takes FP32 statistics beside a low x."""
    original, uncast = emitted.assignment.original, row_of(node).uncast
    return _first(
        o.node
        for o in (ops.operands(node) if uncast else ())
        if o.name in uncast and is_inserted(o.node) and o.node.args[1] in LOW_DTYPES
        and original.get(o.node.args[0]) != o.node.args[1]  # type: ignore[arg-type]
    )  # fmt: skip


def _other_grad_mode(emitted: Emitted, node: Node) -> Node | None:
    """Illegal: a cast made under no_grad whose result is read with gradients on; a weight is cast with its history."""
    modes = emitted.grad_modes  # beside them the transforms of torch.func, whose end reads what was cast inside
    read = node.all_input_nodes if node.op != "output" else ()
    inserted = (n for n in read if is_inserted(n) and n.target is not cast_weight)
    others = (n for n in inserted if modes[n][0] != modes[node][0])
    return _first(n for n in others if note_of(n).made_by == CAST_OPERAND or False in (modes[n][0], modes[node][0]))


def _no_float(emitted: Emitted, node: Node) -> Node | None:
    """Illegal: to(ids: i64, bf16), to(x: f64, bf16). What is cast as it turns out at run time is legal."""
    if not is_inserted(node):
        return None
    value: Any = node.args[0]
    dtype = emitted.assignment.dtypes[value]
    complexes = isinstance(dtype, torch.dtype) and dtype.is_complex and node.args[1].is_complex  # type: ignore[union-attr]
    return None if dtype in ELIGIBLE or isinstance(dtype, tuple) or complexes else value


LAWS = (
    Law("written copy", _written_copy, "may write to it, but it is a cast, or a view of one: the write is lost"),
    Law("stale copy", _stale_copy, "reads it after a write to what was cast: the write is not seen"),
    Law("missing cast", _missing_cast, "runs in 16 bits, and its rule casts this operand, which has another dtype"),
    Law("cast statistics", _cast_statistics, "has a rule that never casts this operand to 16 bits"),
    Law("other grad mode", _other_grad_mode, "reads a cast that was made in another grad mode"),
    Law("no float", _no_float, "casts a value that autocast never casts"),
    Law("unread", lambda _, n: n if is_inserted(n) and not n.users else None, "is a cast that nothing reads"),
)


def broken(graph: Graph, assignment: Assignment) -> tuple[Node, Node, Law] | None:
    """Return the first node that breaks a law, the operand it breaks it by, and the law; None if there is none."""
    emitted = Emitted(graph, assignment)
    for node in graph.nodes:
        for law in LAWS:
            operand = law.broken(emitted, node)
            if operand is not None:
                return node, operand, law
    return None
