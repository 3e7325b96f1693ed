"""The columns of the op table, and the way to write the rows of a group."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ...contract.devices import DEVICES

LOW, FP32, PROMOTE, FOLLOW, KEEP = "low", "fp32", "promote", "follow", "keep"
BANNED, COMPOSITE = "banned", "composite"

KIND_NAMES: dict[str, str] = {
    LOW: "runs in the low dtype: its floating operands are cast down",
    FP32: "runs in FP32: its floating operands are cast up",
    PROMOTE: "runs in the widest dtype of its operands, as torch promotes; in place, in that of its target",
    FOLLOW: "runs in the dtype of its operand",
    KEEP: "keeps the dtypes that it had before conversion",
    BANNED: "is unsafe in low, and autocast raises",
    COMPOSITE: "is decomposed first: what autocast does inside it depends on shapes or arguments",
}


class Kinds(dict[str, str]):
    """The kind of an op on every device: that on the devices that are named, and one for all others."""

    def __init__(self, default: str, **devices: str) -> None:
        super().__init__({"": default, **devices})

    def __missing__(self, device: str) -> str:
        return self[""]


@dataclass(frozen=True)
class Kind:
    """In which dtype an op runs on each device, and where that has exceptions."""

    name: str  # canonical op name
    kinds: Kinds = field(hash=False)  # its kind, one of `KIND_NAMES`, by the device whose lists are used
    reason: str = ""  # why the op has this kind, in one line
    known: bool = True  # false for an op that neither the table nor torch nor a user knows
    since: str = ""  # the torch version that brought the op or put it on a list, where versions differ
    until: str = ""  # the torch version that took it away
    fp16_on: tuple[str, ...] = ()  # devices whose autocast runs the op in FP16, whichever low dtype it is asked for
    is_cast: bool = False  # the op is a cast in the user's code
    # The op reads the "shape", the "dtype", an "attribute" or an "item" of a value, "asserts" its metadata, or switches
    # a "mode" of torch, so that only the graph may run it; it does no arithmetic, and has no colour.
    asks: str = ""
    loss: bool = False  # the op is a loss: a sum of small terms
    splits: bool = False  # from O2 on it is split into the terms of the sum, which may be low, and the sum
    no_low: tuple[str, ...] = ()  # devices without a low kernel for the op; devices that share their lists lack it too
    no_low_for: tuple[Any, ...] = ()  # arguments for which it lacks a low kernel on every device
    no_low_backward: bool = False  # its low kernel is for the forward only, as torch's own tests say
    tries_low: bool = False  # whether it has a low kernel depends on the machine or on arguments, so it is tried
    # Devices whose kernel cannot project the hidden state, so that the op is then a composite.
    unprojected: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operands:
    """Which operands are cast, what the kernel takes as it is, and the dtypes of what it gives."""

    uncast: tuple[str, ...] = ()  # arguments that are never cast to low: statistics, affine parameters, tables
    affine: tuple[str, ...] = ()  # arguments that are applied to its result, so that another op may apply them
    same_dtype: bool = False  # the kernel rejects operands of different float dtypes, so all of them are cast to one
    # Devices whose autocast casts the operands to the widest of their dtypes, as the backward then has them.
    widens: tuple[str, ...] = ()
    # The kernel accepts operands of several floating dtypes, and casts the narrower ones up as it reads them.
    promotes_inside: bool = False
    # Devices where `dtype=float32` may replace a cast to FP32: the bits are the same, or autocast's.
    absorbs_cast: tuple[str, ...] = ()
    # The kernel casts its result to the dtype of `out=`; other kernels reject an `out=` of another dtype.
    casts_out: bool = False
    dtype_arg: bool = False  # the op has a `dtype=` argument; if it is given, it wins over the rule
    converts_first: bool = False  # the op converts its first operand to `dtype=`, if given, before it computes
    never_narrows: bool = False  # like `converts_first`, but the op raises an error if `dtype=` is narrower
    # Another `dtype=` changes the numbers by more than rounding, since the op draws, sums or divides in it.
    exact: bool = False
    names_dtype: bool = False  # an argument of the op names the dtype that its result has
    # The dtype of each output for floating operands: "float" (the dtype the op ran in), "first" (that of the first
    # floating operand), "bool", "int" (64 bits), "integer" (a width that arguments decide), "complex". If overloads
    # differ in the number of outputs, the longer tuple; () if no tensor is returned.
    out: tuple[str, ...] = ("float",)
    out_of: str = ""  # the operand that gives an output "first" its dtype, if it is not the first one: a table
    # The op works on a sharded tensor, and fake tensors cannot run it; the result has the operand's dtype.
    shards: bool = False
    # The op runs step by step in time; all its outputs, however nested, have the dtype that it ran in.
    recurrent: bool = False
    casts_again: str = ""  # the argument with which autocast casts the input once more
    folds: bool = False  # its kernel is chosen by whether the weight requires gradients


@dataclass(frozen=True)
class Aliasing:
    """What shares storage, and what is written."""

    # The op may return an operand or a view of it, though no schema says so: "first" for its first argument, "all" for
    # any, "sole" if it has one alone.
    may_alias: str = ""
    view: bool = False  # the op only makes a new view, or most often does; no data moves
    free_backward: bool = False  # the gradient of each operand is the incoming gradient itself, or a view of it
    in_place: bool = False  # the op writes to its first argument, as others do whose name ends in an underscore
    # Arguments that the op writes to though no schema says so, unless another argument has a certain value: (that
    # argument, its default, the value for which nothing is written, names of what is written).
    writes: tuple[Any, ...] = ()
    # The program sees the bits of its operand, or how many there are: "" (no), "always", or "dtype" where an argument
    # is one.
    shows_bits: str = ""
    # Whether the in-place op draws different numbers for another dtype, instead of rounding the same ones: "" (no),
    # "always", or the last torch version that did.
    redraws: str = ""


@dataclass(frozen=True)
class Numerics:
    """What the op does to numbers: why 16 bits may hurt, which values it makes, and what it may be in a norm."""

    sensitive: str = ""  # why a low dtype may hurt, on any device: "" (it does not), "range" or "rounding"
    # Whether rounding before the op and after it give the same bits: "" (no), "forward", or "both" (in backward too).
    # Where facts of a device say it of a low dtype, they decide.
    commutes: str = ""
    accumulates: tuple[Any, ...] = ()  # for some arguments it sums or multiplies many values into one; ("",) for all
    fills: bool = False  # the op makes a tensor filled with one number
    counts: bool = False  # the op makes positions, whatever its operands are
    of_integers: bool = False  # the op makes a float from integers, which may be a position
    bounded: bool = False  # the op brings values of any size back into range
    # The largest absolute value that the op gives, whatever it is given; None where there is no such.
    at_most: float | None = None
    # The argument with the sizes that the op normalises over: numbers below the root of their product.
    normalizes: str = ""
    # The op clamps a value to numbers among its arguments: "" (no), "bounds", or "from_one" if the number is the
    # distance from zero and from one.
    limits: str = ""
    chooses: bool = False  # the result changes by steps: an index, a rounded number, a truth value
    holds_eps: bool = False  # the kernel holds its eps in FP32, whatever the dtypes of its operands
    # What it may be in a norm or a softmax that is written by hand: "arithmetic", "statistic", "quotient", "product"
    # (with a reciprocal) and "difference" (of a logarithm) where it may divide by a statistic, "reciprocal",
    # "logarithm", "exponential", "power" (of which it may be the reciprocal).
    in_norm: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bodies:
    """Graphs among the arguments of a higher-order op, and what is left of an op that autograd has split."""

    higher_order: bool = False  # the op calls graphs that are among its arguments
    # How the graphs in a higher-order op are compiled: "" (as they are), "fixed" (between the dtypes of the original),
    # or "entered" (with the dtypes that its operands have here, if it is called only here).
    bodies: str = ""
    operands_at: int = 0  # where in its arguments the operands of a body that is entered begin
    recomputed: bool = False  # its body runs once more in backward
    switches: str = ""  # the mode that it switches for its body: "grad" or "autocast"
    # The ops that are left of it where autograd has split it into its forward and its backward.
    leaves: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule(Bodies, Numerics, Aliasing, Operands, Kind):
    """One row: in which dtype an op runs on each device, why, and what a pass must know to obey.

    The columns are those of its groups, `Kind` first. A column that says "for some arguments" holds the name of one and
    the values that count: ("reduce", "sum", "mean").
    """

    def kind(self, device: str) -> str:
        """Return the kind on a device: that of the device's own lists, or of those that it shares."""
        row = DEVICES[device]
        return row.kinds.get(self.name) or self.kinds[row.lists]

    @property
    def cpu(self) -> str:
        """The kind on a CPU."""
        return self.kinds["cpu"]

    @property
    def cuda(self) -> str:
        """The kind on CUDA."""
        return self.kinds["cuda"]

    def columns(self) -> dict[str, Any]:
        """Return every column by its name; kinds have one for each device that has lists in the table."""
        values = asdict(self)
        del values["kinds"]
        return {"name": values.pop("name"), "cpu": self.cpu, "cuda": self.cuda, **values}

    @property
    def gives(self) -> str:
        """The kind of its first output; "" if that is no tensor."""
        return self.out[0] if self.out else ""


# What is known of an op that has no row, and of such a higher-order op, whose name shows that it is one.
UNKNOWN = Rule("", Kinds(KEEP), "unknown op", known=False)
UNKNOWN_HIGHER_ORDER = replace(UNKNOWN, higher_order=True)
HIGHER_ORDER = "higher_order::"

Entry = tuple[str, dict[str, Any]]
_SEVERAL = frozenset(f.name for f in fields(Rule) if f.default == () or f.name == "out")


def of(names: str, **columns: Any) -> Entry:
    """Return an entry of a group: names of ops, and columns that they have in addition to those of the group."""
    return names, columns


def group(kind: str | Kinds, reason: str, *entries: str | Entry, **shared: Any) -> tuple[Rule, ...]:
    """Return the rows of ops of one kind: names of ops, or what `of` returns, and the columns that all of them have.

    `Kinds(FP32, cpu=FOLLOW)` is FP32 on every device but a CPU. Words of a column that holds several are separated by
    spaces.
    """
    split = [(e, {}) if isinstance(e, str) else e for e in entries]
    rows = [(name, _values(shared | own)) for names, own in split for name in names.split()]
    kinds = kind if isinstance(kind, Kinds) else Kinds(kind)
    return tuple(Rule(name, kinds, reason, **columns) for name, columns in rows)


def _values(columns: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v.split()) if k in _SEVERAL and isinstance(v, str) else v for k, v in columns.items()}
