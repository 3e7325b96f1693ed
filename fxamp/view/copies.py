"""Low copies of parameters that are made once and read by many calls: in a window of TrainStep, and in `frozen`.

In a function that is compiled for a window, the casts of parameters are lifted out of the graph and become its inputs.
A call fetches them from the copies that are open on its view, and casts where none are.

Before: graph(w): to = w.to(bfloat16); linear(x, to)
After:  graph(w, low): linear(x, low)        low = copies.of(w, bfloat16)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from passes._torch import copy_together, mark_static_address
from passes.graph.notes import is_inserted

Key = tuple[int, torch.dtype]


class _Kept(torch.autograd.Function):
    """A low copy as a function of its FP32 master: its gradient arrives at the master, in the master's dtype."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, low: Tensor) -> Tensor:
        ctx.dtype = master.dtype
        return low.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class Copies:
    """Low copies of parameters: one buffer for a parameter and dtype, at one address as long as this object lives.

    Attributes:
        casts: how many casts were made.
    """

    def __init__(self) -> None:
        self.casts = 0
        self._buffers: dict[Key, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._valid: dict[tuple[int, torch.dtype, bool], Tensor] = {}

    def of(self, master: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the copy of a parameter, which is made if there is none that is valid."""
        graded = master.requires_grad and torch.is_grad_enabled()
        kept = self._valid.get((id(master), dtype, graded))
        if kept is None:
            low = self._buffer(master, dtype)
            kept = _Kept.apply(master, low) if graded else low  # type: ignore[no-untyped-call]
            self._valid[id(master), dtype, graded] = kept
        return kept

    def _buffer(self, master: Tensor, dtype: torch.dtype) -> Tensor:
        held, low = self._buffers.get((id(master), dtype), (None, None))
        same = held is not None and held() is master
        if low is None or not same or (low.shape, low.device) != (master.shape, master.device):
            with torch.inference_mode(False), torch.no_grad():  # a window may be opened inside inference mode
                low = torch.empty_like(master, dtype=dtype, requires_grad=False).copy_(master)
            mark_static_address(low)
            self._buffers[id(master), dtype] = weakref.ref(master), low
            self.casts += 1
        return low

    def refresh(self) -> None:
        """Cast all parameters again, in place, as the start of a new autograd history."""
        self._valid.clear()
        found = [(low, master) for held, low in self._buffers.values() if (master := held()) is not None]
        if found:
            with torch.no_grad():
                copy_together([low for low, _ in found], [master for _, master in found])
        self.casts += len(found)

    def end(self) -> None:
        """Say that no copy is valid any more; the buffers stay."""
        self._valid.clear()


def lift(gm: GraphModule, inputs: Sequence[Any]) -> tuple[GraphModule, list[Any], list[tuple[int, torch.dtype]]]:
    """Return a graph in which casts of parameters are further inputs, example inputs, and what each is a cast of.

    The graph is a copy without Dynamo's notes on its placeholders.
    """
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    examples, lifted = list(inputs), list[tuple[int, torch.dtype]]()
    places = [n for n in graph.nodes if n.op == "placeholder"]
    at = {n: i for i, n in enumerate(places) if isinstance(inputs[i], nn.Parameter)}
    for node in [n for n in graph.nodes if is_inserted(n) and n.args and n.args[0] in at]:
        place, dtype = at[node.args[0]], node.args[1]
        with graph.inserting_after(places[-1]):
            new = graph.placeholder(f"low_{place}_{len(lifted)}")
        new.meta = {k: v for k, v in node.meta.items() if k in ("val", "example_value")}
        places.append(new)
        lifted.append((place, dtype))
        master = inputs[place]
        examples.append(master.detach().to(dtype).requires_grad_(master.requires_grad))
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return GraphModule(gm, graph), examples, lifted


def with_copies(
    run: Callable[..., Any], lifted: Sequence[tuple[int, torch.dtype]], opened: Callable[[], Copies | None]
) -> Callable[..., Any]:
    """Return a function that calls a graph with the casts that were lifted out of it."""

    def call(*args: Any) -> Any:
        copies = opened()
        of: Callable[[Tensor, torch.dtype], Tensor] = torch.Tensor.to if copies is None else copies.of
        return run(*args, *(of(args[place], dtype) for place, dtype in lifted))

    return call
