"""What a TARGET of the command line makes: a model to read, or a step of a model or a TrainStep to run."""

from __future__ import annotations

import argparse
import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from passes.contract.devices import DEVICES
from passes.contract.errors import FxampError, PolicyError
from passes.contract.plan import Plan
from passes.contract.policy import Policy, nearest

from ..convert import convert, converted_in, to_read
from ..target import load_callable, load_target

AUTOCAST, FP32 = "autocast", "FP32"


def converted(target: str, policy: str | None, device: str | None, replayed: Plan | None = None) -> nn.Module:
    """Import a target and convert its model, to be read and not run."""
    return read(load_target(target), Policy.of(policy), device, replayed)


def read(made: tuple[Any, Any, Any], policy: Policy, device: str | None, replayed: Plan | None = None) -> nn.Module:
    """Convert what a target returned, to be read and not run.

    Raises:
        PolicyError: There is no such device.
    """
    if device is not None and device not in DEVICES:
        raise PolicyError(f"there is no device {device!r}{nearest(device, DEVICES)}; one of {', '.join(DEVICES)}")
    asked = policy if device is None else replace(policy, device=device)
    view: nn.Module = to_read(*made, asked, replayed=replayed)
    return view


def step_of(made: tuple[Any, Any, Any], needs: str, loss: Callable[..., Any] | None = None) -> tuple[Any, Any, Any]:
    """Return a model or a TrainStep, its inputs as every diagnostic takes them, and what its loss compares with.

    Raises:
        FxampError: There is no batch, and who `needs` one; or a batch has a target, and there is no loss.
    """
    model, args, kwargs = made
    if args is None and kwargs is None:
        raise FxampError(f"{needs}: let the target return ({type(model).__name__}, batch)")
    pair = kwargs is None and isinstance(args, (tuple, list)) and len(args) == 2
    if pair and (_compares(loss) if isinstance(model, nn.Module) else getattr(model, "loss_fn", None) is not None):
        return model, *args
    if pair and loss is None and isinstance(model, nn.Module) and _has_target(model, *args):
        raise FxampError(
            "the target returns (model, (inputs, target)): give the loss of them, a function of output and target, by "
            "--loss, such as --loss net.py:loss"
        )
    if isinstance(model, nn.Module):
        return model, _batch(model, args, kwargs), None
    return model, args, kwargs


def _compares(loss: Callable[..., Any] | None) -> bool:
    """Say whether a loss cannot be called with an output alone, so that a pair is inputs and target."""
    if loss is None:
        return False
    try:
        inspect.signature(loss).bind(None)
    except TypeError:
        return True
    except ValueError:  # a builtin without a signature
        return False
    return False


def _has_target(model: nn.Module, first: Any, second: Any) -> bool:
    """Say whether a model takes the first of a pair, and not both."""
    if isinstance(first, dict):
        return _binds(model, **first)
    return not _binds(model, first, second) and _binds(model, first)


def _binds(model: nn.Module, *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _batch(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return what a model is called with as one batch."""
    if not kwargs:
        return tuple(args) if isinstance(args, list) else args
    args = () if args is None else args if isinstance(args, (tuple, list)) else (args,)
    return inspect.signature(model.forward).bind(*args, **kwargs).arguments


def step_asked(args: argparse.Namespace, verb: str) -> tuple[Any, dict[str, Any]]:
    """Return the model or TrainStep of a target, and its inputs, target, loss and batches as options of a diagnostic.

    Raises:
        FxampError: There is no batch.
    """
    loss = None if args.loss is None else load_callable(args.loss)
    made = load_target(args.target)
    options = {} if loss is None else {"loss": loss}
    if getattr(args, "batches", None) is not None:
        return made[0], {**options, "batches": load_callable(args.batches)()}
    model, inputs, target = step_of(made, f"{verb}: a batch is needed", loss)
    return model, {**options, "inputs": inputs, "target": target}


@contextlib.contextmanager
def under(model: Any, policy: str | None, default: str) -> Iterator[tuple[Any, str]]:
    """Give a model as it is to run, and a note on what it runs under; a TrainStep or a view has a policy of its own.

    Raises:
        PolicyError: It has its own policy, and one was given.
    """
    whole = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(model, nn.Module) or converted_in(model):
        if policy is not None and isinstance(whole, nn.Module) and converted_in(whole):
            raise PolicyError("the target is converted already, by its own policy; leave out --policy")
        if policy is not None:
            raise PolicyError(f"a {type(model).__name__} runs as it is; leave out --policy, or let it train a view")
        yield model, ""
        return
    level, _, rest = (policy or default).partition(",")
    if level == AUTOCAST:
        device = _device(model)
        dtype = Policy.parse(f"O1{',' * bool(rest)}{rest}").dtype or torch.get_autocast_dtype(device)
        with torch.autocast(device, dtype):
            yield model, f"it ran under torch.autocast, in {str(dtype).removeprefix('torch.')}"
    elif level == FP32:
        yield model, ""
    else:
        yield convert(model, policy=policy or default), ""


def _device(model: nn.Module) -> str:
    """Return the type of the device of a model's first parameter."""
    return next((t.device.type for t in (*model.parameters(), *model.buffers())), "cpu")
