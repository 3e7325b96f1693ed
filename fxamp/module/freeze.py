"""`frozen`: weights cast once, for inference. Nothing else in fxamp ever keeps a cast weight.

fxamp cannot detect every edit of a weight (`weight.data.copy_(new)` leaves no trace), so by entering the region the
user promises that there is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from passes.contract.errors import CaptureError, NotAModuleError
from passes.graph.notes import is_inserted

from .module import ConvertedModule
from .serialize import graph_from_data, graph_to_data

_HOME = "_fxamp_frozen"


@contextlib.contextmanager
def frozen(converted: ConvertedModule) -> Iterator[ConvertedModule]:
    """Cast every weight once, on entry; inside, calls use those copies.

    It is for inference: edits of weights inside the region have no effect, and no gradient reaches the weights. After
    the region the module casts weights at every call, as before.

    Args:
        converted: A module that `fxamp.convert` returned. For every weight that a graph reads in 16 bits, whatever its
            shape, a 16-bit copy is kept until the region ends.

    Raises:
        NotAModuleError: `converted` is not a converted module.
        CaptureError: The module is frozen already.

    Example:
        >>> with torch.no_grad():
        ...     expected = converted(x)
        ...     with fxamp.frozen(converted):
        ...         bool((converted(x) == expected).all())
        True
    """
    if not isinstance(converted, ConvertedModule):
        raise NotAModuleError(f"fxamp.frozen takes what fxamp.convert returned, not {type(converted).__name__}.")
    if _HOME in converted._modules:
        raise CaptureError("this module is frozen already: leave the outer fxamp.frozen region first.")
    live, held = [variant.graph for variant in converted.variants], nn.Module()
    graphs = [_with_cast_weights(converted, graph, held) for graph in live]
    converted._modules[_HOME] = held
    converted.uncopied = "its weights are frozen: copy or save it outside the fxamp.frozen region"
    try:
        with torch.no_grad():
            _put(converted, graphs)
        yield converted
    finally:
        _put(converted, live)
        converted.uncopied = ""
        del converted._modules[_HOME]


def _put(converted: ConvertedModule, graphs: Sequence[Graph]) -> None:
    for at, graph in enumerate(graphs):
        converted.put(at, graph)


def _with_cast_weights(converted: ConvertedModule, live: Graph, held: nn.Module) -> Graph:
    """Return a copy of a graph that reads cast weights from `held`, which gets each cast once."""
    graph = graph_from_data(graph_to_data(live))
    for cast in [n for n in graph.nodes if is_inserted(n) and n.args[0].op == "get_attr"]:
        path, dtype = str(cast.args[0].target), cast.args[1]
        name = f"{path}_{dtype}".replace(".", "_")
        if name not in held._buffers:
            owner, _, leaf = path.rpartition(".")
            weight: Any = getattr(converted.get_submodule(owner), leaf)
            held.register_buffer(name, weight.detach().to(dtype), persistent=False)
        cast.op, cast.target, cast.args = "get_attr", f"{_HOME}.{name}", ()
    return graph
