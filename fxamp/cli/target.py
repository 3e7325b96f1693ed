"""One step of what a TARGET of the command line makes: a model or a TrainStep, with a batch."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from passes.contract.errors import FxampError, PolicyError
from passes.contract.policy import Policy

if TYPE_CHECKING:
    from torch import nn

A_LOSS = (
    "let TARGET return (fxamp.TrainStep(model, loss_fn, optimizer), (inputs, target)), or a model whose output is a "
    "loss, or has one as .loss"
)


def run_target(made: tuple[Any, Any, Any], policy: Policy, *, own: bool) -> tuple[nn.Module | None, list[str]]:
    """Run a step; return the module that has the plan, None for a model to be converted, and what ran otherwise.

    Args:
        made: what the target returned: (model, args, kwargs), (TrainStep, inputs) or (TrainStep, inputs, target).
        policy: what a model is converted by.
        own: no policy was given, so that of a converted model or of a TrainStep holds.

    Raises:
        FxampError: there is nothing to run it with.
        PolicyError: a policy was given for what has its own.
    """
    from torch import nn

    from ..census.census import census
    from ..convert import convert, converted_in

    given, inputs, target = step_of(made, "check: --run needs a batch")
    whole = given if isinstance(given, nn.Module) else getattr(given, "model", None)
    has_plan = isinstance(whole, nn.Module) and bool(converted_in(whole))
    if has_plan and not own:
        raise PolicyError("check: the target is converted already, by its own policy; leave out --policy")
    if isinstance(given, nn.Module) and not has_plan:
        given = convert(given, policy=policy)
    found = census(given, inputs, target)
    if found.planned is None:
        raise FxampError("check: nothing of the target is converted: give the TrainStep what fxamp.convert returned")
    return whole if has_plan else None, list(map(str, found.differences))


def step_of(made: tuple[Any, Any, Any], needs: str) -> tuple[Any, Any, Any]:
    """Return a model or a TrainStep, its inputs as every diagnostic takes them, and what its loss compares with.

    Raises:
        FxampError: there is no batch, and who `needs` one.
    """
    from torch import nn

    model, args, kwargs = made
    if args is None and kwargs is None:
        raise FxampError(f"{needs}: let the target return ({type(model).__name__}, batch)")
    if isinstance(model, nn.Module):
        return model, _batch(model, args, kwargs), None
    if kwargs is None and isinstance(args, tuple) and len(args) == 2 and getattr(model, "loss_fn", None) is not None:
        return model, *args  # the step has a loss of its own, so that a pair is inputs and target
    return model, args, kwargs


def _batch(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return what a model is called with as one batch."""
    if not kwargs:
        return tuple(args) if isinstance(args, list) else args
    args = () if args is None else args if isinstance(args, (tuple, list)) else (args,)
    return inspect.signature(model.forward).bind(*args, **kwargs).arguments
