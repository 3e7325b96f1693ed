"""The last pass: bring `meta["val"]` up to date, so that `print_readable` shows the dtype of every value.

Before: linear: f32[2, 4] = linear(to_dtype: f32[2, 4], ...)
After:  linear: bf16[2, 4] = linear(to_dtype: bf16[2, 4], ...)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .._torch import FakeTensor
from ..form import Ensures, Unit
from ..graph.values import retyped


@dataclass(frozen=True)
class Annotate:
    """Write the dtypes that were assigned to a graph into it."""

    name: ClassVar = "annotate"
    ensures: ClassVar = Ensures.NOTHING_NEW

    def __call__(self, unit: Unit) -> dict[str, int]:
        """Give every value of one graph the dtype that it was assigned; no edit is made."""
        values: dict[Any, Any] = {}
        for node in unit.graph.nodes:
            value, dtype = node.meta.get("val"), unit.decided.dtypes.get(node)
            if isinstance(value, FakeTensor) and isinstance(dtype, torch.dtype):
                if value.dtype != dtype:
                    key = (value.fake_mode, dtype, *_layout(value))
                    values[key] = node.meta["val"] = values[key] if key in values else retyped(value, dtype)
            elif value is not None:
                node.meta["val"] = retyped(value, dtype)
        return {}


def _layout(value: torch.Tensor) -> list[Any]:
    """Return all properties of a tensor but its dtype; symbolic sizes become expressions, which can be compared."""
    if value.layout is not torch.strided:
        return [id(value)]
    sizes = (*value.shape, *value.stride())
    return [value.device, value.dim(), *(s if isinstance(s, int) else s.node.expr for s in sizes)]
