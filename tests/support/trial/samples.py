"""torch's own samples of every op and of every module, as models.

`torch.testing._internal` changes settings of the process that imports it, so it is imported where it is used.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from passes._torch import pytree

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
SAMPLES = 2  # of each op, of which the larger is taken
# What they give is what was in memory before, or cannot be the same twice.
UNINITIALISED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_",
                 "resize_as_", "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "uniform")  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A model that calls one op or module, and its inputs."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


class Call(nn.Module):
    """Calls a function or a module on tensors; behind a product, on what is low under autocast.

    The product multiplies by one, so that what an op asks of its inputs still holds.
    """

    def __init__(self, called: Any, leaves: list[Any], tree: Any, product: bool) -> None:
        super().__init__()
        self.called, self.product = called, product
        self.constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        self.spread = _spread(leaves, tree)
        if product:
            self.one = nn.Parameter(torch.ones(1, 1))

    def forward(self, *tensors: Tensor) -> Any:
        """Call it on its tensors, in the order in which it was given them."""
        if self.product:
            tensors = tuple([self._behind(t) for t in tensors])
        return self.spread(self.called, tensors, self.constants)

    def _behind(self, value: Tensor) -> Tensor:
        if value.dtype is not torch.float32 or value.layout is not torch.strided or not value.numel():
            return value
        return torch.matmul(value.reshape(-1, 1), self.one).reshape(value.shape)


def _spread(leaves: list[Any], tree: Any) -> Callable[..., Any]:
    """Return `lambda called, t, c: called(t[0], [t[1], c[2]], dim=c[3])`, which torch.compile traces at once."""
    places = itertools.count()
    texts = [f"t[{next(places)}]" if isinstance(leaf, Tensor) else f"c[{i}]" for i, leaf in enumerate(leaves)]
    args, kwargs = pytree.tree_unflatten(texts, tree)
    given = [*map(_text, args), *(f"{name}={_text(value)}" for name, value in kwargs.items())]
    made: Callable[..., Any] = eval(f"lambda called, t, c: called({', '.join(given)})")
    return made


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(v)}" for key, v in value.items()) + "}"
    inside = "".join(f"{_text(v)}, " for v in value)
    return f"[{inside}]" if isinstance(value, list) else f"({inside})"


def names() -> list[str]:
    """Return what there are samples of: `op:NAME.VARIANT`, `module:NAME`."""
    ops, modules = _databases()
    return [f"op:{info.name}.{info.variant_test_name}" for info in ops] + [f"module:{info.name}" for info in modules]


def sample(name: str, dtype: str, *, product: bool) -> Sample | None:
    """Return a sample of an op or module; None where torch has none of that dtype on a CPU."""
    ops, modules = _databases()
    kind, _, rest = name.partition(":")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "op":
            info = next(i for i in ops if f"{i.name}.{i.variant_test_name}" == rest)
            with contextlib.closing(_of_op(info, DTYPES[dtype])) as made:
                found = list(itertools.islice(made, SAMPLES))
        else:
            info = next(i for i in modules if i.name == rest)
            found = list(itertools.islice(_of_module(info, DTYPES[dtype]), SAMPLES))
    if not found:
        return None
    called, given = max(found, key=lambda f: sum(t.numel() for t in pytree.tree_leaves(f[1]) if isinstance(t, Tensor)))
    leaves, tree = pytree.tree_flatten(given)
    args = tuple(t.detach() if t.layout is torch.strided else t for t in leaves if isinstance(t, Tensor))
    return Sample(Call(called, leaves, tree, product), args)


def _of_op(info: Any, dtype: torch.dtype) -> Generator[tuple[Any, Any], None, None]:
    if dtype in info.supported_dtypes("cpu"):
        for s in info.sample_inputs_func(info, "cpu", dtype, False):
            yield info.op, ((s.input, *s.args), s.kwargs)


def _of_module(info: Any, dtype: torch.dtype) -> Iterator[tuple[Any, Any]]:
    if dtype is not torch.float32 or dtype not in info.dtypes:
        return
    for s in info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=False, training=False):
        if s.forward_input is None:
            continue
        made = info.module_cls(*s.constructor_input.args, **s.constructor_input.kwargs)
        if any(isinstance(p, UninitializedParameter) for p in made.parameters()):
            made(*s.forward_input.args, **s.forward_input.kwargs)  # a lazy module becomes another one at its first call
        yield made.eval(), (s.forward_input.args, s.forward_input.kwargs)


def _databases() -> tuple[Any, Any]:
    from torch.testing._internal import common_methods_invocations as invocations
    from torch.testing._internal.common_modules import module_db

    # Some of its calls seed the generator first, which no capture could keep.
    vars(invocations)["wrapper_set_seed"] = lambda function, *args, **kwargs: function(*args, **kwargs)
    return invocations.op_db, module_db
