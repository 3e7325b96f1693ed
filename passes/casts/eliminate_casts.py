"""Pass 4: drop or share inserted casts that change no value.

There are eight rewrites. All are exact in forward, and all but `read` and `share` in backward too. User casts stay as
they are:

    no_op           to(x: bf16, bf16)                  ->  x
    round_trip      to(to(x: bf16, f32), bf16)         ->  x          (widening and back; never narrowing and back)
    read            a = to(x: bf16, f32); to(to(a, bf16), f32)  ->  a    (an output that is read)
    share           a = to(x, bf16); b = to(x, bf16)   ->  b = a      (no write in between; one grad mode, or a weight)
    author          to(to(x: f32, bf16), bf16)         ->  to(x, bf16)   (the second one is the author's)
    promote         add(to(x: bf16, f32), y: f32)      ->  add(x, y)  (the kernel promotes)
    dtype_argument  sum(to(x: bf16, f32))              ->  sum(x, dtype=f32)
    share_storage   a = to(x, bf16); b = to(x, bf16)   ->  b = again(x, bf16, a)   (a large x that needs gradients)

Some ops take no `dtype=` on a CPU: softmax, log_softmax and the backward of prod cast inside, and the gradients of
norms, cumsum and cumprod would differ. On CUDA all of these do, since autocast itself gives it to them there.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from ..form import Assignment, Ensures, Unit
from ..graph.aliases import Aliases, may_alias
from ..graph.grad import grad_modes, is_leaf, requires_grad, shares_cast, shares_storage, sums_apart, what_it_reads
from ..graph.notes import CLAMP_OPERAND, READ_OUTPUT, is_inserted, note, note_of
from ..graph.values import LOW_DTYPES, literal_dtype
from ..ops import ops
from ..ops.facts import absorbs_cast
from ..ops.rules import row_of
from ..runtime.casts import again, cast_weight


def _widens(before: object, after: object) -> bool:
    """Say whether a cast is one from a 16-bit dtype to FP32."""
    return before in LOW_DTYPES and after == torch.float32


@dataclass(frozen=True)
class EliminateCasts:
    """Drop or share the inserted casts of a graph that change no value."""

    name: ClassVar = "eliminate-casts"
    ensures: ClassVar = Ensures.DTYPES
    # Which readers share a cast, as `Policy.sharing` has it; gradients are then summed in low, as by autocast's cache.
    share: str = "always"

    def __call__(self, unit: Unit) -> dict[str, int]:
        """Make the rewrites in one graph with inserted casts, in place."""
        graph, assignment, device = unit.graph, unit.decided, unit.target.device
        return {
            "no_op": _no_op(graph, assignment),
            "round_trip": _round_trip(graph, assignment),
            "read": _read(graph, self.share),
            "share": _share(graph, assignment, self.share),
            "author": _author(graph),
            "promote": _promote(graph, assignment),
            "dtype_argument": _dtype_argument(graph, assignment, device),
            "share_storage": _share_storage(graph, assignment, self.share, device),
        }


def _no_op(graph: Graph, assignment: Assignment) -> int:
    casts = [c for c in _inserted(graph) if assignment.dtypes[c.all_input_nodes[0]] == c.args[1]]
    return sum(_replace(graph, cast, cast.all_input_nodes[0]) for cast in casts)


def _round_trip(graph: Graph, assignment: Assignment) -> int:
    """Drop two casts, which make a copy, unless it is needed: if x is written, or if a copy leaves the graph."""
    edits, aliases = 0, functools.cache(lambda: Aliases(graph))  # slow to compute, and seldom needed
    for cast in _inserted(graph):
        middle: Any = cast.args[0]
        if not is_inserted(middle) or note_of(cast).made_by == READ_OUTPUT:
            continue
        value = middle.args[0]
        if assignment.dtypes[value] != cast.args[1] or not _widens(cast.args[1], middle.args[1]):
            continue
        if aliases().is_mutated(value) or any(u.op == "output" or may_alias(u) for u in cast.users):
            continue
        edits += _replace(graph, cast, value)
        if not middle.users:
            graph.erase_node(middle)
    return edits


def _read(graph: Graph, mode: str) -> int:
    """Let what reads an output in FP32 read what is handed out, where the gradients of readers may be summed so."""
    grad, edits = requires_grad(graph), 0
    for back in [n for n in graph.nodes if note_of(n).made_by == READ_OUTPUT]:
        wide: Any = back.args[0]
        casts = [c for c in back.users if is_inserted(c) and c.args[1] == torch.float32]
        for cast in (c for c in casts if shares_cast(mode, back, c, False, grad)):
            edits += _replace(graph, cast, wide)
        if not back.users:
            graph.erase_node(back)
    return edits


def _author(graph: Graph) -> int:
    """Drop casts that nothing but a cast of the author's to the same dtype reads."""
    sole = [(c, *c.users, c.all_input_nodes[0]) for c in _inserted(graph) if len(c.users) == 1]
    return sum(_replace(graph, c, x) for c, u, x in sole if row_of(u).is_cast and literal_dtype(u) == c.args[1])


def _share(graph: Graph, assignment: Assignment, mode: str) -> int:
    """Share casts; the first of several may also be a user cast."""
    if mode == "never":
        return 0
    edits, aliases, modes, grad = 0, Aliases(graph), grad_modes(graph), requires_grad(graph)
    first: dict[Any, Node] = {}
    for clamp in [n for n in graph.nodes if note_of(n).made_by == CLAMP_OPERAND]:
        value: Any = clamp.args[0]
        if len(clamp.args) == 1 or not shares_cast(mode, value, clamp, False, grad):
            continue
        key = (what_it_reads(value), *clamp.args[1:], modes[clamp], aliases.epoch(value, clamp))
        keep = first.setdefault(key, clamp)
        if keep is not clamp:
            _replace(graph, clamp, keep)  # so that the casts of it are shared
    for cast in filter(_is_plain, graph.nodes):
        value = cast.args[0]
        if not is_inserted(cast) and not _is_lent(cast, assignment, aliases):
            continue
        by_rule = all(
            u in assignment.colours and assignment.colours[u].lowers and not sums_apart(u) for u in cast.users
        )
        if not shares_cast(mode, value, cast, is_inserted(cast) and by_rule, grad):
            continue
        grad_mode, switches = modes[cast]
        across = is_inserted(cast) and is_leaf(value) and value in grad  # it may be cast for readers of both modes
        key = (*_what_is_cast(cast), across or grad_mode, switches, aliases.epoch(value, cast))
        keep = first.setdefault(key, cast)
        if keep is cast or not is_inserted(cast) or (cast.target is cast_weight and not is_inserted(keep)):
            continue
        if cast.target is cast_weight or modes[keep] != modes[cast]:  # this variant suits all readers
            keep.target = cast_weight
        edits += _replace(graph, cast, keep)
    return edits


def _what_is_cast(cast: Node) -> tuple[Any, ...]:
    """Return a key that is equal for two casts that do the same: the value, and the dtype."""
    return what_it_reads(cast.all_input_nodes[0]), literal_dtype(cast)


def _is_plain(node: Node) -> bool:
    """Say whether a node is a cast, inserted or the author's, that does nothing but give a value a dtype."""
    named = row_of(node).is_cast and literal_dtype(node) is not None
    others = (*node.args[1:], *node.kwargs.values())
    return is_inserted(node) or (named and all(isinstance(a, torch.dtype) for a in others))


def _is_lent(cast: Node, assignment: Assignment, aliases: Aliases) -> bool:
    """Say whether the result of a cast may be that of a later one too: it is a copy, and nobody may write to it."""
    value, dtype = cast.all_input_nodes[0], literal_dtype(cast)
    if aliases.is_mutated(cast) or assignment.dtypes[value] == dtype:
        return False
    if is_inserted(cast) or assignment.original[value] == dtype:
        return True
    views = [cast]
    for view in views:
        if any(user.op == "output" for user in view.users):
            return False
        views += filter(may_alias, view.users)
    return True


def _promote(graph: Graph, assignment: Assignment) -> int:
    """Let the kernel promote; a 0-dim y does not promote x, so that the cast stays."""
    edits = 0
    for cast, reader in _absorbed(graph, assignment, lambda n: row_of(n).promotes_inside):
        value: Any = cast.args[0]
        dtypes = {n: assignment.dtypes[value if n is cast else n] for n in reader.all_input_nodes}
        if assignment.infer(reader, dtypes.__getitem__) == assignment.dtypes[reader]:
            edits += _read_instead(graph, reader, cast)
    return edits


def _share_storage(graph: Graph, assignment: Assignment, mode: str, device: str) -> int:
    """Read the storage of an earlier cast where a cast stood: autograd sums gradients in the order of their nodes."""
    plain = [n for n in graph.nodes if _is_plain(n) and n.target is not cast_weight]
    # What reentrant checkpoints read autocast casts once in forward, however small it is.
    lent = {what_it_reads(n.args[0]) for n in plain if any(map(sums_apart, n.users))}
    casts = [
        n for n in plain
        if shares_storage(mode, n.args[0], device) or (mode.endswith("storage") and what_it_reads(n.args[0]) in lent)
    ]  # fmt: skip
    if len(casts) == len({what_it_reads(c.all_input_nodes[0]) for c in casts}):
        return 0
    edits, aliases, modes, grad = 0, Aliases(graph), grad_modes(graph), requires_grad(graph)
    first: dict[Any, Node] = {}
    for cast in casts:
        value: Any = cast.args[0]
        if value not in grad or not _is_lent(cast, assignment, aliases):
            continue
        key = (*_what_is_cast(cast), modes[cast], aliases.epoch(value, cast))
        if first.setdefault(key, cast) is not cast and is_inserted(cast):
            cast.target, cast.args = again, (*cast.args, first[key])
            edits += 1
    return edits


def _dtype_argument(graph: Graph, assignment: Assignment, device: str) -> int:
    """Before: sum(to(x: bf16, f32)). After: sum(x, dtype=f32). An explicit dtype of the user's stays."""
    edits = 0
    for cast, reader in _absorbed(graph, assignment, lambda n: absorbs_cast(n, device)):
        reader.kwargs = {**reader.kwargs, "dtype": cast.args[1]}
        note(reader, absorbed_cast=True)  # its result has another dtype than captured
        edits += _read_instead(graph, reader, cast)
    return edits


def _absorbed(graph: Graph, assignment: Assignment, takes: Callable[[Node], object]) -> list[tuple[Node, Node]]:
    """Return (cast, reader) for each widening cast whose reader could read the operand of the cast instead.

    The reader saves its operand for backward, so nothing may ever write to that; nor to what a promoting kernel
    returns. Where gradients flow it has to be the only reader: the sum of several readers' gradients would be rounded
    in another place.
    """
    dtypes, modes = assignment.dtypes, grad_modes(graph)
    pairs = [
        (cast, reader)
        for cast in _inserted(graph)
        if _widens(dtypes[cast.all_input_nodes[0]], dtypes[cast])
        for reader in cast.users
        if takes(reader) and modes[cast] == modes[reader] and sum(o.node is cast for o in ops.operands(reader)) == 1
    ]
    if not pairs:
        return pairs
    aliases, grad = Aliases(graph), requires_grad(graph)

    def written(cast: Node, reader: Node) -> bool:
        value: Any = cast.args[0]
        return aliases.is_mutated(value) or (row_of(reader).promotes_inside and aliases.is_mutated(reader))

    absorbed = [(c, r) for c, r in pairs if (len(c.users) == 1 or c not in grad) and not written(c, r)]
    # Of two operands of a reader one stays FP32: rather the one whose cast stays anyway, for readers that need it.
    reads = Counter(c for c, _ in absorbed)
    return sorted(absorbed, key=lambda pair: reads[pair[0]] < len(pair[0].users))


def _read_instead(graph: Graph, reader: Node, cast: Node) -> int:
    """Let a reader of a cast read what is cast."""
    reader.replace_input_with(cast, cast.args[0])  # type: ignore[arg-type]
    if not cast.users:
        graph.erase_node(cast)
    return 1


def _inserted(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op == "call_function" and is_inserted(n)]


def _replace(graph: Graph, cast: Node, value: Node) -> int:
    cast.replace_all_uses_with(value)
    graph.erase_node(cast)
    return 1
