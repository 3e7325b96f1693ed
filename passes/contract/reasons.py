"""Why a node runs in the dtype that it has: a code out of a closed list, and a sentence about this node."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any


class Code(str, enum.Enum):
    """The kinds of reasons, each with what it means."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Code:
        """Make a member that is equal to its text."""
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member

    __str__ = str.__str__

    def __call__(self, detail: str) -> Reason:
        """Return a reason of this kind, with a sentence about one node."""
        return Reason(self, detail)

    LOW = "low", "the rule of the op runs it in the low dtype"
    FP32 = "fp32", "the rule of the op runs it in FP32"
    PROMOTE = "promote", "the op runs in the widest dtype of its operands"
    FOLLOW = "follow", "the op has the dtype of its operand"
    WIDEST = "widest", "the kernel rejects mixed operands, so all are cast to the widest"
    NO_OPERAND = "no_operand", "the op has no operand that is cast"
    CAST = "cast", "your code has this cast"
    USER_CAST = "user_cast", "a cast in your code decides, where torch.autocast would override it"
    LITERAL = "literal", "a number does not fit the low dtype"
    COMPOSITE = "composite", "a composite op is kept whole"
    KEEP = "keep", "the op is left as it is: it has no kernel in the low dtype, or no rule"
    AS_WRITTEN = "as_written", "nothing about the op changes"
    UNKNOWN_OP = "unknown_op", "the op has no rule, and the policy runs such ops in FP32"
    OVERRIDE = "override", "the policy overrides the rule"
    AUTOCAST_REGION = "autocast_region", "the model disables autocast here"
    AS_AUTOCAST = "as_autocast", "the op runs under torch.autocast as it is"
    DTYPE_ARGUMENT = "dtype_argument", "your code gives the op its dtype"
    MUTATED = "mutated", "its storage is written in place, and FP32 values share it"
    IN_PLACE = "in_place", "an in-place op has the dtype of the tensor that it writes to"
    FLOAT64 = "float64", "float64 is left as it is"
    ISLAND = "island", "a normalisation written by hand is FP32 throughout"
    CHOICE = "choice", "a choice is made by the value, which is FP32 under torch.autocast"
    SMALL = "small", "the value has few elements, and is FP32 under torch.autocast"
    ACCUMULATOR = "accumulator", "a loop adds to the value, which is FP32 under torch.autocast"
    POSITION = "position", "the op computes positions from nothing but integers and buffers"
    O2_LOW = "O2_low", "level O2 runs an op in the low dtype if it is not sensitive and has a low operand"
    O3_LOW = "O3_low", "level O3 runs an op in the low dtype if it has a low operand and a low kernel"
    CUT = "cut", "the minimum cut stores the value in this dtype"
    NOT_WORTH_CASTS = "not_worth_casts", "measurements say that the casts cost more time than the low dtype saves"
    FASTPATH = "fastpath", "eager evaluation runs the op inside a fused kernel, which rounds in other places"
    SUM_ORDER = "sum_order", "gradients of one value are summed in another dtype here than under torch.autocast"
    OUTPUT = "output", "a caller's gradient by this output is added in FP32, where torch.autocast rounds it first"
    BODY = "body", "the op has graphs inside, which are rewritten"


# Reasons for which a node may differ from what torch.autocast does, at O1. The list is complete.
DEVIATIONS = (
    Code.USER_CAST, Code.LITERAL, Code.COMPOSITE, Code.KEEP, Code.MUTATED, Code.FASTPATH, Code.SUM_ORDER, Code.OUTPUT,
)  # fmt: skip


# What has decided where no rule has: the policy, a region in the model's code or another device, a cast of the user's,
# the graphs inside a call, or `torch.autocast`, under which it runs.
OVERRIDE, REGION, CAST, BODY, AS_AUTOCAST = "override", "region", "cast", "body", "as_autocast"


@dataclass(frozen=True)
class Reason:
    """A code, and a sentence about one node."""

    code: Code
    detail: str
    kind: str = ""  # what has decided: the kind of the rule that was applied, or one of the five above
    causes: tuple[Any, ...] = ()  # the nodes whose decisions this one follows from
    ranges: tuple[str, ...] = ()  # what buffers hold that the low dtype cannot, where that decided
    final: bool = False  # no placement of values may change the dtype that the node runs in

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"

    def because(self, other: Reason) -> Reason:
        """Return the reason of the same decider with the code and the sentence of another."""
        return replace(self, code=other.code, detail=other.detail)
