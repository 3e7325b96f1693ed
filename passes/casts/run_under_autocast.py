"""Pass 5: run ops that the rules do not cover under `torch.autocast`, which casts whatever they call inside.

Before: attention(q, k)                                   q, k: in the dtypes that autocast hands the op
After:  under_autocast(attention, "cpu", bfloat16, q, k)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .._torch import enter_autocast, exit_autocast
from ..form import Ensures, UnderAutocast, Unit
from ..ops import ops
from ..runtime.regions import under_autocast


@dataclass(frozen=True)
class RunUnderAutocast:
    """Give each op that is to run as under autocast a region, once casts are shared: no analysis sees through it."""

    name: ClassVar = "run-under-autocast"
    ensures: ClassVar = Ensures.STRUCTURE

    def __call__(self, unit: Unit) -> dict[str, int]:
        """Put the calls of one graph under autocast, in place."""
        graph, colours = unit.graph, unit.decided.colours
        wholes = [(n, e) for n in graph.nodes if n in colours for e in colours[n].edits if isinstance(e, UnderAutocast)]
        for node, (device, low) in wholes:
            op = ops.operator_of(node)
            if op is not None:
                node.target, node.args = under_autocast, (op, device, low, *node.args)
                continue
            with graph.inserting_before(node):  # a method, or a Python function, which the code of a graph cannot hold
                entered = graph.call_function(enter_autocast, (device, low, True, True))
            with graph.inserting_after(node):
                graph.call_function(exit_autocast, (entered,))
        return {"call": len(wholes)}
