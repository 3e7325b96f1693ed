"""Small models, and the comparison of a converted module with the model it was made from."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes._torch import pytree
from passes.ops.rules import RULES, is_of_this_torch

# Rows of ops that this release of torch does not have, or not on a list.
OTHER_RELEASES = {row.name for row in RULES.values() if not is_of_this_torch(row)}

# The Dynamo of torch 2.11 fails on some code that later ones trace, and leaves other code to Python.
OLD_DYNAMO = torch.__version__ < "2.13"


class Layers(nn.Module):
    """A model of a forward and what that reads: layers, parameters, other tensors, which are buffers, and the rest."""

    def __init__(self, forward: Callable[..., Any] | None, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        if forward is not None:
            # A class of its own, for front ends look at the class; not the instance, whose attributes stay as they are.
            self.__class__ = type(forward.__name__, (type(self),), {"forward": forward})


class Two(Layers):
    """Two linear layers, joined by the function it is given."""

    l: nn.Linear  # noqa: E741
    m: nn.Linear

    def __init__(self, forward: Callable[..., Any] | None = None, **parts: Any) -> None:
        super().__init__(forward, l=nn.Linear(6, 6), m=nn.Linear(6, 6), **parts)

    def forward(self, x: Tensor) -> Any:
        return self.m(self.l(x))


@functools.cache
def autocast_runs_lstms(dtype: torch.dtype = torch.bfloat16) -> bool:
    """Say whether oneDNN trains LSTMs in a low dtype on this CPU; if not, `torch.autocast` raises.

    A CPU may have the kernel for inference alone: FP16 on one that has AVX-512 and no AMX.
    """
    try:
        with torch.autocast("cpu", dtype=dtype):
            nn.LSTM(6, 6)(torch.randn(3, 6))[0].sum().backward()
    except RuntimeError:
        return False
    return True


def example(rows: int = 4) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))


def run(module: nn.Module, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, list[Any], list[Any], Tensor]:
    """Return output, gradients, buffers (restored) and random state of one call, from seed 0."""
    kept = [(b, b.clone()) for b in model.buffers()]
    torch.manual_seed(0)
    output = module(*args, **kwargs)
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    parameters = [p for p in model.parameters() if p.requires_grad]
    leaves = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in leaves]
    total = sum((t.float() * torch.linspace(0.5, 1.5, t.numel()).view(t.shape)).sum() for t in leaves)
    gradients = list(torch.autograd.grad(total, parameters, allow_unused=True)) if isinstance(total, Tensor) else []
    buffers = [b.clone() for b, _ in kept]
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)
    return output, gradients, buffers, torch.get_rng_state()


def assert_same(a: Any, b: Any) -> None:
    """Check that two values are equal to the bit, containers and all."""
    (left, spec), (right, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    assert spec == other
    for x, y in zip(left, right, strict=True):
        if isinstance(x, Tensor):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)
        else:
            assert x == y


def assert_is_eager(converted: nn.Module, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Check outputs, gradients, buffers and random state of one call against the model's."""
    inputs = args if args or kwargs else (example(),)
    for ours, eager in zip(run(converted, model, inputs, kwargs), run(model, model, inputs, kwargs), strict=True):
        assert_same(ours, eager)


def fingerprint(model: nn.Module) -> Any:
    """Return all that conversion may not change of a model: classes, attributes, flags, hooks, values."""
    state = torch.random.get_rng_state()
    out = []
    for path, module in model.named_modules():
        plain = {k: copy.copy(v) if isinstance(v, (dict, list, set)) else v for k, v in module.__dict__.items()}
        tensors = [
            (id(t), t._version, t.clone(), t.grad)
            for t in (*module._parameters.values(), *module._buffers.values())
            if t is not None
        ]
        out.append((path, type(module), plain, tensors))
    return out, state


def assert_untouched(model: nn.Module, before: Any) -> None:
    """Check that a model is as it was when `before` was taken."""
    (old, state), (new, now) = before, fingerprint(model)
    assert torch.equal(state, now)
    assert [e[0] for e in old] == [e[0] for e in new]
    for (path, kind, plain, tensors), (_, kind2, plain2, tensors2) in zip(old, new, strict=True):
        assert kind is kind2, path
        assert list(plain) == list(plain2), path
        for name in plain:
            assert _same_object(plain[name], plain2[name]), f"{path}.{name}"
        for (i, _, value, grad), (j, _, value2, grad2) in zip(tensors, tensors2, strict=True):
            assert i == j
            assert grad is grad2
            assert torch.equal(value, value2)


def _same_object(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(a[k] is b[k] for k in a)
    if isinstance(a, (list, set)):
        return bool(a == b)
    return a is b or bool(a == b)


def matrix(*values: Any) -> list[Any]:
    """Return values for `parametrize` that are in the matrix."""
    return [pytest.param(value, marks=pytest.mark.matrix) for value in values]


def in_turns(*arguments: Iterable[Any]) -> list[Any]:
    """Return every combination for `parametrize`, of which by default each one of the others has one of the last.

    Which one that is goes round, so that each of the last is tried; the other combinations are in the matrix.
    """
    listed = [list(enumerate(values)) for values in arguments]
    made = []
    for combination in itertools.product(*listed):
        *others, last = (at for at, _ in combination)
        marks = () if sum(others) % len(listed[-1]) == last else pytest.mark.matrix
        made.append(pytest.param(*(value for _, value in combination), marks=marks))
    return made


def named(value: Any) -> str:
    """Return the same id for a parameter in every process: a function without its address."""
    return getattr(value, "__name__", None) or re.sub(r" at 0x[0-9a-f]+", "", str(value))


class TimesHundred(torch.autograd.Function):
    """A function whose backward is not the derivative of its forward, so that nobody can leave it out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 100, None


def saved(value: Any, weights_only: bool = False) -> Any:
    """Return a value after `torch.save` and `torch.load`."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)
