"""The checks before the first pass and after every pass. A graph that fails a check is not returned."""

from __future__ import annotations

import warnings

from torch.fx import Graph, Node

from ..colouring import AS_AUTOCAST, Assignment
from ..contract.errors import VerificationError
from ..graph.notes import is_inserted, note_of
from ..graph.values import Dtypes, ValueDtype, dtype_owner, module_path, refuse_mixed, source
from ..ops import ops
from ..ops.rules import KEEP, row_of
from ..runtime.casts import cast_floating
from .insert_casts import recast
from .spec import broken

_REPORT = "This is a bug in fxamp; please report it."


def verify(graph: Graph, assignment: Assignment | None = None) -> None:
    """Check the graph's structure and, once casts are in, that every value really has the dtype it was assigned.

    And that no law of `spec.py` is broken. Dtypes are recomputed only where that of an operand has changed, or the node
    itself was touched.

    Raises:
        VerificationError: names the node, its module and source line, and what was expected.
    """
    _verify_structure(graph)
    if assignment is None:
        return
    dtypes: Dtypes = {}
    for node in graph.nodes:
        dtypes[node] = _dtypes(node, dtypes, assignment)
        expected = assignment.dtypes.get(node)
        if node.op.startswith("call") and dtypes[node] != expected:
            raise VerificationError(f"{_name(node)} gives {dtypes[node]}, its plan says {expected}. {_REPORT}")
    breach = broken(graph, assignment)
    if breach is not None:
        node, operand, law = breach
        raise VerificationError(f"{_name(node)}, operand {operand.name}: {law.says} (law: {law.name}). {_REPORT}")


def _verify_structure(graph: Graph) -> None:
    seen: set[Node] = set()
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            if operand not in seen:
                raise VerificationError(
                    f"{_name(node)} reads {operand.name} before it is made, or after it was erased. {_REPORT}"
                )
        seen.add(node)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a get_attr of a training flag is no parameter; fx warns
        try:
            graph.lint()
        except Exception as e:
            raise VerificationError(f"the graph is malformed: {e}. {_REPORT}") from e


def _dtypes(node: Node, operands: Dtypes, assignment: Assignment) -> ValueDtype:
    """Return the dtypes that a node gives, from those that its operands have."""
    if node.op == "placeholder":
        return assignment.dtypes.get(node)  # an input of a body has the dtype that its caller passes
    if not node.op.startswith("call"):
        return assignment.original.get(node)
    colouring = assignment.colours.get(node)
    region = colouring is not None and colouring.kind == AS_AUTOCAST
    if node.op == "call_module" or region or ops.name(node).startswith("higher_order::"):
        return assignment.dtypes.get(node)  # opaque: the operands are checked where they are cast
    if node.target is cast_floating:
        value, dtype = node.args
        return recast(operands[value], dtype)  # type: ignore[index, arg-type]
    sources = [dtype_owner(n) or n for n in node.all_input_nodes]
    # During capture an autocast region cast operands; a node in it that has a colour is cast by fxamp instead.
    region = colouring is not None and colouring.kind != KEEP and note_of(node).region is not None
    as_captured = not region and all(operands[n] == assignment.original.get(n) for n in sources)
    if as_captured and not _is_touched(node, assignment):
        return assignment.original.get(node)
    try:
        refuse_mixed(node, operands.__getitem__)
        return assignment.infer(node, operands.__getitem__)
    except Exception as e:
        if as_captured or not _runs_as_captured(node, assignment):
            return assignment.dtypes.get(node)  # fake tensors cannot run it, whatever was changed
        read = [str(operands[n]) for n in node.all_input_nodes]
        raise VerificationError(f"{_name(node)} rejects its operands {read}: {type(e).__name__}: {e}. {_REPORT}") from e


def _runs_as_captured(node: Node, assignment: Assignment) -> bool:
    """Say whether a fake kernel accepts the original dtypes; some accept none, for example with an empty batch."""
    try:
        assignment.infer(node, lambda n: assignment.original.get(n, assignment.dtypes.get(n)))
    except Exception:  # whatever a fake kernel raises
        return False
    return True


def _is_touched(node: Node, assignment: Assignment) -> bool:
    colouring, note = assignment.colours.get(node), note_of(node)
    reads = note.read is not None and not row_of(node).is_cast
    # Casts of operands may have become the user's own cast, so that operands have their captured dtypes again.
    changed = colouring is not None and (colouring.set_dtype is not None or bool(colouring.operand_dtypes))
    return reads or is_inserted(node) or note.absorbed_cast or changed


def _name(node: Node) -> str:
    return f"{ops.name(node) or node.op} (node {node.name}, module '{module_path(node)}', {source(node)})"
