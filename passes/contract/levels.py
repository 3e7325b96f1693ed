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
        keeps_sums_fp32: a loss is split from the sum of its terms, which is FP32, and so are sums into a written value.
        may_keep_products_fp32: with measured costs, a product whose casts do not pay is FP32.
    """

    rounds: bool
    is_autocasts: bool
    stores_low: bool
    rounds_sensitive: bool
    keeps_sums_fp32: bool
    may_keep_products_fp32: bool

    def __new__(cls, name: str, facts: str = "") -> Level:
        """Make a level from its name and the names of the attributes that are True."""
        member = str.__new__(cls, name)
        member._value_ = name
        for fact in cls.__annotations__:
            setattr(member, fact, fact in facts.split())
        return member

    O0 = "O0"
    O1 = "O1", "rounds is_autocasts"
    O2 = "O2", "rounds stores_low keeps_sums_fp32 may_keep_products_fp32"
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
