"""Converted graphs that are handed out as modules: how one is called, what is kept on one, and how one is pickled."""

from __future__ import annotations

import keyword
import warnings
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.graph_module import reduce_graph_module

from passes.contract.devices import DEVICES
from passes.contract.plan import Plan
from passes.graph.values import module_path, source
from passes.ops import ops

from .modes import Modes
from .run import name_the_op

_RECORD = "fxamp"  # where a graph keeps what was decided on it


class Emitted(GraphModule):
    """A converted graph: ambient autocast changes nothing in it, and an error in it leaves no mode switched.

    A graph keeps the mode, train or eval, that it was captured in. Where an op has it as an argument, its record
    holds it, and names that op; then `train` and `eval` warn about another mode.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph."""
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return self(*args, **kwargs)
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        with Modes():
            try:
                return super().__call__(*args, **kwargs)
            except Exception as e:
                name_the_op(e)
                raise

    def train(self, mode: bool = True) -> Emitted:
        """Set the flag of the module; the graph computes what it did."""
        captured, op = self.meta.get(_RECORD, {}).get("mode", (mode, ""))
        if captured is not mode:
            has, asked = ("train" if m else "eval" for m in (captured, mode))
            warnings.warn(
                f"fxamp: this graph was captured in {has} mode and keeps it, {op} for example. For {asked} mode, "
                "export or trace the model in that mode, and convert what comes out.",
                stacklevel=2 if mode else 3,  # `eval` calls this
            )
        super().train(mode)
        return self

    def __reduce__(self) -> Any:
        _, (fields, imports) = super().__reduce__()
        return _unpickled, (fields, imports)

    def __copy__(self) -> Emitted:
        return _again(super().__copy__(), self.__dict__)


def _unpickled(fields: dict[str, Any], imports: str) -> Emitted:  # whose name pickles have
    return _again(reduce_graph_module(fields, imports), fields)


def _again(made: Any, fields: dict[str, Any]) -> Emitted:
    """Return a graph as one of this class, with what is kept on it."""
    emitted = Emitted(made, made.graph, type(made).__name__)
    for name, value in fields.items():
        if not hasattr(emitted, name):
            setattr(emitted, name, value)
    emitted.meta, emitted.training = dict(fields["meta"]), made.training
    return emitted


def is_writable(name: str) -> bool:
    """Say whether torch.fx writes the name of an attribute into the code of a graph so that Python reads that name."""
    return not keyword.iskeyword(name) and not {*name} & {*'"\\\n\r\0'}


def with_record(gm: GraphModule, plan: Plan, **more: Any) -> GraphModule:
    """Keep on an emitted graph what was decided on it."""
    gm.meta[_RECORD] = {"plan": plan, **more}
    calls = (n for n in gm.graph.nodes if n.op == "call_function")
    modes = ((n, ops.argument(n, "training", ops.argument(n, "train"))) for n in calls)  # True for train
    flagged = [(n, mode) for n, mode in modes if isinstance(mode, bool)]
    if flagged:
        node, mode = next((pair for pair in flagged if pair[1]), flagged[0])
        gm.meta[_RECORD]["mode"] = mode, f"{ops.name(node)} of '{module_path(node)}' ({source(node)})"
    return gm


def record_on(gm: GraphModule) -> dict[str, Any] | None:
    """Return what `with_record` kept; None for any other graph."""
    found: dict[str, Any] | None = gm.meta.get(_RECORD)
    return found
