"""Pass 5: run ops that the rules do not cover under `torch.autocast`, which casts whatever they call inside.

Before: attention(q, k)                                   q, k: in the dtypes that autocast hands the op
After:  under_autocast(attention, "cpu", bfloat16, q, k)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .._torch import enter_autocast, exit_autocast
from ..contract.policy import Policy
from ..form import AS_AUTOCAST, Ensures, Unit
from ..graph.notes import region_on
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
        graph, edits = unit.graph, 0
        for node in list(graph.nodes):
            colouring = unit.decided.colours.get(node)
            if colouring is None or colouring.kind != AS_AUTOCAST:
                continue
            region, op = region_on(node, str(self.policy.device)), ops.operator_of(node)
            low = (region and region[2]) or self.policy.dtype
            if op is not None:
                node.target, node.args = under_autocast, (op, self.policy.device, low, *node.args)
            else:  # a method or a Python function, which the code of a graph cannot hold as an argument
                with graph.inserting_before(node):
                    entered = graph.call_function(enter_autocast, (self.policy.device, low, True, True))
                with graph.inserting_after(node):
                    graph.call_function(exit_autocast, (entered,))
            edits += 1
        return {"call": edits}
