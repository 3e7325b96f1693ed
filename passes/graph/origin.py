"""What a front end knows of a node that the graph itself does not show: one record a node, which `compile_graph` takes.

A front end owes one for every input and every call of the graph that it captured, and of the graphs inside it;
`Origin()` says that nothing more is known of a node. What a get_attr refers to the compiler looks up by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.fx import Node

from .._torch import FakeTensor

Region = tuple[str, bool, torch.dtype | None, bool]  # device type, enabled, dtype, whether casts are cached
Role = Literal["", "parameter", "buffer", "leaf", "number"]
CastMeaning = Literal["", "literal", "autocast", "baked"]


@dataclass(frozen=True, slots=True)
class Origin:
    """What a front end knows of one node; a field of which nothing is known is empty, or None.

    Attributes:
        region: The autocast region in the model's own code that contains it.
        role: Of an input: "parameter" or "buffer" (any other tensor) of the model, "leaf": detached by a reentrant
            checkpoint, or "number": a number that Dynamo made a tensor of.
        constant: The number that a buffer of 0 dimensions holds, if that is known.
        cast: For a cast: "literal"; "autocast", if the program has this dtype under autocast; or "baked", if nothing is
            known but the dtype.
        read: For a cast, or a factory: the dtype that the program reads at this place under autocast.
        dtype_argument: The low dtype that the user's code passed as an argument, for which there is now a cast.
        autocast: The dtypes of its value under autocast, if they were seen.
        under_autocast: The call runs under autocast, whatever its rule says: its values are jagged, or in a transform.
        low_of_its_own: For an output: its low dtype, if the model itself makes it low without autocast.
        leaves: An output of the model, and not only of one of its graphs: it leaves in its original dtype.
        leaves_as: For such an output: its dtype in the model itself, if more is known of it than of other values.
        fused: Eager evaluation runs the call inside a fused kernel, which rounds in other places.

    Raises:
        ValueError: there is no such role, or no such meaning of a cast.
    """

    region: Region | None = None
    role: Role = ""
    constant: float | None = None
    cast: CastMeaning = ""
    read: torch.dtype | None = None
    dtype_argument: torch.dtype | None = None
    autocast: Any = None
    under_autocast: bool = False
    low_of_its_own: torch.dtype | None = None
    leaves: bool = False
    leaves_as: torch.dtype | None = None
    fused: bool = False

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
