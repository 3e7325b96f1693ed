"""Fill in what a policy leaves open: the device, and the low dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from passes._torch import pytree
from passes.contract.devices import DEVICES
from passes.contract.errors import PolicyError
from passes.contract.policy import Policy


def resolve(policy: Policy, model: nn.Module, inputs: Any) -> Policy:
    """Fill in the device (of the parameters, else of the inputs, else the CPU) and the low dtype.

    The low dtype is the ambient autocast's, which is the device's default where there is none.

    Raises:
        PolicyError: fxamp has no op lists for the device.
    """
    device = policy.device or device_of(model, inputs)
    if device not in DEVICES:
        raise PolicyError(
            f"{type(model).__name__} is on '{device}', for which fxamp has no op lists: move the model to one of "
            f"{', '.join(DEVICES)} before converting, or set device= in the policy to one of these."
        )
    dtype = policy.dtype or torch.get_autocast_dtype(device)
    return replace(policy, device=device, dtype=dtype)


def device_of(model: nn.Module, inputs: Any) -> str:
    """Return the kind of device of the parameters, else of the inputs, else the CPU."""
    for found in (model.parameters(), model.buffers(), iter(pytree.tree_leaves(inputs))):
        tensor = next((t for t in found if isinstance(t, torch.Tensor)), None)
        if tensor is not None:
            return "cpu" if tensor.device.type == "meta" else tensor.device.type
    return "cpu"
