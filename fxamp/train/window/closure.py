"""Optimizers that evaluate the loss several times in a step, such as LBFGS: their closure runs the window again."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from passes.contract.errors import PolicyError

from ..ranks.ranks import Ranks
from ..ranks.replicas import exchange, exchanging
from ..scale.scaler import LossScaler
from ..weights.weights import WeightCasts
from .gradients import gradients, holds_inf_or_nan, parameters
from .loss import LossFunction, loss_of


def needs_closure(optimizer: Optimizer) -> bool:
    """Say whether the step() of an optimizer requires a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def refuse_company(
    optimizers: Sequence[Optimizer], max_grad_norm: float | None, on_overflow: str, on_gradients: object = None
) -> None:
    """Raise PolicyError where an optimizer that needs a closure has a setting that has no meaning for it."""
    found = next((o for o in optimizers if needs_closure(o)), None)
    if found is None:
        return
    with_it = {
        "another optimizer": len(optimizers) > 1,
        "max_grad_norm": max_grad_norm is not None,
        'on_overflow="skip_microbatch"': on_overflow == "skip_microbatch",
        "on_gradients": on_gradients is not None,
    }
    refused = [what for what, given in with_it.items() if given]
    if refused:
        raise PolicyError(
            f"{type(found).__name__} evaluates the loss several times in a step, which does not work together with "
            f"{' and '.join(refused)}: leave that out, or write a loop of your own on fxamp.LossScaler"
        )


def step_by_closure(optimizer: Optimizer, scaler: LossScaler, run: Callable[[], Tensor], ranks: Ranks) -> bool:
    """Let an optimizer step that evaluates the loss itself; return whether it was held back.

    With loss scaling, a gradient that is not finite takes back the whole step, whichever evaluation it comes from.

    Args:
        optimizer: What steps.
        scaler: Loss scaler of the window.
        run: Runs the window's micro-batches forward and backward, from gradients of None, with the loss scale in
            them; returns their loss, without it.
        ranks: The ranks that have to agree whether gradients are finite.
    """
    before = [p.detach().clone() for p in parameters(optimizer)]
    state = copy.deepcopy(optimizer.state_dict())

    def evaluate() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = run()
        if scaler.is_enabled():
            scaler._unscale_again(optimizer)
            found = holds_inf_or_nan(gradients([optimizer]))
            ranks.agree([found])
            if found.item():
                raise _NotFinite
        return loss

    held_back = False
    try:
        optimizer.step(evaluate)  # type: ignore[arg-type]
    except _NotFinite:
        held_back = True
        with torch.no_grad():
            for p, old in zip(parameters(optimizer), before, strict=True):
                p.copy_(old)
        optimizer.load_state_dict(state)
    scaler._note(optimizer, held_back)
    return held_back


def run_window(
    model: nn.Module,
    loss_fn: LossFunction | None,
    micro_batches: Sequence[tuple[Any, Any]],
    scaler: LossScaler,
    ranks: Ranks,
    share: float | Tensor,
    weights: WeightCasts,
    *,
    in_backward: bool,
) -> Tensor:
    """Run the micro-batches of a window forward and backward, and return the mean of their losses.

    Gradients and loss are averaged over all ranks: an optimizer uses the loss to decide how to continue, and all ranks
    have to decide the same.

    Args:
        model: What is trained.
        loss_fn: As `fxamp.train.window.loss.loss_of` takes it.
        micro_batches: Inputs and target of each.
        scaler: Loss scaler of the window.
        ranks: The ranks that exchange gradients.
        share: Micro-batches of a rank, in the mean of all that exchange gradients.
        weights: The casts that are kept for the window.
        in_backward: Whether they do so in the last backward, or after it, since not all may have seen as many.
    """
    count, losses = len(micro_batches), []
    for index, (inputs, target) in enumerate(micro_batches):
        with exchanging(ranks.replicas, in_backward and index + 1 == count):
            loss = loss_of(model, loss_fn, inputs, target)[0] / share
            scaler.scale(loss).backward()
            weights.after_backward()
            losses.append(loss.detach())
    if not ranks.groups:
        return torch.stack(losses).sum()
    totals = torch.zeros(2, device=next(model.parameters()).device)
    for loss in losses:
        totals += torch.stack([loss.float().view(()) * share, torch.ones_like(totals[0])])
    ranks.sum(totals)
    for replica in [] if in_backward else reversed(ranks.replicas):
        exchange(replica, totals.new_tensor([count]), share)
    return totals[0] / totals[1]


class _NotFinite(Exception):  # noqa: N818 - no error: nobody but `step_by_closure` sees it
    """Raised to abort a step when a gradient is not finite."""
