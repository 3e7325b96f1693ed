"""The graph of an ExportedProgram under `torch.autocast`: the same graph, run once more on fake tensors.

An ExportedProgram has no Python code that could read a dtype. So a second export, under autocast, would only give the
same ops with other dtypes, and running the graph gives these too.

Before: linear: f32[4, 6] = linear(x, w)        After: linear: bf16[4, 6] = linear(x, w)
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes._torch import FakeTensor, enter_autocast, quiet_fakes

from .model.captured import Autocast, Captured


def rerun(plain: Captured, autocast: Autocast) -> Captured | str | None:
    """Return the capture of a graph that runs under autocast, or why it fails there; None if it has graphs inside.

    Args:
        plain: the capture of an ExportedProgram, which is not changed.
        autocast: what to run it under.
    """
    graph = copy.deepcopy(plain.graph)
    modes = [v.fake_mode for n in graph.nodes if isinstance(v := n.meta.get("val"), FakeTensor)]
    inside = any(isinstance(held, GraphModule) for held in plain.constants.values())
    if inside or not modes or any(n.target is enter_autocast for n in graph.nodes):
        return None

    def value(node: Node) -> Any:
        return node.meta["val"]

    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()), quiet_fakes(), modes[0], autocast.context():
            for node in graph.nodes:
                if node.op == "call_function":
                    target: Any = node.target
                    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), value)
                    node.meta["val"] = target(*args, **kwargs)
    except Exception as e:  # any error of a fake kernel, or a failed assertion on dtypes
        return f"{type(e).__name__}: {e}".split("\n")[0]
    return replace(plain, graph=graph)
