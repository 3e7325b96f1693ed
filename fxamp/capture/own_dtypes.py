"""Infer the dtypes that values of a graph captured under autocast have in the model itself, without autocast.

A model that holds low tensors may cast to their dtype. In Dynamo's graph such a cast looks like one whose dtype was
read off a result of autocast. What the model would do without autocast tells the two apart. A doubtful cast is first
assumed to go to FP32. If an op then rejects its operands, or if the cast restores values that were low before the
user's code cast them up, the user wrote the low dtype. So did one where all values before it that had this dtype in the
trace have it in the model itself, as in a region of the author's own round all of a model: it has read the dtype of one
of them, or none. Every other doubtful cast goes to FP32, which loses nothing.

Before: linear(to(x, bfloat16), base), base: bfloat16      to(linear, bfloat16)
After:  the first is bfloat16, since the layer accepts nothing else; the second is float32
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Set
from typing import Any

import torch
from torch.fx import Graph, Node

from passes.graph.bodies import Body
from passes.graph.values import LOW_DTYPES, dtypes_of, literal_dtype
from passes.ops.rules import row_of


def own_dtypes(
    graph: Graph, infer: Callable[[Node, Callable[[Node], Any]], Any], holds: Set[Node], given: Set[Node],
    doubtful: Set[Node], bodies: Mapping[Node, list[Body]], inputs: Mapping[Node, Any] | None = None,
    *, guesses: bool = True,
) -> dict[Node, Any]:  # fmt: skip
    """Return the dtypes that the values of a graph would have without autocast.

    Args:
        graph: `meta["val"]` are its values without the casts of autocast.
        infer: gives a node's output dtypes from those of its operands; raises where the kernel rejects them.
        holds: the inputs that the model itself holds, or has made low.
        given: those that the model was called with; others are not low of their own. An op that rejects one of these
            can only run under autocast, so its result is not low of its own either.
        doubtful: nodes that name a low dtype, which may be the user's or read off a result of autocast.
        bodies: the graphs inside it.
        inputs: for such a graph: the dtypes of its placeholders.
        guesses: take a doubtful dtype for the user's where the values around it suggest so, and not only where an op
            would reject another one.
    """
    nodes = [n for n in graph.nodes if n.meta.get("val") is not None]
    place = {n: i for i, n in enumerate(nodes)}
    own: dict[Node, Any] = {**(inputs or {})}
    authors: set[Node] = set()
    of_given = {*given}
    first: dict[tuple[Any, bool], int] = {}  # where the first value of a dtype in the trace is that has it, or not

    def inside(node: Node, body: Body) -> Any:
        of = body.operands(node)
        held, passed = ({p for p, v in of.items() if v in values} for values in (holds, of_given))
        dtypes = {p: own.get(v) for p, v in of.items()}
        return body.dtypes(
            own_dtypes(body.graph, infer, held, passed, doubtful, body.bodies(), dtypes, guesses=guesses)
        )

    at = 0
    while at < len(nodes):
        node, at = nodes[at], at + 1
        try:
            entered = [body for body in bodies.get(node, ()) if body.first is not None]
            made = inside(node, *entered) if entered else _made(node, infer, own, holds | given)
        except Exception:  # whatever a fake kernel raises
            shown = _shown(node, infer, own, doubtful - authors)
            if shown:
                authors |= shown
                at = min(place[n] for n in shown)
                first = {key: i for key, i in first.items() if i < at}
                continue
            made = dtypes_of(node.meta["val"])
            made = (
                made if any(own.get(n) in LOW_DTYPES for n in {*node.all_input_nodes} - of_given) else without_low(made)
            )
        seen = seen_dtypes(node)
        alone = (seen, True) in first and (seen, False) not in first
        is_low = node not in doubtful or node in authors or (guesses and (alone or _restores_low(node, own, holds)))
        own[node] = made if is_low else without_low(made)
        first.setdefault((seen, own[node] == seen), place[node])
        low = {n for n in node.all_input_nodes if own.get(n) in LOW_DTYPES}
        if low and low <= of_given:
            of_given.add(node)
    return own


def seen_dtypes(node: Node) -> Any:
    """Return the dtypes that a value had while Dynamo traced."""
    return dtypes_of(node.meta.get("example_value"))


def without_low(dtypes: Any, low: Container[torch.dtype | None] = LOW_DTYPES) -> Any:
    """Return dtypes with FP32 in the place of low ones, or of those given."""
    if isinstance(dtypes, tuple):
        return tuple(without_low(d, low) for d in dtypes)
    return torch.float32 if dtypes in low else dtypes


def _made(node: Node, infer: Callable[..., Any], own: dict[Node, Any], holds: Set[Node]) -> Any:
    seen = dtypes_of(node.meta["val"])
    if node.op == "placeholder" and (node in own or node not in holds):
        return own.get(node, without_low(seen))
    if not node.op.startswith("call"):
        return seen
    if row_of(node).higher_order:
        return without_low(seen)
    return infer(node, own.get)


def _shown(node: Node, infer: Callable[..., Any], own: dict[Node, Any], doubtful: Set[Node]) -> set[Node]:
    """Return the doubtful casts that must be the user's, since an op rejects FP32 together with a low operand.

    They are the nearest doubtful casts among the ancestors of its FP32 operands, if the op accepts these operands in
    low.
    """
    low = next((own[n] for n in node.all_input_nodes if own.get(n) in LOW_DTYPES), None)
    if low is None:
        return set()
    made_of = {n: _nearest(n, own, doubtful) for n in node.all_input_nodes if own.get(n) == torch.float32}
    made_of = {n: casts for n, casts in made_of.items() if casts}
    lowered = {**own, **dict.fromkeys(made_of, low)}
    try:
        infer(node, lowered.get)
    except Exception:  # whatever a fake kernel raises
        return set()
    return set(itertools.chain.from_iterable(made_of.values()))


def _nearest(value: Node, own: dict[Node, Any], doubtful: Set[Node]) -> set[Node]:
    """Return the nearest doubtful casts before a value, counted in ops; an empty set if there are none."""
    seen, front = {value}, [value]
    while front:
        if found := doubtful & {*front}:
            return {*found}
        front = [n for node in front for n in node.all_input_nodes if n not in seen and _is_wide(own.get(n))]
        seen.update(front)
    return set()


def _restores_low(cast: Node, own: dict[Node, Any], holds: Set[Node]) -> bool:
    """Say whether a value is computed only from values that user casts brought up from low, weights and numbers aside.

    Before: h = x.float(); h * rsqrt(h.square().mean(-1)); to(mul, bfloat16)        x: bfloat16
    """
    seen, left, found = {cast}, [cast], False
    while left:
        for n in left.pop().all_input_nodes:
            if n in seen or not _is_wide(own.get(n)):
                continue
            seen.add(n)
            if isinstance(before := n.args[0] if n.args and literal_dtype(n) == torch.float32 else None, Node):
                found = True
                if _is_wide(own.get(before)):
                    return False
            elif n.op == "placeholder" and n not in holds:
                return False
            else:
                left.append(n)
    return found


def _is_wide(dtypes: Any) -> bool:
    """Say whether a value, or an item of it, is FP32."""
    return any(map(_is_wide, dtypes)) if isinstance(dtypes, tuple) else bool(dtypes == torch.float32)
