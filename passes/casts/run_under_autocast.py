"""Pass 5: run ops without a rule under `torch.autocast`, which casts whatever they call inside.

Before: attention(q, k)                                   q, k: in the dtypes that autocast hands the op
After:  under_autocast(attention, "cpu", bfloat16, q, k)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph

from ..colouring import AS_AUTOCAST, Assignment
from ..contract.policy import Policy
from ..form import Ensures, Unit
from ..graph.notes import note_of, region_on
from ..ops import ops
from ..runtime.regions import under_autocast


@dataclass(frozen=True)
class RunUnderAutocast:
    """Give each op that was decided to run as under autocast a region of its own.

    Attributes:
        policy: with dtype and device filled in.
    """

    name: ClassVar = "run-under-autocast"
    ensures: ClassVar = Ensures.STRUCTURE
    policy: Policy

    def __call__(self, unit: Unit) -> dict[str, int]:
        """Change the calls of one graph."""
        return {"call": run_under_autocast(unit.graph, unit.decided, self.policy)}


def run_under_autocast(graph: Graph, assignment: Assignment, policy: Policy) -> int:
    """Put the calls of one graph under autocast, in place; return how many there were."""
    edits = 0
    for node in graph.nodes:
        colouring = assignment.colours.get(node)
        if colouring is None or colouring.kind != AS_AUTOCAST or note_of(node).under_autocast:
            continue
        region = region_on(node, str(policy.device))
        low = (region and region[2]) or policy.dtype
        node.args = (ops.operator_of(node), policy.device, low, *node.args)
        node.target = under_autocast
        edits += 1
    return edits
