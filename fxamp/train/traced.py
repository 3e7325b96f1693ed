"""Functions that write tensors, such as the step of an optimizer, traced to one graph by `make_fx` and compiled.

`torch.compile` would look at every object that a step touches, and check it at each call. Here whoever calls says by a
key when a graph can be used again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from passes.graph.values import no_autocast

from .._torch import as_if_compiling, traced_by
from .compiler import CompileSettings, Counted, way_out

MOST_FORMS = 8  # graphs of one function


class NotTraced(Exception):  # noqa: N818 - no error: who calls runs the function as it is
    """Raised with the reason where there is no graph of a function; nothing of it has run."""


class Traced(Counted):
    """Compiled functions of lists of tensors, which write some of these; `kernels` are of those that ran last."""

    def __init__(self, name: str, settings: CompileSettings) -> None:
        super().__init__(name, settings)
        self._graphs: dict[Hashable, Callable[..., Any]] = {}

    def graph_of(
        self, form: Hashable, ways: Sequence[Callable[..., Any]], inputs: Sequence[Tensor]
    ) -> Callable[[], object]:
        """Return what calls the graph of this form, of the first of `ways` that can be traced; NotTraced if none."""
        plain = [tensor.detach() for tensor in inputs]
        run = self._graphs.get(form)
        if run is None:
            run = self._graphs[form] = self._compile(ways, plain)
        return functools.partial(torch.no_grad()(run), *plain)

    def _compile(self, ways: Sequence[Callable[..., Any]], inputs: list[Tensor]) -> Callable[..., Any]:
        if len(self._graphs) >= MOST_FORMS:
            raise NotTraced(self._give_up(f"it had {MOST_FORMS} forms: gradients of other weights, dtypes or numbers"))
        if self._graphs:
            self.recompiles.append("gradients of other weights, dtypes or numbers")
        for function in ways:
            with torch.no_grad(), no_autocast(), traced_by(inputs) as fakes:
                try:
                    with as_if_compiling():
                        graph = make_fx(function)(*fakes)
                except Exception as error:
                    raise NotTraced(self._give_up(f"{type(error).__name__}: {error}".splitlines()[0])) from error
                if graph.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default):
                    continue
                try:
                    run = self.kernels.compile(functools.partial(self.settings.run(), graph, fakes))
                except Exception as error:
                    if hasattr(error, "add_note"):  # from Python 3.11 on
                        error.add_note(way_out(self.settings.name, self.name, str(error)))
                    raise
            break
        else:
            raise NotTraced(self._give_up("a tensor is read as a number, which a graph would keep as it is"))
        self.frames += 1
        return run

    def _give_up(self, reason: str) -> str:
        self.fallbacks.append(reason)
        return reason
