"""Notes of fxamp on a node: one typed record under one key of `node.meta`.

A note is frozen, since a copied node shares the objects in its meta with the original; `note` makes a new one. `val`,
`nn_module_stack` and `stack_trace` beside it are torch's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from ..ops.ops import NOTE
from .origin import Origin, Region

# The rewrites that make nodes, as "pass/rewrite". The first three make casts, which are then not the user's.
CAST_OPERAND, RESTORE_OUTPUT, READ_OUTPUT = "insert-casts/operand", "insert-casts/output", "insert-casts/read"
CLAMP_OPERAND, VIEW_OUTPUT = "insert-casts/clamp", "insert-casts/view"
SPLIT_LOSS, DECOMPOSE, CAST_NORM = "legalize/loss", "legalize/composite", "legalize/norm"
OPEN = "legalize/layer"
_CASTS = (CAST_OPERAND, RESTORE_OUTPUT, READ_OUTPUT)


@dataclass(frozen=True, slots=True)
class Note(Origin):
    """The notes on one node: what its front end says of it, and what passes add.

    Attributes:
        made_by: The rewrite of fxamp that made the node, as "pass/rewrite"; "" for a captured node.
        leaf: For an opaque module: the name of its type, which is part of the op's name.
        pure: For a higher-order op: its body neither writes to its operands nor returns them.
        absorbed_cast: The node was given a dtype argument that replaces a cast.
    """

    made_by: str = ""
    leaf: str = ""
    pure: bool = False
    absorbed_cast: bool = False


_NOTHING = Note()


def note_of(node: Node) -> Note:
    """Return the notes on a node."""
    return node.meta.get(NOTE, _NOTHING)  # type: ignore[no-any-return]


def note(node: Node, **changes: Any) -> None:
    """Change fields of a node's note."""
    node.meta[NOTE] = replace(note_of(node), **changes)


def is_parameter(value: Node) -> bool:
    """Say whether a value is held by a module, and is no buffer."""
    role = note_of(value).role
    return role != "buffer" and (value.op == "get_attr" or role == "parameter")


def region_on(node: Node, device: str) -> Region | None:
    """Return the autocast region in the model's own code that contains a node, if it is for this device."""
    region = note_of(node).region
    return region if region is not None and region[0] == device else None


def is_inserted(node: Node) -> bool:
    """Say whether fxamp made this cast."""
    return note_of(node).made_by in _CASTS


def is_ours(node: Node) -> bool:
    """Say whether fxamp made a node: a cast, what brings an operand into the range of one, or a view of one."""
    return is_inserted(node) or note_of(node).made_by in (CLAMP_OPERAND, VIEW_OUTPUT)


# How a node that a pass makes inherits notes.


def provenance(node: Node) -> dict[str, Any]:
    """Return the part of a node's meta that says where it comes from."""
    inherited = Note(region=note_of(node).region, fused=note_of(node).fused)
    places = {k: node.meta[k] for k in ("nn_module_stack", "stack_trace") if k in node.meta}
    return places | ({NOTE: inherited} if inherited != _NOTHING else {})


def move_to(node: Node, other: Node) -> None:
    """Copy the provenance of another node to a node; the rest of its meta stays."""
    for key in ("nn_module_stack", "stack_trace", NOTE):
        node.meta.pop(key, None)
    node.meta |= provenance(other)
