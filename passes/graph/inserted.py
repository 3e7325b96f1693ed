"""Which nodes of a graph fxamp made: a cast that it inserts is signed."""

from __future__ import annotations

from torch.fx import Node


def sign(cast: Node) -> None:
    """Say on a cast that fxamp made it."""
    cast.meta["fxamp"] = "cast"


def is_inserted(node: Node) -> bool:
    """Say whether fxamp made this cast."""
    return node.meta.get("fxamp") == "cast"
