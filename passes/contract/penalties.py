"""What errors cost, for a cut that weighs them against bytes: given by whoever has estimated them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Penalties:
    """What each rounding costs, in the unit of the costs of the cut: bytes.

    Attributes:
        values: by key of a node: rounding its result.
        casts: by key of a reader and of what it reads: the cast down of an FP32 value, for this reader alone. An input
            of a graph has its name for a key.
    """

    values: Mapping[str, float]
    casts: Mapping[tuple[str, str], float]
