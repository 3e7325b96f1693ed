"""Capture a view before its first call, without running the model.

It is captured by a call with real inputs of a copy of the model, so nothing that a call writes is written to the model.
The graph that has the whole call is stored, and does not run; one that Dynamo ends early runs on the copy, so that what
comes after the break is captured too.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from passes.contract.errors import CaptureError, PlanError
from passes.contract.plan import Plan
from passes.contract.plan_format import REMEDY
from passes.contract.policy import check_used
from passes.graph.values import no_autocast
from passes.ops import ops

from .._torch import dynamo_errors, storage_id
from ..capture.call import Call, begin
from ..capture.graph import graphs_in
from ..capture.inputs import Inputs
from ..capture.run import Captured
from ..capture.state import STATES, State, in_state, state_of
from ..errors import in_short
from ..observe.interpret import StorageReads
from ..observe.snapshot import same_attributes, same_random_state
from ..observe.tensors import kept, strided
from ..observe.workload import misfit, misplaced
from .check import check_capture, run_twin
from .graphs import views_in
from .replay import place_of
from .runner import RUN, Runner
from .twin import NoTwinError, twin_of

logger = logging.getLogger(__name__)

_GOT = re.compile(r": got (.*)")  # what an op raised, in the text of Dynamo's error


def capture_states(runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Capture the present state of a view's model, and those others that can be captured."""
    model = runner.model
    present = state_of(model)
    capture(runner, args, kwargs, check=False)
    for state in STATES:
        if state == present:
            continue
        try:
            capture(runner, args, kwargs, check=False, state=state)
        except Exception as e:  # whatever a model raises in a mode that it is not made for
            logger.warning("fxamp: %s is not captured in %s: %s", type(model).__name__, state, in_short(e))
            runner.graphs.note(f"not captured in {state}: {in_short(e)}")


def capture(
    runner: Runner, args: tuple[Any, ...], kwargs: dict[str, Any], check: bool | str = True, state: State | None = None
) -> None:
    """Capture a state of a view's model, the present one by default, and check it, as `convert` says."""
    first, model, graphs = len(runner.graphs), runner.model, runner.graphs
    state, settled = state or state_of(model), False
    try:
        twin, inputs = twin_of(model, (args, kwargs))
    except NoTwinError as e:
        tensors = [t for t in (*model.parameters(), *strided((args, kwargs))) if type(t) in (nn.Parameter, Tensor)]
        with same_attributes(model), kept((*model.buffers(), *tensors)):
            _capture_on(runner, model, (args, kwargs), state, "first graph")
        broken = any(graph.broke for graph in graphs[first:])
        graphs.complete = graphs.complete and not broken
        ahead = ", and what comes after its first graph break not captured" if broken else ""
        note = f"not checked{ahead}: {e}; what its capture wrote to the model was put back"
        logger.warning("fxamp: %s is %s", type(model).__name__, note)
        graphs.note(note)
        check = False
    else:
        settled = _capture_twice(runner, twin, inputs, state)
        broken = any(graph.broke for graph in graphs[first:])
        if (broken or runner.refused) and (names := _read_outside(runner, (args, kwargs), state)):
            graphs.complete = False
            more = " and more" if names[3:] else ""
            graphs.note(f"a call in {state} reads parameters that no graph has: {', '.join(names[:3])}{more}")
    if len(graphs) == first:
        return
    if broken and check and (graphs.policy.ops or graphs.policy.modules):
        graphs.note("not checked: it is captured in several graphs, and overrides change what goes from one to another")
    elif check:
        _check(runner, (args, kwargs), check)
        if settled:
            runner.forgive()  # the check is a first call too
    if graphs.replayed is None:
        _refuse_unmatched_ops(runner)
        runner.say_idle_overrides()
    elif broken:
        _refuse_unfit(runner, graphs.replayed)


def _check(runner: Runner, inputs: Inputs, check: bool | str) -> None:
    try:
        check_capture(runner, partial(run_twin, runner, inputs), check)
    except NoTwinError as e:
        logger.warning("fxamp: %s is not checked: %s", type(runner.model).__name__, e)
        runner.graphs.note(f"not checked: {e}")


def _capture_twice(runner: Runner, twin: nn.Module, inputs: Inputs, state: State) -> bool:
    """Capture a call, twice where the first leaves code to Python, which may make what the second reads.

    Say whether the last one left none.
    """
    whole = _capture_on(runner, twin, inputs, state, "capture")
    if not whole and runner.refused:
        whole = _capture_on(runner, twin, inputs, state, "capture")
    settled = whole or not runner.refused
    if settled:
        runner.forgive()
    return settled


def _capture_on(runner: Runner, model: nn.Module, inputs: Inputs, state: State, does: str) -> bool:
    """Capture a call, and say whether one graph has the whole of it."""
    with same_random_state(), in_state(model, state):
        try:
            runner(*inputs, model=model, does=does)
        except Captured:
            return True
        except (TypeError, RuntimeError) as e:
            # By torch 2.15 an op that fails breaks the graph, and the model raises the error itself.
            if type(e) not in (TypeError, RuntimeError, dynamo_errors().TorchRuntimeError):
                raise
            why = _GOT.search(str(e))
            said = misplaced(model, *inputs) or (why[1] if why else in_short(e))
            if type(e) is TypeError and misfit(runner.model.forward, *inputs):
                said += "; args are the inputs of model(*args), without a target"
            way_out = f" ({advice})" if (advice := runner.of_autocast(said)) else ""
            raise CaptureError(f"{type(runner.model).__name__} rejects the example inputs: {said}{way_out}") from e
    return False


def _read_outside(runner: Runner, inputs: Inputs, state: State) -> list[str]:
    """Return the names of the parameters that a call of the model's own code reads and that are in no graph of it."""
    inside = {
        f"{prefix}{path}" for prefix, each in views_in(runner)
        for number in each.reached for path in each.graphs[number].names.values()
    }  # fmt: skip
    known = {id(p) for name, p in runner.model.named_parameters(remove_duplicate=False) if name in inside}
    outside = [name for name, p in runner.model.named_parameters() if id(p) not in known]
    if not outside:
        return []
    twin, (args, kwargs) = twin_of(runner.model, inputs)
    before = begin(Call(twin, args, kwargs, RUN, "compare", on_twin=True))
    try:
        here = runner.graphs.policy.device == runner.graphs.device  # elsewhere kernels may not take what is low
        autocast = runner.graphs.region(cache=False) if here else no_autocast()
        with same_random_state(), in_state(twin, state), autocast, StorageReads() as reads:
            twin(*args, **kwargs)
    except Exception as e:  # whatever a model raises that runs with autocast alone
        logger.info("fxamp: which parameters a call of %s reads is not known: %s", type(twin).__name__, in_short(e))
        return outside
    finally:
        begin(before)
    named = dict(twin.named_parameters())
    return [name for name in outside if storage_id(named[name]) in reads.storages]


def _refuse_unmatched_ops(runner: Runner) -> None:
    graphs = [graph.captured for graph in runner.graphs]
    nodes = (n for gm in graphs for part in graphs_in(gm) for n in part.graph.nodes)
    found = {ops.name(n) for n in nodes if n.op.startswith("call")}
    found |= {name for graph in runner.graphs for d in graph.plan.decisions for name in (d.op, d.key)}
    check_used(replace(runner.graphs.policy, modules=()), (), found)


def _refuse_unfit(runner: Runner, plan: Plan) -> None:
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
