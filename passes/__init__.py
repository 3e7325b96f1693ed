"""The compiler: a captured graph in, a mixed-precision graph and its plan out.

    legalize          decompose composites, inline regions
    assign_precision  colour every node, with a reason
    insert_casts      make every operand agree with its reader
    eliminate_casts   drop and share the casts that change no value
    verify            before the first pass, and after every one

Imports torch and networkx, never fxamp.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from . import ops
from ._torch import FakeTensor
from .assign_precision import Assignment, assign_precision
from .eliminate_casts import eliminate_casts
from .insert_casts import insert_casts, is_inserted
from .legalize import decompose_composites, drop_autocast_switches
from .plan import Decision, Plan
from .policy import Policy
from .replay import replay
from .split_loss import split_losses
from .values import keys, module_path, no_autocast, original_dtypes, source
from .verify import verify

__all__ = ["compile_graph"]


def compile_graph(
    graph: Graph,
    policy: Policy,
    attribute: Callable[[str], Any],
    *,
    capture: str,
    notes: tuple[str, ...] = (),
    plan: Plan | None = None,
) -> Plan:
    """Run every pass over a graph, in order, in place; return what was decided.

    Args:
        graph: as captured, with flat placeholders and a flat output tuple.
        policy: with dtype and device filled in.
        attribute: resolves the target of a get_attr.
        capture: the front end that made the graph, for the plan.
        notes: what capture has to say, for the plan.
        plan: what to carry out instead of deciding anew.

    Raises:
        PolicyError: the policy does not fit the graph.
        PlanError: the plan does not fit the graph.
        VerificationError: a pass went wrong; the graph is not to be used.
    """
    with no_autocast():
        verify(graph)
        kept = _legalize(graph, policy)
        verify(graph)
        assignment = assign_precision(graph, policy, original_dtypes(graph, attribute), plan)
        if plan is not None:
            replay(graph, assignment, plan)
        decisions = _decisions(graph, assignment)
        inserted = insert_casts(graph, assignment, restore_outputs=policy.output_dtype == "original")
        verify(graph, assignment)
        eliminate_casts(graph, assignment, policy.share_casts)
        verify(graph, assignment)
        annotate(graph, assignment)
    return Plan(
        decisions,
        policy,
        verified="symbolic" if assignment.symbolic else "fake",
        capture=capture,
        notes=(*notes, *(f"composite kept whole: {name}" for name in kept)),
        inserted_casts=inserted,
        casts=sum(is_inserted(n) for n in graph.nodes),
    )


def _legalize(graph: Graph, policy: Policy) -> list[str]:
    """Run the first pass, unless the graph is to stay what it is; return the names of what could not be legalized."""
    if policy.level == "O0":
        return []
    drop_autocast_switches(graph)
    if policy.level == "O2" and "cross_entropy_loss" not in dict(policy.ops):
        split_losses(graph)
    return sorted(set(decompose_composites(graph, policy.device or "cpu")[1]))


def annotate(graph: Graph, assignment: Assignment) -> None:
    """Bring `meta["val"]` up to date, so that `print_readable` shows the dtype of every value."""
    for node in graph.nodes:
        if node.meta.get("val") is not None:
            node.meta["val"] = _retyped(node.meta["val"], assignment.dtypes.get(node))


def _retyped(value: Any, dtype: Any) -> Any:
    """Return a value in the dtype that it now has; a container item by item."""
    if isinstance(value, (tuple, list)) and isinstance(dtype, tuple) and len(value) == len(dtype):
        return type(value)([_retyped(v, d) for v, d in zip(value, dtype, strict=True)])
    if not isinstance(value, torch.Tensor) or not isinstance(dtype, torch.dtype) or value.dtype == dtype:
        return value
    with torch.no_grad(), value.fake_mode if isinstance(value, FakeTensor) else contextlib.nullcontext():
        return value.to(dtype)


def _decisions(graph: Graph, assignment: Assignment) -> tuple[Decision, ...]:
    names = keys(graph)
    return tuple(_decision(node, names, assignment) for node in graph.nodes if node in assignment.colours)


def _decision(node: Node, names: dict[Node, str], assignment: Assignment) -> Decision:
    colouring = assignment.colours[node]
    autocast = assignment.autocast.get(node, colouring.dtype)
    return Decision(
        key=names[node],
        graph=0,
        op=ops.name(node),
        module_path=module_path(node),
        source=source(node),
        colour=_name(colouring.dtype),
        autocast_dtype=_name(autocast),
        kind=colouring.kind,
        reason=colouring.reason,
        causes=tuple(names[c] for c in colouring.causes if c in names),
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
