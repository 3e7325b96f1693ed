"""Add the gradients of kept casts to those of their weights, in one compiled graph that casts while it adds.

It is done for casts that are leaves (see `fxamp.train.weights.kept`). Their gradients are in 16 bits. Autograd would
cast each to FP32 and store that, and read it again to add it.

Before: weight.grad += low_gradient.to(float32)                       for each weight
After:  foreach_add_([weight.grad, ...], [low_gradient, ...])         for all of them together
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from passes._torch import add_together

from ..weights.kept import KeptCast
from .compile_settings import CompileSettings
from .compiled_region import Region


class GradientSums:
    """Adds up the gradients of kept casts after each backward.

    Attributes:
        region: What is compiled, for the weights that have gradients when it first runs. Where others have, as where an
            input decides which layers run, it runs uncompiled: it is not compiled for each choice of layers.
    """

    def __init__(self, settings: CompileSettings) -> None:
        self.region = Region("add gradients of kept casts", sum_region, settings.inner, dynamic=False)
        self._compiled_for: list[int] = []

    def __call__(self, casts: Iterable[KeptCast]) -> None:
        """Move the gradients of casts to their weights."""
        totals: list[Tensor] = []
        gradients: list[Tensor] = []
        positions: list[int] = []
        for cast in casts:
            given = cast.take_gradient()
            if given is None:
                continue
            weight, gradient = given
            if weight.grad is None:
                weight.grad = gradient.to(weight.dtype)
            else:
                totals.append(weight.grad)
                gradients.append(gradient)
                positions.append(cast.at)
        if not totals:
            return
        self._compiled_for = self._compiled_for or positions
        with torch.no_grad():
            (self.region if positions == self._compiled_for else sum_region)(totals, gradients)


def sum_region(totals: list[Tensor], gradients: list[Tensor]) -> None:
    """Add gradients to totals in place; `torch.compile` compiles this."""
    add_together(totals, gradients)
