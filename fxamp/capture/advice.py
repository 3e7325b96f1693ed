"""What is added to the error of an op that refuses the 16 bits it is given: its name, its place, and the way out."""

from __future__ import annotations

import linecache
import logging
import re
from types import TracebackType

from torch.fx import GraphModule, Node

from passes.graph.values import LOW_DTYPES, dtypes_of, module_path, source
from passes.ops import ops
from passes.ops.rules import row_of
from passes.runtime.regions import under_autocast

logger = logging.getLogger(__name__)

_NO_KERNEL = re.compile(r"not implemented for '(Half|BFloat16|c10::Half|c10::BFloat16)'")


def name_the_op(error: Exception) -> None:
    """Give the error of a graph a note, if an op that is given 16 bits, and may have no kernel for them, has raised it.

    The error stays the user's: its type and its words. Python 3.10 has no notes; there it is a line in the log.
    """
    node = _raised_by(error.__traceback__)
    if node is None or (row_of(node).known and _NO_KERNEL.search(str(error)) is None):
        return
    given = [dtypes_of(n.meta.get("val", n.meta.get("example_value"))) for n in node.all_input_nodes]
    if node.target is not under_autocast and not any(dtype in LOW_DTYPES for dtype in given):
        return
    name, path, line = ops.name(node), module_path(node), source(node)
    where = f"the op {name}{f' of {path!r}' if path else ''}{f' ({line})' if line else ''}"
    text = f"fxamp: {where} is given 16 bits. If it has no kernel for them, set ops.{name}=fp32 in the policy."
    if text in getattr(error, "__notes__", ()):
        return
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        logger.warning(text)


def _raised_by(trace: TracebackType | None) -> Node | None:
    """Return the node of the innermost graph in a traceback that was running, as the line of its code says."""
    found = None
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if trace.tb_frame.f_code.co_name == "forward" and isinstance(module, GraphModule):
            line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
            name = re.split(r"[ :]", line.strip())[0]
            found = next((node for node in module.graph.nodes if node.name == name), found)
        trace = trace.tb_next
    return found
