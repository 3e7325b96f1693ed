"""Capture a view before its first call, without running the model.

The capture is that of a real call with real inputs, in which graphs are stored and none of them runs.
"""

from __future__ import annotations

import contextlib
import logging
import re
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from passes.contract.errors import CaptureError, PlanError
from passes.contract.plan import Plan
from passes.contract.plan_format import REMEDY
from passes.contract.policy import check_used
from passes.ops import ops

from .._torch import dynamo_errors
from ..capture.graph import graphs_in
from ..capture.inputs import misplaced
from ..capture.run import Captured
from ..capture.state import STATES, in_state, state_of
from ..errors import in_short
from ..observe.snapshot import same_attributes, same_random_state
from ..observe.tensors import kept, strided
from .check import NoTwinError, check_capture, parameters_written, run_twin
from .graphs import views_in
from .replay import place_of
from .runner import Runner

logger = logging.getLogger(__name__)

_GOT = re.compile(r": got (.*)")  # what an op raised, in the text of Dynamo's error


def capture_states(runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Capture the present state of a view's model, and the others: train and eval, with gradients and without.

    The present state has to be captured; of another one that cannot be, the plan says why.

    Raises:
        CaptureError: as `capture`.
    """
    model = runner.model
    present = state_of(model)
    capture(runner, args, kwargs, check=False)
    for state in STATES:
        if state == present:
            continue
        try:
            with in_state(model, state):
                capture(runner, args, kwargs, check=False)
        except Exception as e:  # whatever a model raises in a mode that it is not made for
            logger.warning("fxamp: %s is not captured in %s: %s", type(model).__name__, state, in_short(e))
            runner.graphs.note(f"not captured in {state}: {in_short(e)}")


def capture(runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any], check: bool | str = True) -> None:
    """Capture the present state of a view's model, and check it, as `convert` says.

    Raises:
        CaptureError: the model rejects the inputs; or a captured graph does not compute what the model computes, and
            what `torch.compile` does is right.
        PlanError: the plan that is replayed is of another model.
        PolicyError: an override of the policy matches nothing.
    """
    first, model = len(runner.graphs), runner.model
    # Python runs the model itself where Dynamo leaves code to it, and may write what it is called with.
    inputs = [t for t in strided((args, kwargs)) if type(t) is Tensor]
    with same_random_state(), same_attributes(model), kept((*model.buffers(), *inputs)), contextlib.suppress(Captured):
        try:
            runner(args, kwargs, does="capture")
        except (TypeError, RuntimeError) as e:
            # By torch 2.15 an op that fails breaks the graph, and the model raises the error itself.
            if type(e) not in (TypeError, RuntimeError, dynamo_errors().TorchRuntimeError):
                raise
            why = _GOT.search(str(e))
            said = misplaced(model, (args, kwargs)) or (why[1] if why else in_short(e))
            way_out = f" ({advice})" if (advice := runner.of_autocast(said)) else ""
            raise CaptureError(f"{type(runner.model).__name__} rejects the example inputs: {said}{way_out}") from e
    broken = any(graph.broke for graph in runner.graphs[first:])
    if len(runner.graphs) == first:
        return
    try:
        run = partial(run_twin, runner, (args, kwargs), parameters_written(runner.graphs[first:]))
        if broken and (runner.graphs.policy.ops or runner.graphs.policy.modules):
            run("run", False)  # an override may change the dtype of what crosses the break, and so the graph after it
            runner.graphs.note(
                "not checked: it is captured in several graphs, and overrides change what goes from one to another"
            )
        elif check or broken:
            check_capture(runner, run, check)
    except NoTwinError as e:
        runner.graphs.complete = runner.graphs.complete and not broken
        what = "checked" if not broken else "checked, and what comes after its first graph break not captured"
        note = f"not {what}: {e}"
        logger.warning("fxamp: %s is %s", type(runner.model).__name__, note)
        runner.graphs.note(note)
    if runner.graphs.replayed is None:
        _refuse_unmatched_ops(runner)
        runner.say_idle_overrides()
    elif broken:
        _refuse_unfit(runner, runner.graphs.replayed)


def _refuse_unmatched_ops(runner: Runner) -> None:
    """Raise PolicyError where an override by op matches nothing in the graphs of a view."""
    graphs = [graph.captured for graph in runner.graphs]
    nodes = (n for gm in graphs for part in graphs_in(gm) for n in part.graph.nodes)
    found = {ops.name(n) for n in nodes if n.op.startswith("call")}
    found |= {name for graph in runner.graphs for d in graph.plan.decisions for name in (d.op, d.key)}
    check_used(replace(runner.graphs.policy, modules=()), (), found)


def _refuse_unfit(runner: Runner, plan: Plan) -> None:
    """Raise PlanError where the plan of a model in several graphs has nodes that none of them has."""
    state = state_of(runner.model)
    at = place_of(plan, state)
    if at is None and plan.states:
        return
    ours = {d.key for e in runner.graphs if e.state == state for d in e.plan.decisions}
    theirs = (plan.part(at) if at is not None else plan).decisions
    inside = tuple(prefix for prefix, each in views_in(runner) if each is not runner)  # these have their own plans
    missing = [d.key for d in theirs if d.key not in ours and not d.key.startswith(inside)]
    if missing:
        raise PlanError(
            f"the plan does not fit this model: it decides on a node that the model does not have: {missing[0]}; "
            f"{len(missing)} missing. {REMEDY}"
        )
