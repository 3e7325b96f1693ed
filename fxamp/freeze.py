"""`frozen`: weights cast once, for inference. Nothing else in fxamp ever keeps a cast weight.

An edit of a weight leaves no trace that could be checked (`weight.data.copy_(new)` does not), so the region is the
user's promise that there is none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from passes.errors import CaptureError, NotAModuleError
from passes.insert_casts import is_inserted

from .module import Containers, ConvertedModule
from .serialize import graph_from_data, graph_to_data

_HOME = "_fxamp_frozen"


@contextlib.contextmanager
def frozen(converted: ConvertedModule) -> Iterator[ConvertedModule]:
    """Cast every weight once, on entry; inside, calls use those copies.

    Edits of weights inside the region are not seen, and no gradient reaches them: it is for inference. On leaving, the
    module is as it was.

    Args:
        converted: what `fxamp.convert` returned.

    Raises:
        NotAModuleError: not a converted module.
        CaptureError: the module is frozen already.
    """
    if not isinstance(converted, ConvertedModule):
        raise NotAModuleError(f"fxamp.frozen takes what fxamp.convert returned, not {type(converted).__name__}.")
    if _HOME in converted._modules:
        raise CaptureError("this module is frozen already: leave the outer fxamp.frozen region first.")
    live = converted.graph
    graph, held = graph_from_data(graph_to_data(live)), nn.Module()
    for cast in [n for n in graph.nodes if is_inserted(n) and n.args[0].op == "get_attr"]:
        weight: Any = functools.reduce(getattr, cast.args[0].target.split("."), converted)
        held.register_buffer(cast.name, weight.detach().to(cast.args[1]), persistent=False)
        cast.op, cast.target, cast.args = "get_attr", f"{_HOME}.{cast.name}", ()
    graph.set_codegen(Containers(converted.call_spec))
    converted._modules[_HOME] = held
    converted.uncopied = "its weights are frozen: copy or save it outside the fxamp.frozen region"
    try:
        with torch.no_grad():
            converted.graph = graph
        yield converted
    finally:
        converted.graph, converted.uncopied = live, ""
        del converted._modules[_HOME]
