"""Split gain and bias off a norm in 16 bits whose kernel would sum their gradients in 16 bits.

The error of such a sum grows as the root of the rows: on a CPU it is 9 % at 8,192 rows in BF16, and 0.2 % without it.
Where neither needs gradients, or the device sums in FP32, nothing is changed.

Before: layer_norm(x: bf16, [8], weight: f32, bias: f32)
After:  norms.layer_norm(x, [8], weight, bias, 1e-5)        (the norm without them, then they, beside it in FP32)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from ..form import Ensures, Unit
from ..graph.grad import requires_grad
from ..graph.values import LOW_DTYPES
from ..ops import ops
from ..ops.facts import facts_of
from ..ops.rules import row_of
from ..runtime import norms


@dataclass(frozen=True)
class SplitNorms:
    """Split the norms of a graph; for levels that run more in 16 bits than autocast does."""

    name: ClassVar = "split-norms"
    ensures: ClassVar = Ensures.DTYPES

    def __call__(self, unit: Unit) -> dict[str, int]:
        """Call the parts of each norm, in place of the norm."""
        low = [n for n in unit.graph.nodes if row_of(n).affine and unit.decided.dtypes[n] in LOW_DTYPES]
        grad = requires_grad(unit.graph) if low else frozenset()
        split = [n for n in low if _sums_low(unit, n, grad)]
        for node in split:
            names = ("input", "normalized_shape", "weight", "bias")
            node.args = (*(ops.argument(node, name) for name in names), ops.argument(node, "eps", 1e-5))
            node.op, node.target, node.kwargs = "call_function", norms.layer_norm, {}
        return {"norm": len(split)}


def _sums_low(unit: Unit, node: Node, grad: frozenset[Node]) -> bool:
    """Say whether a norm sums gradients of its parameters in low; those that are low themselves are left."""
    affine = [o.node for o in ops.operands(node) if o.name in row_of(node).affine]
    fp32 = all(unit.decided.dtypes[n] == torch.float32 for n in affine)
    device, low = unit.target
    return fp32 and not grad.isdisjoint(affine) and facts_of(node, device, low).sums_low
