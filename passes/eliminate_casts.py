"""Pass 4: drop or share inserted casts that change no value.

Three rules, each exact; user casts are never touched:

    no_op       to(x: bf16, bf16)                      ->  x
    round_trip  to(to(x: bf16, f32), bf16)             ->  x          (widening and back; never narrowing and back)
    share       a = to(x, bf16); b = to(x, bf16)       ->  b = a      (same grad mode, no write in between)
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.fx import Graph, Node

from .aliases import Aliases, grad_modes, may_alias
from .assign_precision import Assignment
from .insert_casts import CAST, is_inserted

logger = logging.getLogger("fxamp")

_WIDENS = {(torch.float16, torch.float32), (torch.bfloat16, torch.float32)}


def eliminate_casts(graph: Graph, assignment: Assignment, share: str = "always") -> dict[str, int]:
    """Apply the rules; return how often each fired.

    Args:
        graph: with inserted casts; changed in place.
        assignment: the dtype of every value.
        share: "always"; "weights" shares casts of parameters only; "never". Sharing sums the gradients of the readers
            in the low dtype, as autocast's weight cache does.
    """
    edits = {
        "no_op": _no_op(graph, assignment),
        "round_trip": _round_trip(graph, assignment),
        "share": _share(graph, assignment, share),
    }
    logger.debug("eliminate_casts: %s", edits)
    return edits


def _no_op(graph: Graph, assignment: Assignment) -> int:
    """Before: to(x: bf16, bf16). After: x."""
    edits = 0
    for cast in _inserted(graph):
        value: Any = cast.args[0]
        if assignment.dtypes[value] == cast.args[1]:
            edits += _replace(graph, cast, value)
    return edits


def _round_trip(graph: Graph, assignment: Assignment) -> int:
    """Before: to(to(x: bf16, f32), bf16). After: x.

    The casts made a copy. Where x is written, or the copy would leave the graph, it is still needed.
    """
    edits, aliases = 0, Aliases(graph)
    for cast in _inserted(graph):
        middle: Any = cast.args[0]
        if not is_inserted(middle):
            continue
        value = middle.args[0]
        if assignment.dtypes[value] != cast.args[1] or (cast.args[1], middle.args[1]) not in _WIDENS:
            continue
        if aliases.is_mutated(value) or any(u.op == "output" or may_alias(u) for u in cast.users):
            continue
        edits += _replace(graph, cast, value)
        if not middle.users:
            graph.erase_node(middle)
    return edits


def _share(graph: Graph, assignment: Assignment, mode: str) -> int:
    """Before: a = to(x, bf16); b = to(x, bf16). After: a twice. The author's own cast serves as well as one of ours."""
    if mode == "never":
        return 0
    edits, aliases, modes = 0, Aliases(graph), grad_modes(graph)
    first: dict[Any, Node] = {}
    for cast in [n for n in graph.nodes if is_inserted(n) or n.target is CAST]:
        value: Any = cast.args[0]
        is_weight = value.op == "get_attr"
        if not is_inserted(cast) and (aliases.is_mutated(cast) or assignment.dtypes[value] == cast.args[1]):
            continue  # written later, or no copy at all
        if mode == "weights" and not is_weight:
            continue
        # A front end may read one attribute twice.
        same = value.target if is_weight else value
        key = (is_weight, same, cast.target, cast.args[1], modes[cast], aliases.epoch(value, cast))
        keep = first.setdefault(key, cast)
        if keep is not cast and is_inserted(cast):
            edits += _replace(graph, cast, keep)
    return edits


def _inserted(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op == "call_function" and is_inserted(n)]


def _replace(graph: Graph, cast: Node, value: Node) -> int:
    cast.replace_all_uses_with(value)
    graph.erase_node(cast)
    return 1
