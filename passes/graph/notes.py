"""What is noted on a node: what its front end says of it, and what passes add; one typed record a node.

A front end owes an `Origin` for every input and every call of the graph that it captured, and of the graphs inside it,
which `compile_graph` takes and checks; `Origin()` says that nothing more is known of a node. What the compiler can see
for itself no front end has to say: what a get_attr refers to, and the type of a module.

A note is under one key of `node.meta`, and frozen, since a copied node shares the objects in its meta with the
original; `note` makes a new one. `val`, `nn_module_stack` and `stack_trace` beside it are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from .._torch import FakeTensor
from ..contract.errors import CaptureError
from ..ops.ops import NOTE

Region = tuple[str, bool, torch.dtype | None, bool]  # device type, enabled, dtype, whether casts are cached
Role = Literal["", "parameter", "buffer", "leaf", "number"]
CastMeaning = Literal["", "literal", "autocast", "baked"]


@dataclass(frozen=True, slots=True)
class Origin:
    """What a front end knows of one node that the graph itself does not show; what it does not know is empty, or None.

    Raises:
        ValueError: there is no such role, or no such meaning of a cast.
    """

    region: Region | None = None  # the autocast region in the model's own code that contains it
    # Of an input: "parameter" or "buffer" (any other tensor) of the model, "leaf": detached by a reentrant checkpoint,
    # or "number": a number that Dynamo made a tensor of.
    role: Role = ""
    constant: float | None = None  # the number that a buffer of 0 dimensions holds, if that is known
    # For a cast: "literal"; "autocast", if the program has this dtype under autocast; or "baked", if nothing is known
    # but the dtype.
    cast: CastMeaning = ""
    # For a cast, or a factory: the dtype that the program reads at this place under autocast.
    read: torch.dtype | None = None
    # The low dtype that the user's code passed as an argument, for which there is now a cast.
    dtype_argument: torch.dtype | None = None
    autocast: Any = None  # the dtypes of its value under autocast, if they were seen
    # The call runs under autocast, whatever its rule says: its values are jagged, or in a transform.
    under_autocast: bool = False
    # For an output: its low dtype, if the model itself makes it low without autocast.
    low_of_its_own: torch.dtype | None = None
    leaves: bool = False  # an output of the model, and not only of one of its graphs: it leaves in its original dtype
    # For such an output: its dtype in the model itself, if more is known of it than of other values.
    leaves_as: torch.dtype | None = None
    fused: bool = False  # eager evaluation runs the call inside a fused kernel, which rounds in other places

    def __post_init__(self) -> None:
        for field, value, legal in (("role", self.role, Role), ("cast", self.cast, CastMeaning)):
            if value not in get_args(legal):
                raise ValueError(f"the {field} of an Origin is one of {get_args(legal)}, not {value!r}")


class Origins(dict[Node, Origin]):
    """What a front end knows of each node so far; of one that it has not come to, nothing."""

    def __missing__(self, node: Node) -> Origin:
        return Origin()

    def add(self, node: Node, **facts: Any) -> None:
        """Add facts, fields of an Origin, to what is known of a node."""
        self[node] = replace(self[node], **facts)


def buffer_origin(value: Tensor) -> Origin:
    """Return the origin of a buffer or constant, with the number in a 0-dim one: it may be a fill value."""
    known = not isinstance(value, FakeTensor) and not value.is_meta
    number = known and value.dim() == 0 and value.is_floating_point()
    return Origin(role="buffer", constant=float(value) if number else None)


# The rewrites that make nodes, as "pass/rewrite". The first three make casts, which are then not the user's.
CAST_OPERAND, RESTORE_OUTPUT, READ_OUTPUT = "insert-casts/operand", "insert-casts/output", "insert-casts/read"
CLAMP_OPERAND, VIEW_OUTPUT = "insert-casts/clamp", "insert-casts/view"
SPLIT_LOSS, DECOMPOSE, CAST_NORM = "legalize/loss", "legalize/composite", "legalize/norm"
OPEN = "legalize/layer"
_CASTS = (CAST_OPERAND, RESTORE_OUTPUT, READ_OUTPUT)


@dataclass(frozen=True, slots=True)
class Note(Origin):
    """The notes on one node."""

    made_by: str = ""  # the rewrite of fxamp that made the node, as "pass/rewrite"; "" for a captured node
    leaf: str = ""  # for an opaque module: the name of its type, which is part of the op's name
    pure: bool = False  # for a higher-order op: its body neither writes to its operands nor returns them
    absorbed_cast: bool = False  # the node was given a dtype argument that replaces a cast


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


def provenance(node: Node, by: str = "") -> dict[str, Any]:
    """Return the meta of a node that a rewrite, as "pass/rewrite", makes of this one: it says where both come from."""
    inherited = Note(region=note_of(node).region, fused=note_of(node).fused, made_by=by)
    places = {k: node.meta[k] for k in ("nn_module_stack", "stack_trace") if k in node.meta}
    return places | ({NOTE: inherited} if inherited != _NOTHING else {})


def move_to(node: Node, other: Node, by: str) -> None:
    """Say of a node that a rewrite made it of another one; the rest of its meta stays."""
    for key in ("nn_module_stack", "stack_trace", NOTE):
        node.meta.pop(key, None)
    node.meta |= provenance(other, by)


def note_origins(graph: Graph, attribute: Callable[[str], Any], origins: Mapping[Node, Origin]) -> None:
    """Note on every node of a graph where it comes from.

    Raises:
        CaptureError: an input or a call has no origin.
    """
    for node in (n for n in graph.nodes if n.op != "output"):
        origin = origins.get(node)
        if node.op == "get_attr":
            value = attribute(str(node.target))
            buffer = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            origin = buffer_origin(value) if buffer else Origin()
        if not isinstance(origin, Origin):
            raise CaptureError(
                f"node '{node.name}' has no Origin: whoever captured the graph gives compile_graph one for every input "
                "and call, also of the graphs inside it. Origin() says that nothing more is known of a node."
            )
        leaf = type(attribute(str(node.target))).__name__ if node.op == "call_module" else ""
        note(node, **{field.name: getattr(origin, field.name) for field in fields(Origin)}, leaf=leaf)
