"""The first node of a graph whose output is not finite, found by one run of the last batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node

from passes._torch import pytree

from ..trust.preserved import preserved
from ..view.graphs import bound, entries_of
from ..view.state import State
from ..view.view import is_view, runner_of
from .window.loss import LossFunction

logger = logging.getLogger("fxamp")


class _FirstBad(Interpreter):
    """Runs a graph, and notes the first node that makes inf or NaN of finite operands."""

    found = ""

    def run_node(self, n: Node) -> Any:
        """Run one node."""
        out = super().run_node(n)
        if not self.found and n.op.startswith("call") and not all(map(_is_finite, pytree.tree_leaves(out))):
            path = next((str(p) for p, _ in reversed([*n.meta.get("nn_module_stack", {}).values()])), "")
            self.found = f"'{path}' ({n.name})" if path else f"'{n.name}'"
        return out


def _is_finite(value: Any) -> bool:
    return not isinstance(value, Tensor) or not value.is_floating_point() or bool(value.isfinite().all())


def first_bad_node(model: nn.Module, loss_fn: LossFunction | None, batch: tuple[Any, Any] | None) -> str:
    """Return a sentence that names the first node with a value that is not finite; "" if that cannot be told.

    Args:
        model: The model of a step; one graph of a view is run, without gradients.
        loss_fn: Its loss, which is named where all values of the model are finite.
        batch: Inputs and target of a micro-batch; None if they are gone.
    """
    if batch is None or not is_view(model):
        return ""
    runner = runner_of(model)
    entries = [e for e in entries_of(runner) if e.state == State("", model.training, "grad")]
    if len(entries) != 1:
        return ""
    inputs, _ = batch
    try:
        with torch.no_grad(), preserved(model):
            graph = bound(runner, entries[0])
            given = inputs if isinstance(inputs, Mapping) else {}
            args = () if given else inputs if isinstance(inputs, tuple) else (inputs,)
            names = [n.target for n in graph.graph.nodes if n.op == "placeholder"]
            run = _FirstBad(graph)
            run.run(*(given[name] for name in names) if given else args)
    except Exception as e:  # the graph may take other inputs: this only makes an error message better
        logger.debug("fxamp: the batch was not run again: %s", e)
        return ""
    if run.found:
        return f" The first node with a value that is not finite is {run.found}."
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    return f" All values of the model are finite, so look at the loss ({name}) and at backward."
