"""What must hold after every pass. A graph that does not verify is not emitted."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.fx import Graph, Node

from . import ops
from .assign_precision import Assignment
from .errors import VerificationError
from .values import ANY, module_path, source


def verify(graph: Graph, assignment: Assignment | None = None) -> None:
    """Check the graph's structure and, once casts are in, that every value really has the dtype it was assigned.

    Raises:
        VerificationError: names the node, its module and source line, and what was expected.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a get_attr of a training flag is no parameter; fx warns
        try:
            graph.lint()
        except RuntimeError as e:
            raise VerificationError(f"the rewritten graph is malformed: {e}") from e
    if assignment is None:
        return
    held: dict[Node, Any] = {}
    for node in graph.nodes:
        held[node] = _dtypes(node, held, assignment)
        expected = assignment.dtypes.get(node)
        if node.op.startswith("call") and expected is not ANY and held[node] is not ANY and held[node] != expected:
            raise VerificationError(
                f"{ops.name(node)} (node {node.name}, module '{module_path(node)}', {source(node)}) gives {held[node]}, "
                f"its plan says {expected}. This is a bug in fxamp; please report it."
            )


def _dtypes(node: Node, held: dict[Node, Any], assignment: Assignment) -> Any:
    if not node.op.startswith("call"):
        return assignment.original.get(node)
    if not any(isinstance(held.get(n), (torch.dtype, tuple)) or held.get(n) is ANY for n in node.all_input_nodes):
        return assignment.dtypes.get(node)
    if node.op == "call_module" or ops.name(node).startswith("higher_order::"):
        return assignment.dtypes.get(node)
    try:
        return assignment.infer(node, held.__getitem__)
    except Exception as e:
        if node not in assignment.colours or all(held[n] == assignment.original.get(n) for n in node.all_input_nodes):
            return assignment.dtypes.get(node)  # fake tensors cannot run it, and nothing about it was changed
        raise VerificationError(
            f"{ops.name(node)} (node {node.name}, module '{module_path(node)}', {source(node)}) rejects its operands "
            f"{[str(held[n]) for n in node.all_input_nodes]}: {type(e).__name__}: {e}"
        ) from e
