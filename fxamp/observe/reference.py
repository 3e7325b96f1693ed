"""What errors are measured against: a model in float64, where modules that compute in 8 bits compute as before.

In float64 it has the same tensors, which hooks and losses know, with other numbers. A copy of the model would be
another one: the hooks on its parameters would be gone, and a loss that reads parameters would read those of the model.

In 8 bits computes torchao's Float8Linear, for example: no plan rounds there, or counts it. Such a module is a subclass
of one of torch.nn's, over the same parameters: what it was made of is that class's forward.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from passes._torch import OpOverload, own_schema, pytree
from passes.contract.errors import PolicyError

from .interpret import Ops

_PACKAGE = "torchao"


def eight_bit_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by path, the modules of a model whose forward torchao has written."""
    return {path: m for path, m in model.named_modules() if _owner(getattr(type(m), "forward", None)) == _PACKAGE}


def listed(modules: dict[str, nn.Module]) -> str:
    """Return how many modules there are, their classes, and the first paths."""
    kinds = ", ".join(dict.fromkeys(type(m).__name__ for m in modules.values()))
    more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
    return f"{len(modules)} modules of {_PACKAGE} ({kinds}: {', '.join(list(modules)[:3])}{more})"


@contextlib.contextmanager
def as_made_of(model: nn.Module) -> Iterator[None]:
    """Let modules that compute in 8 bits compute inside as those that they were made of.

    Raises:
        PolicyError: what one was made of is not kept: its class is none of torch.nn's, or its weights are quantized.
    """
    changed = eight_bit_modules(model)
    plain = {path: _plain_forward(path, module) for path, module in changed.items()}
    before = {path: module.__dict__.get("forward") for path, module in changed.items()}
    try:
        for path, module in changed.items():
            module.__dict__["forward"] = plain[path]
        yield
    finally:
        for path, module in changed.items():
            module.__dict__.pop("forward", None)
            if (own := before[path]) is not None:
                module.__dict__["forward"] = own


def _plain_forward(path: str, module: nn.Module) -> types.MethodType:
    base = next((c for c in type(module).__mro__ if c is not nn.Module and c.__module__.startswith("torch.nn.")), None)
    quantized = [name for name, p in module.named_parameters(recurse=False) if type(p.data) is not Tensor]
    if base is None or quantized:
        what = f"its {quantized[0]} is a {type(module.get_parameter(quantized[0]).data).__name__}" if quantized else (
            "its class is none of torch.nn's")  # fmt: skip
        raise PolicyError(
            f"'{path}' ({type(module).__name__}) computes in 8 bits, and what it was made of is not kept ({what}): "
            "errors would be measured against 8 bits. Give the model as it was before that conversion."
        )
    return types.MethodType(getattr(base, "forward"), module)  # noqa: B009 - a type has none, as a checker sees it


def _owner(function: object) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]


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
