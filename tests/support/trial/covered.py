"""Which parameters does a call read that no graph of a view has?"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import fxamp
from fxamp.observe.interpret import StorageReads
from passes.contract.errors import CaptureError


def read_outside(view: nn.Module, model: nn.Module, args: Any, kwargs: Any) -> list[str]:
    """Return the names of the parameters that a call of a model reads, on a copy, and that no graph of its view has."""
    twin, args, kwargs = copy.deepcopy((model, args, kwargs))
    with torch.autocast("cpu", torch.bfloat16), StorageReads() as reads:
        twin(*args, **kwargs)
    try:
        graphs = fxamp.graphs(view)
    except CaptureError:  # nothing was captured
        graphs = ()
    inside = {str(node.target) for graph in graphs for node in graph.graph.find_nodes(op="get_attr")}
    named = {name: p.untyped_storage()._cdata for name, p in twin.named_parameters(remove_duplicate=False)}
    known = {storage for name, storage in named.items() if name in inside}
    return [name for name, storage in named.items() if storage in reads.storages and storage not in known]
