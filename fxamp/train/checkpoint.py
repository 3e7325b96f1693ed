"""The state of a TrainStep: everything that a run needs to continue bit for bit, even within a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from passes.contract.errors import PolicyError

from .window.by_hand import ByHand
from .window.conditional import parameters

if TYPE_CHECKING:
    from .step import TrainStep

_KEYS = (
    "settings", "model", "beside", "optimizers", "schedulers", "ema", "scaler", "windows", "position", "given_scale",
    "kept", "gradients", "rng",
)  # fmt: skip


def state_of(step: TrainStep) -> dict[str, Any]:
    """Return the state of a step, of plain values and tensors."""
    kept = step._kept
    return {
        **course_of(step),
        "model": step.model.state_dict(),
        "beside": beside(step),
        "optimizers": [optimizer.state_dict() for optimizer in step.optimizers],
        "ema": [average.state_dict() for average in step.averages],
        "position": step._position,
        "given_scale": step._given_scale,
        "kept": None if kept is None else int(kept.kept),
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


def course_of(step: TrainStep) -> dict[str, Any]:
    """Return the part of the state that is the same on all ranks between two windows: scaler, schedulers, counters."""
    return {
        "settings": settings(step),
        "schedulers": [scheduler.state_dict() for scheduler in step.schedulers],
        "scaler": step._scaler_state or {} if step._undecided else step.scaler.state_dict(),
        "windows": step.windows,
    }


def load_course(step: TrainStep, state: Mapping[str, Any]) -> None:
    """Load the state that `course_of` returned, with no window open."""
    step._close_window()
    if step._undecided:
        step._scaler_state = state["scaler"]
    else:
        step.scaler.load_state_dict(state["scaler"])
    for scheduler, saved in zip(step.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    step.windows = state["windows"]
    step._by_hand = ByHand()  # schedulers and gradients are those of the state now
    step._begun = False  # compare again: other ranks may have loaded another state


def load(step: TrainStep, state: Mapping[str, Any]) -> None:
    """Load a state into a step.

    Raises:
        PolicyError: It does not fit; nothing was changed.
    """
    missing = sorted(set(_KEYS) - set(state))
    if missing:
        raise PolicyError(f"not the state of a TrainStep: it lacks {', '.join(missing)}")
    refuse_other_settings(step, state["settings"])
    _refuse_other_tensors("the model", step.model.state_dict(), state["model"])
    _refuse_other_tensors("what is trained or kept outside the model", beside(step), state["beside"])
    for index, (average, saved) in enumerate(zip(step.averages, state["ema"], strict=True)):
        _refuse_other_tensors(f"ema {index}", average.state_dict(), saved)
    _refuse_other_gradients(step, state["gradients"])
    if step._again is not None and state["position"]:
        raise PolicyError(
            "the state was saved in the middle of a window, and an optimizer such as LBFGS runs the whole window "
            "again; micro-batches are not saved. Save at the end of a window, or call flush() first"
        )

    load_course(step, state)
    step._cleared = [p for p in step.model.parameters() if p.grad is None]
    step.model.load_state_dict(state["model"])
    with torch.no_grad():
        for name, tensor in beside(step).items():
            tensor.copy_(state["beside"][name])
    parts: list[Any] = [*step.optimizers, *step.averages]
    for part, saved in zip(parts, [*state["optimizers"], *state["ema"]], strict=True):
        part.load_state_dict(saved)
    step._position = state["position"]
    step._use_scale(state["given_scale"])
    if step._kept is not None:
        step._kept.seen, step._kept.kept = state["position"], state["kept"]
    for optimizer, gradients in zip(step.optimizers, state["gradients"], strict=True):
        for p, gradient in zip(parameters(optimizer), gradients, strict=True):
            p.grad = None if gradient is None else gradient.to(p.device, copy=True)
    set_random_state(state["rng"])


def settings(step: TrainStep) -> dict[str, Any]:
    """Return the settings that two runs must share, so that one can continue the other."""
    scaler = step.scaler
    return {
        "accumulate_steps": step.accumulate_steps,
        "on_overflow": step.on_overflow,
        "loss scaling": "undecided" if step._undecided else scaler.kind,
        "optimizers": [type(o).__name__ for o in step.optimizers],
        "parameters": [[len(group["params"]) for group in o.param_groups] for o in step.optimizers],
        "schedulers": [type(s).__name__ for s in step.schedulers],
        "ema": len(step.averages),
    }


def refuse_other_settings(step: TrainStep, saved: Mapping[str, Any], free: Sequence[str] = ()) -> None:
    """Raise PolicyError where a state was saved with other settings; settings in `free` may differ."""
    for name, ours in settings(step).items():
        if name in free:
            continue
        theirs = saved.get(name)
        if theirs != ours and "undecided" not in (theirs, ours):
            raise PolicyError(
                f"the state was saved with {name} {theirs!r}, and here it is {ours!r}: make the TrainStep as it was "
                "when saved, or load only the parts that fit (state['model'], state['optimizers'], ...)"
            )


def _refuse_other_tensors(what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    for name in (*ours, *theirs):
        here, there = (v.shape if isinstance(v, Tensor) else v is not None for v in (ours.get(name), theirs.get(name)))
        if here != there:
            raise PolicyError(f"the state is that of another model: {what} differs at '{name}'")


def _refuse_other_gradients(step: TrainStep, saved: Sequence[Sequence[Tensor | None]]) -> None:
    for optimizer, gradients in zip(step.optimizers, saved, strict=True):
        for index, (p, gradient) in enumerate(zip(parameters(optimizer), gradients, strict=True)):
            if gradient is not None and gradient.shape != p.shape:
                raise PolicyError(
                    f"the state is that of another model: parameter {index} of {type(optimizer).__name__} has shape "
                    f"{tuple(p.shape)}, and its gradient was saved with {tuple(gradient.shape)}"
                )


def random_state() -> dict[str, Any]:
    """Return the states of torch's random number generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set torch's random number generators to the states that `random_state` returned."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
