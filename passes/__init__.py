"""The compiler: a captured graph in, a mixed-precision graph and its plan out.

    legalize          decompose composites, inline regions
    assign_precision  colour every node, with a reason
    insert_casts      make every operand agree with its reader
    eliminate_casts   drop and share the casts that change no value
    verify            before the first pass, and after the casts are in

Imports torch and networkx, never fxamp.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph

from ._torch import FakeTensor
from . import ops
from .assign_precision import Assignment, assign_precision
from .eliminate_casts import eliminate_casts
from .insert_casts import insert_casts, is_inserted
from .legalize import decompose_composites, drop_autocast_switches
from .plan import Decision, Plan
from .policy import Policy
from .replay import replay
from .values import keys, module_path, original_dtypes, source
from .verify import verify

__all__ = ["compile_graph"]


def compile_graph(
    graph: Graph, policy: Policy, attribute: Callable[[str], Any], *, capture: str, notes: tuple[str, ...] = (), plan: Plan | None = None
) -> Plan:
    """Run every pass over a graph, in order, in place; return what was decided.

    Args:
        graph: as captured, with flat placeholders and a flat output tuple.
        policy: with dtype and device filled in.
        attribute: resolves the target of a get_attr.
        capture: the front end that made the graph, for the plan.
        notes: what capture has to say, for the plan.
        plan: colours to replay instead of deciding them.
    """
    verify(graph)
    composites: list[str] = []
    if policy.level != "O0":
        drop_autocast_switches(graph)
        _, composites = decompose_composites(graph, policy.device or "cpu")
    assignment = assign_precision(graph, policy, original_dtypes(graph, attribute))
    if plan is not None:
        replay(graph, assignment, plan)
    names = keys(graph)
    decisions = tuple(_decision(node, names, assignment) for node in graph.nodes if node in assignment.colours)
    inserted = insert_casts(graph, assignment, restore_outputs=policy.output_dtype == "original")
    eliminate_casts(graph, assignment, policy.share_casts)
    verify(graph, assignment if policy.level != "O0" else None)
    annotate(graph, assignment)
    return Plan(
        decisions,
        policy,
        verified="symbolic" if assignment.symbolic else "fake",
        capture=capture,
        notes=(*notes, *(f"composite kept whole: {name}" for name in sorted(set(composites)))),
        inserted_casts=inserted,
        casts=sum(is_inserted(n) for n in graph.nodes),
    )


def annotate(graph: Graph, assignment: Assignment) -> None:
    """Bring `meta["val"]` up to date, so that `print_readable` shows the dtype of every value."""
    for node in graph.nodes:
        value, dtype = node.meta.get("val"), assignment.dtypes.get(node)
        if isinstance(value, torch.Tensor) and isinstance(dtype, torch.dtype) and value.dtype != dtype:
            with contextlib.ExitStack() as stack:
                if isinstance(value, FakeTensor):
                    stack.enter_context(value.fake_mode)
                node.meta["val"] = value.detach().to(dtype)


def _decision(node: Any, names: dict[Any, str], assignment: Assignment) -> Decision:
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
