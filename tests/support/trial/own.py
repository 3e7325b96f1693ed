"""Which outputs of a view may have another dtype than the model without autocast gives them.

Dynamo writes a low dtype that was read off what autocast made low as it does one that the author wrote, or read off a
low tensor of the model's own. So what is cast to one may come out in FP32; or low, where the model was given low
tensors, and what is cast is one of these or made of them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fxamp.observe.snapshot import preserved, same_attributes
from passes._torch import enter_autocast
from passes.graph.values import LOW_DTYPES, literal_dtype
from passes.ops import ops

from .runs import Run


class Called(Protocol):
    """A model with its inputs."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> dict[str, Any]: ...


def now_fp32(got: Run, plain: Run) -> list[int]:
    """Return which outputs are FP32 that the model gives low."""
    return [i for i, a, b in _pairs(got, plain) if a.dtype is torch.float32 and b.dtype in LOW_DTYPES]


def now_low(got: Run, plain: Run, inputs: Sequence[Tensor]) -> list[int]:
    """Return which outputs have the low dtype of one of the inputs, and FP32 in the model."""
    given = {t.dtype for t in inputs} & {*LOW_DTYPES}
    return [i for i, a, b in _pairs(got, plain) if b.dtype is torch.float32 and a.dtype in given]


def of_other_branches(autocast: Run | None, plain: Run) -> list[int]:
    """Return which outputs are float64 in the model, and not under autocast, where it branched on a dtype."""
    pairs = () if autocast is None else _pairs(autocast, plain)
    return [i for i, a, b in pairs if b.dtype is torch.float64 and a.dtype is not torch.float64]


def given_back(outputs: Iterable[int], got: Run, inputs: Sequence[Tensor]) -> list[int]:
    """Return those of the outputs that are an input, as it is."""
    places = [i for i, value in enumerate(got.outputs) if isinstance(value, Tensor)]
    shared = dict(zip(places, got.shared, strict=True))
    return [i for i in outputs if any(at < len(inputs) for at in shared[i])]


def names_low(found: Called, context: Any = None) -> bool:
    """Say whether the model names a low dtype, as `.to(torch.bfloat16)` and `.sum(dtype=...)`, or enters autocast.

    `context` is what it is captured in: under autocast, a dtype that is read off what is low there is named too.
    """
    seen: list[torch.fx.Node] = []

    def inner(gm: Any, inputs: Any) -> Any:
        seen.extend(n for part in gm.modules() if hasattr(part, "graph") for n in part.graph.nodes)
        return gm.forward

    torch._dynamo.reset()
    context = context or contextlib.nullcontext()
    with same_attributes(found.model), preserved(found.model), context, contextlib.suppress(Exception):
        torch.compile(found.model, backend=inner)(*copy.deepcopy(found.args), **copy.deepcopy(found.kwargs))
    named = (n for n in seen if literal_dtype(n) in LOW_DTYPES)
    # A cast by name, as `.half()`, is the author's own in any case.
    return any(n.op == "call_function" or str(n.target) not in ops.CAST_METHODS for n in named) or any(
        n.target is enter_autocast for n in seen
    )


def with_dtypes(got: Run, of: Run, which: Sequence[int] | None = None) -> Run:
    """Return a run whose outputs, or these of them, have the dtypes of another's."""
    outputs = list(got.outputs)
    for i, a, b in _pairs(got, of):
        if (which is None or i in which) and a.is_floating_point() and b.is_floating_point():
            outputs[i] = a.to(b.dtype)
    return replace(got, outputs=outputs)


def unsaturated(got: Run, plain: Run, low: torch.dtype) -> Run:
    """Return a run whose largest numbers of the low dtype are infinite where the model's are.

    From O2 on a downcast that autocast would not make keeps to the finite range of the low dtype.
    """
    outputs, largest = list(got.outputs), torch.finfo(low).max
    for i, a, b in _pairs(got, plain):
        strided = a.layout is b.layout is torch.strided
        if strided and a.is_floating_point() and b.is_floating_point() and a.shape == b.shape:
            outputs[i] = a.where((a.abs() != largest) | ~b.isinf() | (a.sign() != b.sign()), b.to(a.dtype))
    return replace(got, outputs=outputs)


def _pairs(got: Run, plain: Run) -> list[tuple[int, Tensor, Tensor]]:
    pairs = enumerate(zip(got.outputs, plain.outputs, strict=False))
    return [(i, a, b) for i, (a, b) in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)]
