"""What Inductor calls to cut a joint graph into forward and backward; private names for that are in this file alone.

    joint graph -> duplicates merged -> a first cut says what is saved -> the graph is changed -> torch's own cut

Importing it imports Inductor's settings.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch._functorch import partitioners
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor import config, custom_graph_pass
from torch.fx import Graph, GraphModule

Change: TypeAlias = Callable[[Graph, frozenset[str], int], None]
OPTION = "custom_partitioner_fn"
_cut: Any = partitioners.min_cut_rematerialization_partition
_Base: Any = getattr(custom_graph_pass, "CustomPartitionerFn", object)  # not in every torch


@dataclass(frozen=True)
class Partitioner(_Base):  # type: ignore[misc]
    """Changes a joint graph in place before it is cut.

    The change is told the names of what a first cut saves, and how many outputs are those of forward.
    """

    change: Change  # prints as what it does, and is pickled
    code: str  # a hash of what computes it

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        """Return the graphs of forward and backward."""
        gm.graph.eliminate_dead_code()
        gm.graph = fx_graph_cse(gm.graph)  # or backward's copy of a value of forward would be saved in its place
        partition = functools.partial(_cut, num_fwd_outputs=num_fwd_outputs, **kwargs)
        forward, _ = partition(GraphModule(gm, fx_graph_cse(gm.graph)), joint_inputs)
        (output,) = forward.graph.find_nodes(op="output")
        self.change(gm.graph, frozenset(node.name for node in output.all_input_nodes), num_fwd_outputs)
        gm.recompile()
        return partition(gm, joint_inputs)

    def uuid(self) -> str:
        """Return what tells it from any other in Inductor's caches."""
        return f"{self.code} {self.change}"


def options_with(change: Change, *files: str) -> dict[str, Any]:
    """Return options of Inductor under which joint graphs are changed, by code that lies in some files."""
    digest = hashlib.sha256(b"".join(Path(file).read_bytes() for file in (__file__, *files)))
    return {OPTION: Partitioner(change, digest.hexdigest())}


def emulated(
    graph: GraphModule, inputs: Sequence[Any], change: Change, run: Callable[[GraphModule], Callable[..., Any]]
) -> Callable[..., Any]:
    """Return what runs a graph from Dynamo as Inductor would cut it after a change, forward and backward by `run`."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._inductor.decomposition import select_decomp_table

    def compiler(part: GraphModule, _: Any) -> Any:
        return make_boxed_func(run(part))

    simplified: Any = aot_module_simplified
    made: Callable[..., Any] = simplified(
        graph, list(inputs), fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler,
        partition_fn=Partitioner(change, ""), decompositions=select_decomp_table(),
    )  # fmt: skip
    return made


def theirs(options: Mapping[str, Any]) -> str:
    """Return why graphs are not changed: options or settings ask for somebody else's partitioner; "" if not."""
    if not hasattr(config, OPTION):
        return "this torch takes no partitioner"
    given = options.get(OPTION) or getattr(config, OPTION)
    return "" if given is None else f"{OPTION} is {type(given).__name__}"
