"""The last check of `cost="measured"`: time whole forward and backward passes of the chosen graph and its alternatives.

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
from passes.contract.devices import DEVICES
from passes.contract.errors import PolicyError
from passes.contract.levels import Level
from passes.contract.plan import Plan
from passes.contract.policy import Policy
from passes.contract.reasons import Code
from passes.graph.values import no_autocast

from ..capture.model.captured import Captured, Captures
from ..capture.model.snapshot import untouched
from ..capture.states import copied
from ..module.module import ConvertedModule
from ..trust.check import written_parameters
from ..trust.preserved import fresh, preserved
from .counts import laps
from .timing import OpTimer, training_alone

logger = logging.getLogger("fxamp")

CODE = Code.NOT_WORTH_CASTS.value
SECONDS = 3.0  # for all variants together
ROUNDS = (5, 100)  # at least and at most
NOISE = 1.01  # steps whose times differ by less than this factor count as equally fast

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def _runnable(policy: Policy, model: nn.Module, inputs: Inputs | None) -> Inputs:
    """Return the example inputs; raise PolicyError where nothing can be run."""
    instead = "or choose cost='bytes', the default"
    if inputs is None:
        raise PolicyError(
            f"cost='measured' runs the model's ops: give example inputs, fxamp.convert(model, args, kwargs), {instead}."
        )
    if not DEVICES[policy.device or "cpu"].is_here():
        raise PolicyError(
            f"cost='measured' runs ops on {policy.device!r}, which this machine does not have: convert on a "
            f"machine that has it, {instead}."
        )
    leaves = pytree.tree_leaves((list(model.parameters()), list(model.buffers()), inputs))
    homes = sorted({t.device.type for t in leaves if isinstance(t, Tensor)})
    if homes and policy.device not in homes:
        raise PolicyError(
            f"cost='measured' runs the model on '{policy.device}', and the model is on '{homes[0]}': move model and "
            f"inputs to '{policy.device}' before converting, {instead}."
        )
    return inputs


def emit_measured(
    captures: Captures, policy: Policy, inputs: Inputs | None, emit: Callable[..., ConvertedModule]
) -> ConvertedModule:
    """Compile with measured costs. At O2, return FP32 or O1 instead if that is faster.

    Args:
        captures: captured graphs; at O2 they are not changed.
        policy: with device and dtype filled in.
        inputs: example arguments.
        emit: compiles captured graphs under a policy; takes a plan to replay, and a timer.

    Raises:
        PolicyError: nothing can be run.
    """
    captured = captures.graphs[0]
    example = _runnable(policy, captured.model, inputs)
    timer = OpTimer(str(policy.device))
    if not policy.level.may_keep_products_fp32:
        return emit(captures, policy, timer=timer)
    chosen = emit(copied(captures), policy, timer=timer)
    rivals: dict[str, ConvertedModule] = {}
    with contextlib.suppress(PolicyError):  # an override may name an op that only the graph of O2 has
        rivals["O1"] = emit(copied(captures), replace(policy, level=Level.O1), timer=timer)
    forced_low = any(colour == "low" for _, colour in (*policy.modules, *policy.ops))  # O0 ignores these
    if not forced_low and all(c.plain for c in captures.graphs):
        rivals["FP32"] = emit(copied(captures), replace(policy, level=Level.O0, modules=(), ops=()))
    if not rivals:
        return chosen
    seconds = _race({"O2": chosen, **rivals}, captured, example)
    best = fastest(seconds)
    if best == "O2":
        return chosen
    module, slower = rivals[best], min(seconds["O2"]) > min(seconds[best])
    module.plan = _explained(module.plan, chosen.plan, best, slower)
    return module


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
    spread = max(_lower_quartile(seconds[name]) - least[name] for name in (best, "FP32"))
    return best if max(NOISE * least[best], least[best] + spread) < least["FP32"] else "FP32"


def _lower_quartile(taken: Sequence[float]) -> float:
    return statistics.quantiles(taken, n=4)[0] if len(taken) > 2 else min(taken)


def _race(modules: Mapping[str, ConvertedModule], captured: Captured, inputs: Inputs) -> dict[str, list[float]]:
    """Time a step of each module, in turns; return the seconds. Afterwards the model is unchanged."""
    model = captured.model
    with untouched(model), preserved(model, written_parameters(captured), graph=True), no_autocast(), training_alone():
        steps = {name: _step(module, inputs) for name, module in modules.items()}
        seconds = laps(steps, _rounds())
    logger.info("fxamp: least seconds of a step: %s", {name: round(min(taken), 6) for name, taken in seconds.items()})
    return seconds


def kept_notes(replayed: Plan | None) -> list[str]:
    """Return the notes of a replayed plan that still hold: those that say why another level than O2 was chosen."""
    return [note for note in replayed.notes if note.startswith(CODE)] if replayed is not None else []


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
    return replace(plan, decisions=decisions, notes=(*plan.notes, note))


def _step(module: ConvertedModule, inputs: Inputs) -> Callable[[], object]:
    """Return a function that runs a forward and backward of the graph; no gradient is kept."""
    args, kwargs = pytree.tree_map(fresh, inputs)
    flat = module.call_spec.bind(args, kwargs)
    leaves = [*module.parameters(), *pytree.tree_leaves(flat)]
    sources = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]

    def step() -> None:
        outputs = pytree.tree_leaves(module.graph_forward(*flat))
        made = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
        made = [t for t in made if t.dim() == 0] or made  # a scalar is the loss
        if made and sources:
            torch.autograd.grad(made, sources, [torch.ones_like(t) for t in made], allow_unused=True)

    try:
        step()
    except RuntimeError:  # the model has no backward: it overwrites what that would need
        return lambda: module.graph_forward(*flat)
    return step


def _rounds() -> Iterator[int]:
    """Count rounds until the time is over."""
    end = time.perf_counter() + SECONDS
    for i in range(ROUNDS[1]):
        if i >= ROUNDS[0] and time.perf_counter() > end:
            return
        yield i
