"""What Inductor calls to cut a joint graph into forward and backward; its private names for that are in this file alone.

    joint graph -> duplicates merged -> a first cut says what is saved -> the graph is changed -> torch's own cut

Importing it imports Inductor's settings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition as cut
from torch._inductor import config, custom_graph_pass
from torch.fx import Graph, GraphModule

Change: TypeAlias = Callable[[Graph, frozenset[str]], None]
_OPTION = "custom_partitioner_fn"
_Base: Any = getattr(custom_graph_pass, "CustomPartitionerFn", object)  # not in every torch


@dataclass(frozen=True)
class Partitioner(_Base):  # type: ignore[misc]
    """Changes a joint graph in place before it is cut; the change is told the names of what a first cut saves."""

    change: Change  # prints as what it does, and is pickled
    code: str  # a hash of what computes it

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        """Return the graphs of forward and backward."""
        gm.graph.eliminate_dead_code()
        gm.graph = fx_graph_cse(gm.graph)  # or backward's copy of a value of forward would be saved in its place
        forward, _ = cut(GraphModule(gm, fx_graph_cse(gm.graph)), joint_inputs, **kwargs)
        (output,) = forward.graph.find_nodes(op="output")
        self.change(gm.graph, frozenset(node.name for node in output.all_input_nodes))
        gm.recompile()
        return cut(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        """Return what tells it from any other in Inductor's caches."""
        return f"{self.code} {self.change}"


def options_with(change: Change, *files: str) -> dict[str, Any]:
    """Return options of Inductor under which joint graphs are changed, by code that lies in some files."""
    digest = hashlib.sha256(b"".join(Path(file).read_bytes() for file in (__file__, *files)))
    return {_OPTION: Partitioner(change, digest.hexdigest())}


def why_not(options: dict[str, Any]) -> str:
    """Return why graphs cannot be changed under some options: torch's own cut is not the one that is asked for."""
    if not hasattr(config, _OPTION):
        return "this torch takes no partitioner"
    theirs = options.get(_OPTION) or getattr(config, _OPTION)
    return "" if theirs is None else f"the partitioner is {type(theirs).__name__}"
