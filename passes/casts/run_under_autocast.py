"""Pass 5: run ops without a rule under `torch.autocast`, which casts whatever they call inside.

Before: attention(q, k)                                   q, k: in the dtypes that autocast hands the op
After:  under_autocast(attention, "cpu", bfloat16, q, k)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..contract.policy import Policy
from ..form import AS_AUTOCAST, Ensures, Unit
from ..graph.notes import note_of, region_on
from ..ops import ops
from ..runtime.regions import under_autocast


@dataclass(frozen=True)
class RunUnderAutocast:
    """Give each op that was decided to run as under autocast a region of its own."""

    name: ClassVar = "run-under-autocast"
    ensures: ClassVar = Ensures.STRUCTURE
    policy: Policy

    def __call__(self, unit: Unit) -> dict[str, int]:
        """Put the calls of one graph under autocast, in place."""
        edits = 0
        for node in unit.graph.nodes:
            colouring = unit.decided.colours.get(node)
            if colouring is None or colouring.kind != AS_AUTOCAST or note_of(node).under_autocast:
                continue
            region = region_on(node, str(self.policy.device))
            low = (region and region[2]) or self.policy.dtype
            node.args = (ops.operator_of(node), self.policy.device, low, *node.args)
            node.target = under_autocast
            edits += 1
        return {"call": edits}
