"""The state of a TrainStep: everything that a run needs to continue bit for bit, even within a window."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from passes.contract.errors import FxampError, PolicyError

from ..errors import in_short
from ..observe.snapshot import random_state, set_random_state
from ..view.switch import switch_back, switch_views
from .course import Course
from .options import choose_scaler, compile_anew, low_dtype_of
from .scaler import require_scale
from .window import Window, close_window, open_window, parameters

if TYPE_CHECKING:
    from .step import TrainStep

_KEYS = ("settings", "model", "beside", "optimizers", "schedulers", "ema", "scaler", "windows", "position",
         "gradients", "rng")  # fmt: skip
MAY_DIFFER = ("policy", "max_grad_norm", "accumulate_steps")  # where it is allowed


def state_of(step: TrainStep) -> dict[str, Any]:
    """Return the state of a step, of plain values and tensors."""
    step.course.refuse_torn()
    window = step.opened or Window(step)
    return {
        **course_of(step),
        "model": step.model.state_dict(),
        "beside": beside(step),
        "optimizers": [optimizer.state_dict() for optimizer in step.optimizers],
        "ema": [average.state_dict() for average in step.averages],
        **window.state(),
        "gradients": [[None if p.grad is None else p.grad.detach() for p in parameters(o)] for o in step.optimizers],
        "rng": random_state(),
    }


def beside(step: TrainStep) -> dict[str, Tensor]:
    """Return the tensors themselves that the loss and the optimizers train or keep outside the model."""
    held: dict[str, Any] = {}
    if isinstance(step.loss_fn, nn.Module):
        held = step.loss_fn.state_dict(prefix="loss_fn.", keep_vars=True)
    for index, optimizer in enumerate(step.optimizers):
        held.update((f"parameter {at} of optimizer {index}", p) for at, p in enumerate(parameters(optimizer)))
    named = {id(t): name for name, t in reversed(held.items()) if isinstance(t, Tensor)}  # of several names the first
    for t in (*step.model.parameters(), *step.model.buffers()):
        named.pop(id(t), None)
    return {name: held[name].detach() for name in named.values()}


def settings_of(step: TrainStep) -> dict[str, Any]:
    """Return the settings that two runs must share, so that one can continue the other."""
    options = step.options
    return {
        "accumulate_steps": options.accumulate_steps,
        "loss scaling": "undecided" if step.undecided else step.scaler.kind,
        "optimizers": [type(o).__name__ for o in options.optimizers],
        "parameters": [[len(group["params"]) for group in o.param_groups] for o in options.optimizers],
        "schedulers": [type(s).__name__ for s in options.schedulers],
        "ema": len(options.averages),
        "policy": list(dict.fromkeys(str(asked) for asked, _ in step.policies.values())),
        "max_grad_norm": options.max_grad_norm,
    }


def course_of(step: TrainStep) -> dict[str, Any]:
    """Return the part of the state that is the same on all ranks between two windows: scaler, schedulers, counters."""
    return {
        "settings": settings_of(step),
        "options": step.options.saved(),
        "schedulers": [scheduler.state_dict() for scheduler in step.schedulers],
        "scaler": step.scaler.state_dict() if step.pending is None else step.pending,
        **step.course.state(),
    }


def load_course(
    step: TrainStep, state: Mapping[str, Any], optimizers: Sequence[dict[str, Any]], random: Sequence[Any]
) -> None:
    """Load the state that `course_of` returned, and close the window; if something does not fit, nothing changes.

    `optimizers` are the states of those, and `random` states of random numbers, of which the last holds.
    """
    course = Course(state)
    with _restored_on_error(step):
        for optimizer, saved in zip(step.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(saved)
        for scheduler, saved in zip(step.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        if step.undecided:
            step.pending = state["scaler"]
        elif state["settings"]["loss scaling"] == "undecided" and state["scaler"] == {}:
            choose_scaler(step, low_dtype_of(step.model))
        else:
            step.scaler.load_state_dict(state["scaler"])
        for one in random:
            set_random_state(one)
        if (course.switches, course.plan) != (step.course.switches, step.course.plan):
            if course.switches:
                switch_views(step.model, course.switches[-1][1] if course.plan is None else course.plan)
            else:
                switch_back(step.model, step.policies)
            compile_anew(step)
    close_window(step)
    step.course = course
    step.loop.begin()
    step.loop.said.discard("ranks")  # compare again: other ranks may have loaded another state


@contextlib.contextmanager
def _restored_on_error(step: TrainStep) -> Iterator[None]:
    parts: list[Any] = [*step.optimizers, *step.schedulers]
    attributes = [dict(vars(part)) for part in parts]  # what loads a state replaces them
    schedulers, scaling = copy.deepcopy(([s.state_dict() for s in step.schedulers], step.scaler.state_dict()))
    scaler = step.scaler
    random, pending = random_state(), step.pending
    try:
        yield
    except BaseException:
        for part, before in zip(parts, attributes, strict=True):
            vars(part).clear()
            vars(part).update(before)
        for scheduler, saved in zip(step.schedulers, schedulers, strict=True):
            scheduler.load_state_dict(saved)  # one of several has its own in it
        step.scaler = scaler
        scaler.load_state_dict(scaling)
        step.pending = pending
        set_random_state(random)
        raise


def load(step: TrainStep, state: Mapping[str, Any], allow: Sequence[str] = ()) -> None:
    """Load a state into a step, whose settings in `allow` may differ. If it does not fit, nothing changes."""
    try:
        _load(step, state, allow)
    except FxampError:
        raise
    except Exception as error:  # a state of another structure may hold anything in place of a number
        raise PolicyError(f"a part of the state does not fit this step: {in_short(error)}") from error


def _load(step: TrainStep, state: Mapping[str, Any], allow: Sequence[str]) -> None:
    _refuse_another_state(step, state, allow)
    load_course(step, state, state["optimizers"], [state["rng"]])
    step.model.load_state_dict(state["model"])
    with torch.no_grad():
        for name, tensor in beside(step).items():
            tensor.copy_(state["beside"][name])
    for average, saved in zip(step.averages, state["ema"], strict=True):
        average.load_state_dict(saved)
    for p in step.model.parameters():
        p.grad = None
    if state["position"]:
        open_window(step, state["given_scale"]).load(state)
    for optimizer, gradients in zip(step.optimizers, state["gradients"], strict=True):
        for held, gradient in zip(parameters(optimizer), gradients, strict=True):
            held.grad = None if gradient is None else gradient.to(held.device, copy=True)


def _refuse_another_state(step: TrainStep, state: Mapping[str, Any], allow: Sequence[str]) -> None:
    if not isinstance(state, Mapping):
        raise PolicyError(f"not the state of a TrainStep, but a {type(state).__name__}")
    missing = sorted(set(_KEYS) - set(state))
    if missing:
        raise PolicyError(f"not the state of a TrainStep: it lacks {', '.join(missing)}")
    refuse_other_settings(step, state["settings"], allowed(allow, state["position"]))
    _refuse_another_model(step, state)
    if state["position"] and step.closes:
        raise PolicyError(
            "the state was saved in the middle of a window, and an optimizer such as LBFGS runs the whole window "
            "again; micro-batches are not saved. Save at the end of a window, or call flush() first"
        )
    if state["position"]:
        _refuse_another_window(step, state)


def _refuse_another_window(step: TrainStep, state: Mapping[str, Any]) -> None:
    if state["given_scale"] is not None:
        require_scale("the scale of the state's window", state["given_scale"])
    if state.get("kept") is not None:
        raise PolicyError(
            'the state was saved within a window of on_overflow="skip_microbatch", which this version does not have: '
            "save it at the end of a window"
        )
    window = Window(step, state["given_scale"])
    window.load(state)
    _ = window.share  # which reads the weights


def allowed(allow: Sequence[str], position: int) -> Sequence[str]:
    """Return the names of settings that may differ, or raise PolicyError for a name that is none."""
    names = (allow,) if isinstance(allow, str) else tuple(allow)
    for name in names:
        if name not in MAY_DIFFER:
            raise PolicyError(f"allow takes {', '.join(map(repr, MAY_DIFFER))}, got {name!r}")
    if position and "accumulate_steps" in names:
        raise PolicyError("the state was saved within a window: its accumulate_steps cannot change")
    return names


def refuse_other_settings(step: TrainStep, saved: Mapping[str, Any], free: Sequence[str] = ()) -> None:
    """Raise PolicyError where a state was saved with other settings; settings in `free` may differ."""
    for name, ours in settings_of(step).items():
        if name in free:
            continue
        theirs = saved.get(name)
        unknown = name in MAY_DIFFER and (name not in saved or (name == "policy" and None in (theirs, ours)))
        if theirs != ours and "undecided" not in (theirs, ours) and not unknown:
            way = f"; to go on with {ours!r}, pass allow=[{name!r}]" if name in MAY_DIFFER else ""
            raise PolicyError(
                f"the state was saved with {name} {theirs!r}, and here it is {ours!r}: make the TrainStep as it was "
                f"when saved, or load only the parts that fit (state['model'], state['optimizers'], ...){way}"
            )


def _refuse_another_model(step: TrainStep, state: Mapping[str, Any]) -> None:
    _refuse_other_tensors("the model", step.model.state_dict(), state["model"])
    _refuse_other_tensors("what is trained or kept outside the model", beside(step), state["beside"])
    for index, (average, saved) in enumerate(zip(step.averages, state["ema"], strict=True)):
        _refuse_other_tensors(f"ema {index}", average.state_dict(), saved)
    for index, (optimizer, gradients) in enumerate(zip(step.optimizers, state["gradients"], strict=True)):
        held = {f"parameter {at}": p for at, p in enumerate(parameters(optimizer))}
        found = {name: p if g is None else g for (name, p), g in zip(held.items(), gradients, strict=True)}
        _refuse_other_tensors(f"a gradient of optimizer {index}", held, found, sparse=True)


def _refuse_other_tensors(
    what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], *, sparse: bool = False
) -> None:
    for name in (*ours, *theirs):
        here, there = (_form(values.get(name), sparse) for values in (ours, theirs))
        if here != there:
            raise PolicyError(f"the state is that of another model: {what} differs at {name!r}")


def _form(value: Any, sparse: bool) -> Any:
    if not isinstance(value, Tensor):
        return value is not None
    return value.shape, value.is_meta, value.is_quantized, sparse or value.layout
