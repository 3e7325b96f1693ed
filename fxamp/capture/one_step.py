"""The sizes and dtypes that a recurrent layer gives, from one of its time steps.

To torch such a layer is a composite of all its steps, and whoever asks for its result on fake tensors runs them one by
one. They are alike: the first has the dtypes of all, and their number is the one size that grows.

Before: gru(x: [1000, 3, 8], ...)                  After: y, h = gru(x[:1], ...); y.expand(1000, 3, 16), h
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from passes._torch import own_schema
from passes.graph.values import first_step
from passes.ops.rules import RULES

from .._torch import fakes_by

# Of a sequence in one tensor, with weights that are tensors: those of a quantized layer are objects.
_OVERLOADS = tuple(
    overload
    for name, row in RULES.items()
    if row.recurrent
    and str(own_schema(overload := getattr(torch.ops.aten, name).input).arguments[2].type) == "List[Tensor]"
)


def fakes_of_one_step() -> contextlib.AbstractContextManager[None]:
    """Return a context in which recurrent layers run one step where they run on fake tensors, as Dynamo has them do."""
    return fakes_by(_by_one_step, _OVERLOADS)


def _by_one_step(layer: Callable[..., Any], x: Tensor, hx: Any, weights: Any, *settings: Any) -> Any:
    batch_first = settings[-1]
    steps = x.shape[1 if batch_first else 0]
    if isinstance(steps, int) and steps < 2:
        return layer(x, hx, weights, *settings)  # none is an error of the layer's own
    step, *states = layer(first_step(x, batch_first), hx, weights, *settings)
    # Time-major in memory, and not a leaf of autograd, as the results of the steps that torch puts together.
    if batch_first:
        return step.transpose(0, 1).expand(steps, -1, -1).contiguous().transpose(0, 1), *states
    return step.expand(steps, -1, -1).contiguous(), *states
