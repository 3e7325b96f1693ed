"""Which ops may read one cast of a value, or one storage of several casts, as the policy shares casts.

Readers of one cast have their gradients summed in its dtype. Readers of casts that share a storage have them cast one
by one, and summed in the dtype of the value, as if each had a copy of its own.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ..contract.devices import DEVICES
from .notes import is_parameter
from .values import concrete_size


def shares_cast(mode: str, value: Node, by_rule_low: bool, grad: frozenset[Node]) -> bool:
    """Say whether an op may read a cast of a value that another op reads.

    Args:
        mode: "always"; "weights" for parameters only; "never"; "storage" where autocast does so, or no gradient flows.
        value: what is cast.
        by_rule_low: the reader is low by its rule: for such ops autocast keeps the low copies of leaves.
        grad: the values that gradients flow through.
    """
    if mode == "storage":
        return value not in grad or (by_rule_low and is_leaf(value))
    return mode == "always" or (mode == "weights" and is_parameter(value))


def shares_storage(mode: str, value: Node, device: str) -> bool:
    """Say whether casts of a value that need a node of autograd each share one storage, which pays for large values."""
    least, held = DEVICES[device].shares_storage_from, value.meta.get("val")
    if mode != "storage" or least is None or not isinstance(held, torch.Tensor):
        return False
    elements: int = concrete_size(held.numel())
    return elements >= least


def is_leaf(value: Node) -> bool:
    """Say whether a value is a leaf of autograd, such as a parameter."""
    held = value.meta.get("val")
    return is_parameter(value) or (value.op == "placeholder" and isinstance(held, torch.Tensor) and held.is_leaf)
