"""Graphs as text, after a pass of the compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from passes import Pass, Unit, Watcher
from passes.ops import ops


@dataclass
class Printed(Watcher):
    """Writes every graph after the pass of a name: a line for each node and its dtype, and how often rewrites fired."""

    name: str
    write: Callable[[str], object]

    def after(self, step: Pass, unit: Unit, edits: Mapping[str, int]) -> None:
        """Write the graph if this is the pass to print."""
        if step.name == self.name:
            fired = ", ".join(f"{rule} {n}" for rule, n in edits.items())
            self.write(f"graph {unit.index} after {step.name}{': ' * bool(fired)}{fired}\n{listing(unit)}\n")


def listing(unit: Unit) -> str:
    """Return a graph as text: a line for each node, with the dtype that its value has been assigned."""
    dtypes = {} if unit.assignment is None else unit.assignment.dtypes
    lines = []
    for node in unit.graph.nodes:
        dtype = dtypes.get(node)
        shown = "" if dtype is None else f": {str(dtype).replace('torch.', '')}"
        what = {"placeholder": "input", "get_attr": str(node.target), "output": "return"}.get(node.op, ops.name(node))
        args = [*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())]
        call = f"{what}({', '.join(args)})" if node.op.startswith("call") else " ".join([what, *args])
        lines.append(f"  {call}" if node.op == "output" else f"  {node.name}{shown} = {call}")
    return "\n".join(lines)
