"""The last check of `cost="measured"`: time whole forward and backward passes at O2, at O1 and in FP32.

The costs of single ops add up only roughly to the time of a step. So the graphs of O2, O1 and FP32 take turns on the
example inputs. O1 is chosen if it is faster than O2 beyond noise. FP32 is chosen if neither is faster by more than the
spread of the times of one variant, which is large on a busy machine. The plan says what was chosen.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from passes._torch import pytree
from passes.contract.costs import CostModel
from passes.contract.devices import DEVICES
from passes.contract.errors import PolicyError
from passes.contract.plan import Plan
from passes.contract.policy import Level, Policy
from passes.contract.reasons import Code
from passes.graph.values import no_autocast

from ..capture.inputs import Inputs, resolve
from ..observe.snapshot import preserved
from ..view.capture import capture
from ..view.graphs import plan_of
from ..view.twin import twin_of
from ..view.view import make_view, runner_of
from .costs import MeasuredCosts
from .counts import laps
from .timing import OpTimer, training_alone

logger = logging.getLogger(__name__)

CODE = Code.NOT_WORTH_CASTS.value
SECONDS = 3.0  # for all variants together
ROUNDS = (5, 100)  # at least and at most
NOISE = 1.01  # steps whose times differ by less than this factor count as equally fast


def measured_costs(policy: Policy, model: nn.Module, inputs: Inputs | None) -> MeasuredCosts:
    """Return costs as measured on the device of a policy; raise PolicyError where nothing can be run."""
    device = str(resolve(policy, model, inputs).device)
    instead = "or choose cost='bytes', the default"
    if inputs is None:
        raise PolicyError(
            f"cost='measured' runs the model's ops: give example inputs, fxamp.convert(model, args, kwargs), {instead}."
        )
    if not DEVICES[device].is_here():
        raise PolicyError(
            f"cost='measured' runs ops on {device!r}, which this machine does not have: convert on a "
            f"machine that has it, {instead}."
        )
    leaves = pytree.tree_leaves((list(model.parameters()), list(model.buffers()), inputs))
    homes = sorted({t.device.type for t in leaves if isinstance(t, Tensor)})
    if homes and device not in homes:
        raise PolicyError(
            f"cost='measured' runs the model on '{device}', and the model is on '{homes[0]}': move model and "
            f"inputs to '{device}' before converting, {instead}."
        )
    return MeasuredCosts(device, OpTimer(device))


def fastest_plan(view: Any, inputs: Inputs) -> Plan:
    """Return the plan of a view with measured costs; at O2 that of O1 or of FP32 instead, if a step of it is faster."""
    runner = runner_of(view)
    policy, model = runner.graphs.policy, runner.model
    if not policy.level.may_keep_products_fp32:
        return plan_of(runner)
    rivals: dict[str, Any] = {"O2": view}
    with contextlib.suppress(PolicyError):  # an override may name an op that only the graph of O2 has
        rivals["O1"] = _captured(model, replace(policy, level=Level.O1), inputs, runner.graphs.costs)
    forced_low = any(colour == "low" for _, colour in (*policy.modules, *policy.ops))  # O0 ignores these
    if not forced_low:
        rivals["FP32"] = _captured(model, replace(policy, level=Level.O0, modules=(), ops=()), inputs, None)
    seconds = _race(rivals, model, inputs)
    best = fastest(seconds)
    if best == "O2":
        return plan_of(runner)
    return _explained(plan_of(runner_of(rivals[best])), plan_of(runner), best, min(seconds["O2"]) > min(seconds[best]))


def _captured(model: nn.Module, policy: Policy, inputs: Inputs, costs: CostModel | None) -> Any:
    view = make_view(model, policy)
    runner_of(view).graphs.costs = costs
    capture(runner_of(view), *inputs, check=False)
    return view


def fastest(seconds: Mapping[str, Sequence[float]]) -> str:
    """Return the variant to use, O2 or one of its alternatives, from the seconds of each in every round.

    The least time of each counts. FP32 is returned unless another variant is faster by more than the spread, the
    distance of the lower quartile from the least time.
    """
    least = {name: min(taken) for name, taken in seconds.items()}
    rounded = [name for name in least if name != "FP32"]
    best = min(rounded, key=lambda name: least[name] * (1 if name == "O2" else NOISE))
    if "FP32" not in least:
        return best
    rivals = {name: seconds[name] for name in (best, "FP32") if len(seconds[name]) > 2}
    spread = max((statistics.quantiles(all_, n=4)[0] - least[name] for name, all_ in rivals.items()), default=0.0)
    return best if max(NOISE * least[best], least[best] + spread) < least["FP32"] else "FP32"


def _race(views: Mapping[str, Any], model: nn.Module, inputs: Inputs) -> dict[str, list[float]]:
    """Time a step of each view, in turns, on copies of its model that share the parameters; return the seconds."""
    with preserved(model), no_autocast(), training_alone():
        steps = {name: _step(view, inputs) for name, view in views.items()}
        seconds = laps(steps, _rounds())
    logger.info("fxamp: least seconds of a step: %s", {name: round(min(taken), 6) for name, taken in seconds.items()})
    return seconds


def _explained(plan: Plan, instead_of: Plan, name: str, slower: bool) -> Plan:
    """Return a plan that gives the reason for another level than O2, in a note and in each decision that differs."""
    colours = {(d.graph, d.key): d.colour for d in instead_of.decisions}
    takes = ("takes longer", "took longer") if slower else ("is not clearly faster", "was not clearly faster")
    reason = f"{CODE}: counting its casts, a step at O2 {takes[0]} than one at {name}"
    decisions = tuple(
        d if colours.get((d.graph, d.key)) == d.colour else replace(d, code=CODE, reason=reason) for d in plan.decisions
    )
    note = (
        f"{CODE}: with {instead_of.policy} a forward and backward on the example inputs {takes[1]} than with {name}, "
        "so this is the conversion at that level"
    )
    return replace(plan, decisions=decisions, notes=(*plan.notes, note), timings=instead_of.timings)


def _step(view: Any, inputs: Inputs) -> Callable[[], object]:
    """Return a function that runs a forward and backward of the graphs; no gradient is kept."""
    runner = runner_of(view)
    twin, (args, kwargs) = twin_of(runner.model, inputs)
    sources = [t for t in (*twin.parameters(), *pytree.tree_leaves((args, kwargs))) if isinstance(t, Tensor)]
    sources = [t for t in sources if t.requires_grad]

    def forward() -> Any:
        return runner(args, kwargs, model=twin)

    def step() -> None:
        made = [t for t in pytree.tree_leaves(forward()) if isinstance(t, Tensor) and t.requires_grad]
        made = [t for t in made if t.dim() == 0] or made  # a scalar is the loss
        if made and sources:
            torch.autograd.grad(made, sources, [torch.ones_like(t) for t in made], allow_unused=True)

    try:
        step()
    except RuntimeError:  # the model has no backward: it overwrites what that would need
        return forward
    return step


def _rounds() -> Iterator[int]:
    """Count rounds until the time is over."""
    end = time.perf_counter() + SECONDS
    for i in range(ROUNDS[1]):
        if i >= ROUNDS[0] and time.perf_counter() > end:
            return
        yield i
