"""Notes of fxamp on a node: one typed record under one key of `node.meta`.

A note is frozen, since a copied node shares the objects in its meta with the original; `note` makes a new one. `val`,
`nn_module_stack` and `stack_trace` beside it are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from .._torch import FakeTensor
from ..ops.ops import NOTE

Region = tuple[str, bool, torch.dtype | None, bool]  # device type, enabled, dtype, whether casts are cached

# The rewrites that make nodes, as "pass/rewrite". The first three make casts, which are then not the user's.
CAST_OPERAND, RESTORE_OUTPUT, READ_OUTPUT = "insert-casts/operand", "insert-casts/output", "insert-casts/read"
CLAMP_OPERAND, VIEW_OUTPUT = "insert-casts/clamp", "insert-casts/view"
SPLIT_LOSS, DECOMPOSE, CAST_NORM = "legalize/loss", "legalize/composite", "legalize/norm"
_CASTS = (CAST_OPERAND, RESTORE_OUTPUT, READ_OUTPUT)


@dataclass(frozen=True, slots=True)
class Note:
    """The notes on one node; a field without a note is empty, or None.

    Attributes:
        made_by: The rewrite of fxamp that made the node, as "pass/rewrite"; "" for a captured node.
        leaf: For an opaque module: the name of its type, which is part of the op's name.
        region: The autocast region in the model's own code that contains it.
        role: "parameter" or "buffer" (any other tensor) of the model, "leaf": detached by a reentrant checkpoint, or
            "number": a number that Dynamo made a tensor of.
        constant: The number that it holds, if that is known.
        cast: For a cast: "literal"; "autocast", if the program has this dtype under autocast; or "baked", if nothing is
            known but the dtype.
        read: For a cast, or a factory: the dtype that the program reads at this place under autocast.
        autocast: The dtypes of its value under autocast, if they were seen.
        under_autocast: The call runs under autocast, whatever its rule says: its values are jagged, or in a transform.
        low_of_its_own: For an output: its low dtype, if the model itself makes it low without autocast.
        leaves: An output of the model, and not only of one of its graphs: it leaves in its original dtype.
        leaves_as: For such an output: its dtype in the model itself, if more is known of it than of other values.
        writes: For a call without a schema: the arguments that it writes to, counted from the last, which is -1; None
            if that is not known.
        pure: For a higher-order op: its body neither writes to its operands nor returns them.
        fused: Eager evaluation runs the call inside a fused kernel, which rounds in other places.
        absorbed_cast: The node was given a dtype argument that replaces a cast.
        dtype_argument: The low dtype that the user's code passed as an argument, for which there is now a cast.
    """

    made_by: str = ""
    leaf: str = ""
    region: Region | None = None
    role: str = ""
    constant: float | None = None
    cast: str = ""
    read: torch.dtype | None = None
    autocast: Any = None
    under_autocast: bool = False
    low_of_its_own: torch.dtype | None = None
    leaves: bool = False
    leaves_as: torch.dtype | None = None
    writes: frozenset[int] | None = None
    pure: bool = False
    fused: bool = False
    absorbed_cast: bool = False
    dtype_argument: torch.dtype | None = None


_NOTHING = Note()


def note_of(node: Node) -> Note:
    """Return the notes on a node."""
    return node.meta.get(NOTE, _NOTHING)  # type: ignore[no-any-return]


def note(node: Node, **changes: Any) -> None:
    """Change fields of a node's note."""
    node.meta[NOTE] = replace(note_of(node), **changes)


def note_buffers(graph: Graph, attribute: Callable[[str], Any]) -> None:
    """Note which values are buffers or constants, and the number in a 0-dim one.

    A fill value is usually a literal, but it may be such a tensor. `attribute` resolves the target of a get_attr.
    """
    for node in graph.nodes:
        value = attribute(str(node.target)) if node.op == "get_attr" else None
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            note_buffer(node, value)


def note_buffer(node: Node, value: Tensor) -> None:
    """Note that a value is a buffer or constant, and the number in a 0-dim one."""
    known = not isinstance(value, FakeTensor) and not value.is_meta
    number = known and value.dim() == 0 and value.is_floating_point()
    note(node, role="buffer", constant=float(value) if number else None)


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


# Notes from capture, and how a node that a pass makes inherits them.


def origin(node: Node) -> dict[str, Any]:
    """Return the part of a node's meta that says where it comes from."""
    inherited = Note(region=note_of(node).region, fused=note_of(node).fused)
    places = {k: node.meta[k] for k in ("nn_module_stack", "stack_trace") if k in node.meta}
    return places | ({NOTE: inherited} if inherited != _NOTHING else {})


def move_to(node: Node, other: Node) -> None:
    """Copy the origin of another node to a node; the rest of its meta stays."""
    for key in ("nn_module_stack", "stack_trace", NOTE):
        node.meta.pop(key, None)
    node.meta |= origin(other)
