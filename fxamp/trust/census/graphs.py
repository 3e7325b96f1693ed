"""Let a watch see converted graphs that are modules: each runs node by node while a census runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import GraphModule

from passes.contract.plan import Plan

from ...capture.emitted import record_on
from ...capture.given import flat_inputs
from ..watch import node_by_node


@dataclass(frozen=True)
class Given:
    """A converted graph, as the watch knows it.

    Attributes:
        graph: the graph.
        plan: what was decided on it.
        broke: no graph that a user gives was broken.
    """

    graph: GraphModule
    plan: Plan
    broke: str = ""


@contextlib.contextmanager
def watched_graphs(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Put what a watch can see in the place of the `forward` of converted graphs."""
    changed = [part for part in parts if isinstance(part, GraphModule) and record_on(part) is not None]
    for part in changed:
        part.__dict__["forward"] = _by_node(part, Given(part, (record_on(part) or {})["plan"]))
    try:
        yield
    finally:
        for part in changed:
            del part.__dict__["forward"]


def _by_node(part: GraphModule, given: Given) -> Callable[..., Any]:
    run = node_by_node(part.forward, part, given, "eager")

    def forward(*args: Any, **kwargs: Any) -> Any:
        return part.graph.process_outputs(run(*flat_inputs(part, args, kwargs)))

    return forward
