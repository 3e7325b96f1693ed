"""`frozen`: weights cast once, for inference. Outside of it and of a TrainStep's windows no cast weight is kept.

fxamp cannot detect every edit of a weight (`weight.data.copy_(new)` leaves no trace), so by entering the region the
user promises that there is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from passes.contract.errors import CaptureError

from ..capture.graph import Graph
from ..errors import NotAModuleError
from .copies import Copies, Lifted, is_plain, weight_casts
from .view import is_view, runner_of


@contextlib.contextmanager
def frozen(converted: Any) -> Iterator[Any]:
    """Cast every weight once, on entry; inside, calls use those copies.

    It is for inference: inside the region edits of the weights that are cast have no effect, and no gradient reaches
    them. After the region the module casts weights at every call, as before.

    Args:
        converted: A module that `fxamp.convert` or `fxamp.compile` returned. For every weight that a graph reads in 16
            bits, whatever its shape, a 16-bit copy is kept until the region ends. A weight that no graph captured so
            far reads is cast when one first does.

    Raises:
        NotAModuleError: `converted` is not a converted module.
        CaptureError: The module is frozen already, or within a window of a TrainStep.

    Example:
        >>> with torch.no_grad():
        ...     expected = converted(x)
        ...     with fxamp.frozen(converted):
        ...         bool((converted(x) == expected).all())
        True
    """
    if not is_view(converted):
        raise NotAModuleError(
            f"fxamp.frozen takes the view of a module that fxamp.convert returned, not {type(converted).__name__}; "
            "weights='low' casts those of a graph for good."
        )
    runner = runner_of(converted)
    copies = Copies("fxamp.frozen", keeps_edits_out=True)
    other = runner.opened()
    if other is not None and other.owner == copies.owner:
        raise CaptureError(
            "this module is frozen already, here or by another thread: open one fxamp.frozen region round all calls."
        )
    runner.opened.open(copies, type(runner.model).__name__)
    try:
        parameters = runner.model.named_parameters(remove_duplicate=False)
        named = {path: p for path, p in parameters if is_plain(p)}
        with torch.no_grad():
            for graph in runner.graphs:
                for path, what in weights_of(graph):
                    if path in named:
                        copies.of(named[path], what.dtype)
        yield converted
    finally:
        runner.opened.close(copies)


def weights_of(graph: Graph) -> Iterator[tuple[str, Lifted]]:
    """Yield the weights whose casts can be lifted out of a graph: the name of each in the model, and its cast."""
    for _, what in weight_casts(graph.emitted.graph, graph.names):
        yield graph.names[what.place], what
