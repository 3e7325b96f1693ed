"""A model in float64, for as long as a step takes: the same tensors, which hooks and losses know, with other numbers.

A copy of the model would be another one: the hooks on its parameters would be gone, and a loss that reads parameters
would still read those of the model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from passes._torch import OpOverload, own_schema, pytree

from ..observe.interpret import Ops


@contextlib.contextmanager
def in_float64(model: nn.Module, *, draws: bool) -> Iterator[None]:
    """Hold the parameters and buffers of a model in float64 inside; if it `draws` random numbers, draw those of FP32.

    Dynamo does not trace below a dispatch mode, and a body of `torch.cond` has to be traced.
    """
    every = {id(t): t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()}
    narrow = [(t, t.data) for t in every.values()]
    try:
        for t, data in narrow:
            t.data = data.double()
        with Ops(_drawn_in_fp32) if draws else contextlib.nullcontext():
            yield
    finally:
        for t, data in narrow:
            t.data = data


def generators(device: str) -> list[Tensor]:
    """Return the states of the generators that a step on a device draws from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else ())]


def _drawn_in_fp32(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw in FP32 what is to be float64: for another dtype a generator gives other numbers."""
    if not _draws(func) or not any(map(_is_wide, pytree.tree_leaves((args, kwargs)))):
        return func(*args, **kwargs)
    narrow_args, narrow_kwargs = pytree.tree_map(_narrowed, (args, kwargs))
    made = func(*narrow_args, **narrow_kwargs)
    if own_schema(func).is_mutable:
        return args[0].copy_(made)
    return made.double() if made.dtype == torch.float32 else made


@functools.cache
def _draws(func: Any) -> bool:
    """Say whether an op gives random numbers and nothing else, as `randn_like` and `normal_` do, and no dropout."""
    if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    schema = own_schema(func)
    return sum("Tensor" in str(a.type) for a in schema.arguments) <= 1 and len(schema.returns) == 1


def _is_wide(value: Any) -> bool:
    return value is torch.float64 or (isinstance(value, Tensor) and value.dtype == torch.float64)


def _narrowed(value: Any) -> Any:
    if not _is_wide(value):
        return value
    return value.float() if isinstance(value, Tensor) else torch.float32
