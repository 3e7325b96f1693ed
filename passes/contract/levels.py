"""The levels of a policy, and what each of them does; nothing else compares levels with text."""

from __future__ import annotations

import enum


class Level(str, enum.Enum):
    """A level of conversion; it compares equal to its name, and prints as its name.

    Attributes:
        rounds: some ops may run in the low dtype; otherwise results are the model's own, bit for bit.
        is_autocasts: values are those of `torch.autocast`, bit for bit where the plan names no deviation.
        stores_low: values that autocast would keep in FP32 may be stored low.
        rounds_sensitive: sensitive ops run low too, wherever they have a kernel.
        weighs: an op that could run low stays FP32 where that is better: sums of losses, casts that do not pay.
    """

    rounds: bool
    is_autocasts: bool
    stores_low: bool
    rounds_sensitive: bool
    weighs: bool

    def __new__(cls, name: str, facts: str = "") -> Level:
        """Make a level from its name and the names of the attributes that are True."""
        made = str.__new__(cls, name)
        made._value_ = name
        for fact in ("rounds", "is_autocasts", "stores_low", "rounds_sensitive", "weighs"):
            setattr(made, fact, fact in facts.split())
        return made

    O0 = "O0"
    O1 = "O1", "rounds is_autocasts"
    O2 = "O2", "rounds stores_low weighs"
    O3 = "O3", "rounds stores_low rounds_sensitive"

    __str__ = str.__str__
    __repr__ = str.__repr__

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


LEVELS = tuple(level.value for level in Level)


def zero_for_o(text: str) -> str:
    """Return an addition to an error message on a level written with a zero ("02"); empty for any other text."""
    meant = f"O{text[1:]}"
    is_meant = text[:1] == "0" and meant in LEVELS
    return f"; {text!r} begins with the digit 0, and a level with the letter O: {meant!r}" if is_meant else ""
