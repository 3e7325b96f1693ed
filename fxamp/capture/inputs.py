"""Example inputs: what a model is called with when it is captured, and what of the policy is settled by it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from passes._torch import pytree
from passes.contract.devices import DEVICES
from passes.contract.errors import CaptureError, PolicyError
from passes.contract.plan import Plan
from passes.contract.policy import Policy

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def as_inputs(args: Any, kwargs: Any) -> Inputs | None:
    """Return positional and keyword inputs, None when there are none; CaptureError for what can be neither."""
    if args is None and kwargs is None:
        return None
    if isinstance(args, torch.Tensor):
        args = (args,)
    if args is None:
        args = ()
    if not isinstance(args, (tuple, list)):
        raise CaptureError(f"args is a tuple of example inputs, not {type(args).__name__}; {_instead(args)}.")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise CaptureError(
            f"kwargs is a dict of example inputs, not {type(kwargs).__name__}; several inputs by position are one "
            "tuple: fxamp.convert(model, (x, y))."
        )
    return tuple(args), dict(kwargs or {})


def _instead(args: Any) -> str:
    if isinstance(args, (str, Policy)):
        return f"give a policy by its name: policy='{args}'"
    if isinstance(args, Plan):
        return "give a plan by its name: plan=..."
    if isinstance(args, Mapping):
        return "pass kwargs="
    if isinstance(args, Iterable):
        return "give the inputs of one batch, such as next(iter(...))[0] where it yields pairs (inputs, target)"
    return "write (x,) for one input"


def resolve(policy: Policy, model: nn.Module, inputs: Any) -> Policy:
    """Fill in the device (of the parameters, else of the inputs, else the CPU) and the low dtype: autocast's."""
    device = policy.device or device_of(model, inputs)
    if device not in DEVICES:
        raise PolicyError(
            f"{type(model).__name__} is on '{device}', for which fxamp has no op lists: move the model to one of "
            f"{', '.join(DEVICES)} before converting, or set device= in the policy to one of these."
        )
    dtype = policy.dtype or torch.get_autocast_dtype(device)
    return replace(policy, device=device, dtype=dtype)


def device_of(model: nn.Module, inputs: Any) -> str:
    """Return the kind of device of the parameters, else of the buffers, else of the inputs, else the CPU."""
    return first_device(itertools.chain(model.parameters(), model.buffers(), pytree.tree_leaves(inputs)))


def first_device(values: Iterable[Any]) -> str:
    """Return the kind of device of the first tensor among some values; the CPU where there is none, or it is meta."""
    found = next((v.device.type for v in values if isinstance(v, torch.Tensor)), "cpu")
    return "cpu" if found == "meta" else found
