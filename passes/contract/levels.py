"""The levels of a policy, and what each of them does; nothing else compares levels with text."""

from __future__ import annotations

import enum


class Level(str, enum.Enum):
    """How far a conversion goes; a level is equal to its name, and prints as it."""

    O0 = "O0"
    O1 = "O1"
    O2 = "O2"
    O3 = "O3"

    __str__ = str.__str__
    __repr__ = str.__repr__

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    @property
    def rounds(self) -> bool:
        """Whether anything runs in the low dtype; else the graph is the author's, bit for bit."""
        return self is not Level.O0

    @property
    def is_autocasts(self) -> bool:
        """Whether values are those of `torch.autocast`, bit for bit where the plan names no deviation."""
        return self is Level.O1

    @property
    def stores_low(self) -> bool:
        """Whether values that autocast would keep in FP32 may be stored low."""
        return self in (Level.O2, Level.O3)

    @property
    def rounds_sensitive(self) -> bool:
        """Whether sensitive ops run low too, wherever they have a kernel."""
        return self is Level.O3

    @property
    def weighs(self) -> bool:
        """Whether an op that could run low stays FP32 where that serves: sums of losses, what does not pay."""
        return self is Level.O2


LEVELS = tuple(level.value for level in Level)
