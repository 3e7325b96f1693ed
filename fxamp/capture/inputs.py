"""Example inputs: what a model is called with when it is captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from passes.contract.errors import CaptureError

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def as_inputs(args: Any, kwargs: Any) -> Inputs | None:
    """Return positional and keyword inputs; None when there are none.

    Args:
        args: a tuple or list of inputs, or a lone tensor.
        kwargs: a mapping of inputs by name.

    Raises:
        CaptureError: they are something else.
    """
    if args is None and kwargs is None:
        return None
    if isinstance(args, torch.Tensor):
        args = (args,)
    if args is None:
        args = ()
    if not isinstance(args, (tuple, list)):
        way_out = "pass kwargs=" if isinstance(args, Mapping) else "write (x,) for one input"
        raise CaptureError(f"args is a tuple of example inputs, not {type(args).__name__}; {way_out}.")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise CaptureError(f"kwargs is a dict of example inputs, not {type(kwargs).__name__}.")
    return tuple(args), dict(kwargs or {})
