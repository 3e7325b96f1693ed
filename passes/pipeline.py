"""The passes, in order: a captured graph in, a mixed-precision graph and its plan out.

    legalize          decompose composites, inline regions
    assign_precision  colour every node, with a reason
    insert_casts      make every operand agree with its reader
    eliminate_casts   drop and share the casts that change no value
    verify            before the first pass, and after every one

Each is a room of its own; `compile_graph` is their table of contents.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ._torch import FakeTensor
from .assign.assign_precision import Assignment, assign_precision
from .assign.colour.extremes import note_buffers
from .assign.place.measured_costs import Timer
from .assign.replay import replay
from .casts.eliminate_casts import eliminate_casts
from .casts.insert_casts import insert_casts
from .casts.verify import verify
from .contract.errors import PlanError, VerificationError
from .contract.plan import REMEDY, Decision, Plan
from .contract.policy import Policy, check_used
from .graph.bodies import Body, Border, all_graphs, bodies_of
from .graph.by_rows import original_dtypes
from .graph.values import keys, module_path, module_types, no_autocast, retyped, source
from .legalize.legalize import decompose_composites, drop_autocast_switches, index_fields
from .legalize.reads import apply_reads
from .legalize.split_loss import split_losses
from .notes import is_inserted
from .ops import ops

__all__ = ["compile_graph"]


def compile_graph(
    graph: Graph,
    policy: Policy,
    attribute: Callable[[str], Any],
    *,
    capture: str,
    notes: tuple[str, ...] = (),
    plan: Plan | None = None,
    own: frozenset[tuple[int, str]] | None = None,
    timer: Timer | None = None,
    under_autocast: bool = False,
) -> Plan:
    """Run every pass over a graph, in order, in place; return what was decided.

    Args:
        graph: as captured, with flat placeholders and a flat output tuple.
        policy: with dtype and device filled in.
        attribute: resolves the target of a get_attr.
        capture: the front end that made the graph, for the plan.
        notes: what capture has to say, for the plan.
        plan: what to carry out instead of deciding anew.
        own: which of its decisions, by graph and key, this graph must have; None for all.
        timer: measures calls, for cost="measured".
        under_autocast: the graph is called under autocast, and so is what reads its outputs, which therefore keep the
            dtypes that autocast gives them; unless the level is O0.

    Raises:
        PolicyError: the policy does not fit the graph.
        PlanError: the plan does not fit the graph.
        VerificationError: a pass went wrong; the graph is not to be used.
    """
    compilation = _Compilation(policy, plan, own, timer)
    with no_autocast():
        verify(graph)
        compilation.legalize(graph, attribute)
        bodies = bodies_of(graph, attribute) if policy.level != "O0" else {}
        if capture != "jit":  # a model may break into several graphs, and an override match in one of them
            inside = all_graphs(graph, bodies)
            stacks = {n: s for g in inside for n, s in module_types(g).items()}
            check_used(policy, stacks.values(), (ops.name(n) for n in stacks))
        compilation.run(graph, attribute, _border_of(policy, under_autocast, bodies))
    if plan is not None and any(d.graph >= compilation.graphs for d in plan.decisions):
        raise PlanError(f"the plan decides on more graphs than the {compilation.graphs} of this model; {REMEDY}")
    return Plan(
        tuple(compilation.decisions),
        policy,
        verified="symbolic" if compilation.symbolic else "fake",
        capture=capture,
        notes=(
            *notes, *(f"composite kept whole: {name}" for name in sorted(compilation.kept)), *compilation.unsized(),
            *dict.fromkeys(f"defect of a rule: {text}" for text in compilation.disagreements),
        ),
        inserted_casts=compilation.inserted,
        casts=compilation.casts,
    )


def _border_of(policy: Policy, under_autocast: bool, bodies: dict[Node, list[Body]]) -> Border:
    """Return what holds at the edges of the outermost graph."""
    original = policy.output_dtype == "original"
    return Border({}, original, original and under_autocast and policy.level != "O0", bodies)


class _Compilation:
    """The passes over one graph and the bodies inside it, and what they decided."""

    def __init__(
        self, policy: Policy, plan: Plan | None, own: frozenset[tuple[int, str]] | None, timer: Timer | None
    ) -> None:
        self.policy, self.plan, self.own, self.timer = policy, plan, own, timer
        self.decisions: list[Decision] = []
        self.kept: set[str] = set()
        self.disagreements: list[str] = []
        self.graphs = self.inserted = self.casts = 0
        self.symbolic = False

    def legalize(self, graph: Graph, attribute: Callable[[str], Any]) -> None:
        """Run the first pass over a graph and over those inside it."""
        if self.policy.level == "O0":
            return
        apply_reads(graph, exact=self.policy.level == "O1")
        self.kept.update(_legalize(graph, self.policy))
        note_buffers(graph, attribute)
        verify(graph)
        for body in itertools.chain.from_iterable(bodies_of(graph, attribute).values()):
            self.legalize(body.graph, body.attribute)

    def run(self, graph: Graph, attribute: Callable[[str], Any], border: Border) -> Assignment:
        """Run the other passes over a graph, and over those inside it."""
        policy, index = self.policy, self.graphs
        self.graphs += 1
        plan = self.plan and replace(self.plan, decisions=tuple(d for d in self.plan.decisions if d.graph == index))
        assignment = assign_precision(graph, policy, original_dtypes(graph, attribute), plan, border, self.timer)
        if plan is not None:
            own = None if self.own is None else frozenset(key for at, key in self.own if at == index)
            replay(graph, assignment, plan, own)
        self.decisions += _decisions(graph, assignment, index)
        self.disagreements += assignment.disagreements
        self.symbolic |= assignment.symbolic
        self.inserted += insert_casts(graph, assignment)
        for node, inside in border.bodies.items():
            for body in inside:
                self._enter(node, body, assignment)
        verify(graph, assignment)
        eliminate_casts(graph, assignment, policy.share_casts)
        verify(graph, assignment)
        annotate(graph, assignment)
        self.casts += sum(is_inserted(n) for n in graph.nodes)
        return assignment

    def unsized(self) -> list[str]:
        """Return the note on a graph without shapes."""
        placed = self.symbolic and self.policy.level != "O0"
        return ["captured without shapes: placed by unit costs, where every cast costs the same"] if placed else []

    def _enter(self, node: Node, body: Body, outside: Assignment) -> None:
        """Compile the body of a higher-order op between the dtypes that hold at its border."""
        entered = body.first is not None
        given = {p: outside.dtypes[v] for p, v in body.operands(node).items()} if entered else {}
        inside = self.run(body.graph, body.attribute, Border(given, not entered, bodies=body.bodies()))
        body.module.recompile()
        made = body.dtypes(inside.dtypes)
        if entered and made != outside.dtypes[node]:
            raise VerificationError(
                f"the body of {node.name} gives {made}, its plan says {outside.dtypes[node]}. "
                "This is a bug in fxamp; please report it."
            )


def _legalize(graph: Graph, policy: Policy) -> list[str]:
    """Run the first pass over one graph; return the names of what could not be legalized."""
    drop_autocast_switches(graph)
    index_fields(graph)
    if policy.level == "O2" and "cross_entropy_loss" not in dict(policy.ops):
        split_losses(graph)
    return sorted(set(decompose_composites(graph, policy.device or "cpu")[1]))


def annotate(graph: Graph, assignment: Assignment) -> None:
    """Bring `meta["val"]` up to date, so that `print_readable` shows the dtype of every value.

    A cast of a fake tensor takes a hundred times as long as to look up one of the same sizes that was made before.
    """
    made: dict[Any, Any] = {}
    for node in graph.nodes:
        value, dtype = node.meta.get("val"), assignment.dtypes.get(node)
        if isinstance(value, FakeTensor) and isinstance(dtype, torch.dtype):
            if value.dtype != dtype:
                key = (value.fake_mode, dtype, *_layout(value))
                made[key] = node.meta["val"] = made[key] if key in made else retyped(value, dtype)
        elif value is not None:
            node.meta["val"] = retyped(value, dtype)


def _layout(value: torch.Tensor) -> list[Any]:
    """Return all of a tensor but its numbers and its dtype; symbolic sizes as expressions, which can be compared."""
    if value.layout is not torch.strided:
        return [id(value)]
    sizes = (*value.shape, *value.stride())
    return [value.device, value.dim(), *(s if isinstance(s, int) else s.node.expr for s in sizes)]


def _decisions(graph: Graph, assignment: Assignment, index: int) -> list[Decision]:
    names = keys(graph.nodes)
    return [_decision(node, names, assignment, index) for node in graph.nodes if node in assignment.colours]


def _decision(node: Node, names: dict[Node, str], assignment: Assignment, index: int) -> Decision:
    colouring = assignment.colours[node]
    autocast = assignment.autocast.get(node, colouring.dtype)
    return Decision(
        key=names[node],
        graph=index,
        op=ops.name(node),
        module_path=module_path(node),
        source=source(node),
        colour=_name(colouring.dtype),
        autocast_dtype=_name(autocast),
        kind=colouring.kind,
        reason=str(colouring.reason),
        code=colouring.reason.code.value,
        causes=tuple(names[c] for c in colouring.causes if c in names),
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
