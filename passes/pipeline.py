"""The passes, in order: a captured graph in, a mixed-precision graph and its plan out.

`Pipeline.of` is their table of contents. What happens between two passes, verification above all, is a `Watcher`'s. The
bodies of higher-order ops go through the same passes as the graph around them.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, Node

from .assign.assign_precision import AssignPrecision
from .casts.annotate import Annotate
from .casts.eliminate_casts import EliminateCasts
from .casts.insert_casts import CAST_REWRITES, InsertCasts
from .casts.run_under_autocast import RunUnderAutocast
from .casts.split_norms import SplitNorms
from .casts.verify import verify
from .contract.costs import CostModel
from .contract.errors import PlanError, PolicyError, VerificationError
from .contract.plan import Plan
from .contract.plan_format import REMEDY
from .contract.policy import Level, Policy, Target, check_used
from .form import Assignment, Ensures, Pass, Unit
from .graph.bodies import Border, all_graphs, bodies_of, is_pure
from .graph.notes import Origin, is_inserted, note, note_origins
from .graph.values import keys, module_types, no_autocast
from .legalize.legalize import Legalize
from .ops import ops
from .ops.facts import this_machine
from .ops.rules import COMPOSITE
from .runtime.casts import again


@dataclass(frozen=True)
class Pipeline:
    """The passes, in order.

    Raises:
        PolicyError: there is no decision.
    """

    prepare: tuple[Pass, ...]  # run over all graphs of a model before anything is decided
    decide: Pass  # returns the Assignment of a graph
    rewrite: tuple[Pass, ...]  # carry out on each graph what was decided on it

    def __post_init__(self) -> None:
        if not callable(self.decide):
            raise PolicyError(
                f"a pipeline needs a pass that decides the dtype of each node, and decide={self.decide!r} is none: "
                "take AssignPrecision, as Pipeline.of(policy).decide is."
            )

    @staticmethod
    def of(policy: Policy, plan: Plan | None = None, exact: bool = True, costs: CostModel | None = None) -> Pipeline:
        """Return the default for a policy; the arguments are those of `compile_graph`."""
        return Pipeline(
            prepare=(Legalize(policy),) if policy.level.rounds else (),
            decide=AssignPrecision(policy, plan, exact, costs),
            rewrite=(
                InsertCasts(),
                EliminateCasts(policy.sharing),
                *((SplitNorms(),) if policy.level.stores_low else ()),
                RunUnderAutocast(),
                Annotate(),
            ),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the passes."""
        return tuple(step.name for step in (*self.prepare, self.decide, *self.rewrite))


NAMES = Pipeline.of(Policy(level=Level.O2)).names


def compile_graph(
    graph: Graph,
    policy: Policy,
    attribute: Callable[[str], Any],
    origins: Mapping[Node, Origin],
    *,
    capture: str = "graph",
    notes: tuple[str, ...] = (),
    plan: Plan | None = None,
    exact: bool = True,
    costs: CostModel | None = None,
    pipeline: Pipeline | None = None,
    under_autocast: bool = False,
) -> Plan:
    """Run every pass over a graph, in order, in place; return what was decided.

    Args:
        graph: as captured, with flat placeholders and a flat output tuple.
        policy: with dtype and device filled in.
        attribute: resolves the target of a get_attr, and the path of a module that the graph calls.
        origins: what its front end knows of each input and call, of the graphs inside it too.
        capture: what made the graph, for the plan: "dynamo" or "graph".
        notes: what capture has to say, for the plan.
        plan: the plan to carry out instead of deciding.
        exact: the plan is of this very graph, and must fit it; False for one of the same model in another state.
        costs: prices what the cut chooses among; None counts bytes.
        pipeline: the passes, in the place of the default, whose decision has a plan and costs of its own.
        under_autocast: the graph is called under autocast, and so is what reads its outputs, which therefore keep the
            dtypes that autocast gives them; unless the level is O0.

    Raises:
        CaptureError: an input or a call has no origin.
        PolicyError: the policy does not fit the graph: an override matches nothing, or two contradict each other; an op
            is banned or, with unknown_ops="error", unknown; costs are to be measured, but nothing can be run; prices
            are negative or no integers; a pipeline decides nothing, or is given beside a plan or costs.
        PlanError: the plan does not fit the graph, or stores a value low that a reader needs in FP32.
        VerificationError: a pass went wrong; the graph is not to be used.
    """
    if pipeline is not None and (plan is not None or costs is not None):
        raise PolicyError("a pipeline decides by a plan and costs of its own: give them to Pipeline.of.")
    target, steps = Target.of(policy), pipeline or Pipeline.of(policy, plan, exact, costs)
    with no_autocast(), _collector_off():
        verify(graph)
        _note(graph, attribute, origins)
        edits: Counter[str] = Counter()
        _prepare(Unit(graph, attribute, target), steps.prepare, edits, set())
        bodies = bodies_of(graph, attribute) if policy.level.rounds else {}
        if capture != "dynamo":  # an override has to match in only one of several graphs
            every = all_graphs(graph, bodies)
            stacks = {n: s for g in every for n, s in module_types(g).items()}
            named = [k for g in every for k in keys(g.nodes).values()]
            check_used(policy, stacks.values(), (*(ops.name(n) for n in stacks), *named))
        original = policy.output_dtype == "original"
        autocasts = policy.level.rounds and (policy.output_dtype == "autocast" or (original and under_autocast))
        outermost = Unit(graph, attribute, target, Border({}, original, autocasts, bodies))
        units = _compiled(outermost, (steps.decide, *steps.rewrite), edits, {})
    if plan is not None and exact and any(d.graph >= len(units) for d in plan.decisions):
        raise PlanError(f"the plan has more graphs than the {len(units)} of this model; {REMEDY}")
    result = _plan_of(policy, capture, notes, units, edits)
    return result if plan is None else replace(result, timings={**plan.timings, **result.timings})


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Have Python collect cycles later: a full collection looks at every object, of which a large graph has many."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _note(graph: Graph, attribute: Callable[[str], Any], origins: Mapping[Node, Origin]) -> None:
    """Note on every node of a graph, and of those inside it, where it comes from, and which bodies are pure."""
    note_origins(graph, attribute, origins)
    for node, bodies in bodies_of(graph, attribute).items():
        for body in bodies:
            _note(body.graph, body.attribute, origins)
        note(node, pure=is_pure(bodies))  # neither an alias nor a write: see `aliases.is_opaque`


def _prepare(unit: Unit, steps: Sequence[Pass], edits: Counter[str], done: set[Graph]) -> None:
    """Run the first passes over a graph and over those inside it; over one that several calls share only once."""
    if not steps or unit.graph in done:
        return
    unit = replace(unit, index=len(done))
    done.add(unit.graph)
    _run(unit, steps, edits)
    for body in itertools.chain.from_iterable(bodies_of(unit.graph, unit.attribute).values()):
        _prepare(Unit(body.graph, body.attribute, unit.target), steps, edits, done)


def _compiled(unit: Unit, steps: Sequence[Pass], edits: Counter[str], done: dict[Graph, Assignment]) -> list[Unit]:
    """Decide on a graph and rewrite it, then those inside it; return them all, in the plan's order.

    A body that several calls share keeps its original dtypes at its border, so that one pass over it serves all calls.
    """
    unit = _run(replace(unit, index=len(done)), steps, edits)
    done[unit.graph] = unit.decided
    units = [unit]
    for node, inside in unit.border.bodies.items():
        for body in inside:
            if body.graph not in done:
                simulated = None if body.first is None else unit.decided.bodies[node]
                border = Border(bodies=body.bodies()) if simulated is None else simulated.border
                entered = Unit(body.graph, body.attribute, unit.target, border, simulated=simulated)
                units += _compiled(entered, steps, edits, done)
                body.module.recompile()
            results, expected = body.dtypes(dict(done[body.graph].dtypes)), unit.decided.dtypes[node]
            if body.first is not None and results != expected:
                raise VerificationError(
                    f"the body of {node.name} gives {results}, its plan says {expected}. "
                    "This is a bug in fxamp; please report it."
                )
    return units


def _run(unit: Unit, steps: Sequence[Pass], edits: Counter[str]) -> Unit:
    """Run passes over one graph, call the watchers, and count each rewrite; return the graph with what was decided."""
    for step in steps:
        for watcher in watchers():
            watcher.before(step, unit)
        result, fired = step(unit), dict[str, int]()
        if isinstance(result, Assignment):
            unit = unit.after(result)
        else:
            unit, fired = unit.after(), result
        edits.update({f"{step.name}/{rule}": n for rule, n in fired.items()})  # those too that fired 0 times
        for watcher in reversed(watchers()):  # verification last: it is no part of a pass, and may raise
            watcher.after(step, unit, fired)
    return unit


def _plan_of(policy: Policy, capture: str, notes: tuple[str, ...], units: Sequence[Unit], edits: Counter[str]) -> Plan:
    """Build the plan from the decisions on all graphs."""
    decisions = tuple(itertools.chain.from_iterable(unit.decided.decisions for unit in units))
    composites = sorted({d.op for d in decisions if d.kind == COMPOSITE})
    wrong = dict.fromkeys(text for unit in units for text in unit.decided.disagreements)
    return Plan(
        decisions,
        policy,
        verified="fake",
        capture=capture,
        notes=(
            *notes,
            *(f"composite kept whole: {name}" for name in composites),
            *(f"defect of a rule: {text}" for text in wrong),
        ),
        inserted_casts=sum(edits[f"{InsertCasts.name}/{rule}"] for rule in CAST_REWRITES),
        casts=sum(is_inserted(n) and n.target is not again for unit in units for n in unit.graph.nodes),
        edits=dict(edits),
        machine=str(this_machine(units[0].target.device)),
        timings={key: time for unit in units for key, time in unit.decided.timings.items()},
    )


# Watchers, which are called before and after every pass.


class Watcher:
    """An object that is called before and after every pass over every graph; it may not change its arguments."""

    def before(self, step: Pass, unit: Unit) -> None:
        """Called before each pass."""

    def after(self, step: Pass, unit: Unit, edits: Mapping[str, int]) -> None:
        """Called after each pass, with how often each of its rewrites was made."""


class Verified(Watcher):
    """Verifies after each pass the properties that the pass ensures."""

    def after(self, step: Pass, unit: Unit, edits: Mapping[str, int]) -> None:
        """Raise VerificationError if a property does not hold."""
        if step.ensures is not Ensures.NOTHING_NEW:
            verify(unit.graph, unit.decided if step.ensures is Ensures.DTYPES else None)


_WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=(Verified(),))


def watchers() -> tuple[Watcher, ...]:
    """Return the present watchers; verification is always the first of them."""
    return _WATCHERS.get()


@contextlib.contextmanager
def watched(*more: Watcher) -> Iterator[None]:
    """Add these watchers for all passes that run inside this context, in this thread."""
    token = _WATCHERS.set((*_WATCHERS.get(), *more))
    try:
        yield
    finally:
        _WATCHERS.reset(token)
