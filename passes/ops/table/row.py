"""The columns of the op table, and the way to write the rows of a group."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

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


@dataclass(frozen=True)
class Rule:
    """One row: in which dtype an op runs on each device, why, and what a pass must know to obey.

    A column that says "for some arguments" holds the name of one and the values that count: ("reduce", "sum", "mean").

    Attributes:
        name: Canonical op name.
        cpu: Kind on a CPU, one of `KIND_NAMES`.
        cuda: Kind on CUDA.
        reason: Why this kind, in one line.
        sensitive: Why low may hurt, on any device: "" (it does not), "range" or "rounding".
        loss: It is a loss: a sum of small terms.
        casts: Arguments that are cast; () for every floating one.
        uncast: Arguments that are never cast to low: statistics, affine parameters, tables.
        same_dtype: The kernel rejects operands of different float dtypes, so all of them go to one.
        widest: Devices by whose lists "promote" means the widest dtype of all operands, a 0-dim one among them.
        promotes_inside: The kernel takes operands of several floating dtypes, and casts the narrower ones up as it
            reads them.
        absorbs_cast: With `dtype=float32` it does to a low operand what it does to that operand cast up, in backward
            too.
        casts_out: The kernel casts what it computes to the dtype of an `out=`; others reject one of another dtype.
        dtype_arg: The op has a `dtype=` argument; an explicit one wins over the rule.
        converts_first: It converts its first operand to the `dtype=` that it is given before it computes.
        never_narrows: It converts too, but raises if that `dtype=` is narrower.
        exact: Another `dtype=` gives other numbers, and not the same ones rounded: it draws, sums or divides in it.
        out: What each output is when the operands are floats: "float" (the dtype the op ran in), "first" (that of
            the first floating operand, whatever the others have), "bool", "int" (of 64 bits), "integer" (of a width
            that arguments decide), "complex". An op with overloads of one and of several outputs has the longer
            tuple; () is what returns no tensor.
        out_of: The operand whose dtype an output "first" has, where that is not the first: a table.
        depends: Its outputs depend on flags, or on the number of its operands.
        real: What it makes of complex operands is real.
        asks: It reads the "shape", the "dtype" or an "item" of a value: no arithmetic, and no colour of its own.
        cast: It is the author's own cast.
        shards: It works on a tensor in shards, and fake tensors do not run it: its operand's dtype comes out.
        recurrent: It runs step by step in time; its outputs, however nested, all have the dtype that it ran in.
        commutes: Rounding may move across the op bit for bit: "" (no), "forward", or "both" (in backward too).
        may_alias: It may return an operand or a view of it, though no schema says so: "first" for its first argument,
            "all" for any.
        view: It only makes a new view, or most often does: nothing moves.
        free_backward: The gradient of each operand is the gradient itself, or a view of it.
        writes: Arguments that it writes to though no schema says so, except for one value of another argument:
            (argument, its default, the value for which nothing is written, names of what is written).
        redraws: In place it draws other numbers for another dtype, and not the same ones rounded: "" (no), "always", or
            the torch version up to which it did.
        fills: It makes a tensor of one number.
        factory: It makes a tensor of no tensor, so symbolic tracing has to be told of it.
        counts: It makes positions, whatever its operands are.
        of_integers: Of integers it makes a float, which may be a position.
        bounded: It brings a value of any size back into range.
        limits: It keeps a value within numbers that it is given: "" (no), "bounds", or "from_one" where the number is
            the distance from zero and from one.
        holds_eps: The kernel holds its eps in FP32, whatever its operands have.
        in_norm: What it may be in a norm or a softmax that is written by hand: "arithmetic", "statistic", "quotient"
            (it may divide by one), "reciprocal", "logarithm", "exponential".
        no_low: Devices without a low kernel for the op; devices that share their lists lack it too.
        no_low_for: The same on every device, for some arguments.
        no_low_backward: Its low kernel is for the forward only, as torch's own tests say.
        tries_low: Whether it has a low kernel depends on the machine or on arguments, so it is tried.
        accumulates: For some arguments it sums or multiplies many values into one; ("",) for all.
        folds: Its kernel is chosen by whether the weight requires gradients.
        direct: Overloads for which torch has a Python function that takes the same arguments in the same order.
        bodies: How the graphs in a higher-order op are compiled: "" (as they are), "fixed" (between the dtypes of the
            original), or "entered" (with the dtypes that its operands have here, if it is called only here).
        operands_at: Where in its arguments the operands of a body that is entered begin.
        recomputed: Its body runs once more in backward.
        switches: The mode that its body runs in is another one: "grad" or "autocast".
        known: False for an op that neither the table nor torch nor a user knows.
        since: The torch version that brought the op or put it on a list, where versions differ.
        until: The torch version that took it away.
    """

    name: str
    cpu: str
    cuda: str
    reason: str = ""
    sensitive: str = ""
    loss: bool = False
    casts: tuple[str, ...] = ()
    uncast: tuple[str, ...] = ()
    same_dtype: bool = False
    widest: tuple[str, ...] = ()
    promotes_inside: bool = False
    absorbs_cast: bool = False
    casts_out: bool = False
    dtype_arg: bool = False
    converts_first: bool = False
    never_narrows: bool = False
    exact: bool = False
    out: tuple[str, ...] = ("float",)
    out_of: str = ""
    depends: bool = False
    real: bool = False
    asks: str = ""
    cast: bool = False
    shards: bool = False
    recurrent: bool = False
    commutes: str = ""
    may_alias: str = ""
    view: bool = False
    free_backward: bool = False
    writes: tuple[Any, ...] = ()
    redraws: str = ""
    fills: bool = False
    factory: bool = False
    counts: bool = False
    of_integers: bool = False
    bounded: bool = False
    limits: str = ""
    holds_eps: bool = False
    in_norm: tuple[str, ...] = ()
    no_low: tuple[str, ...] = ()
    no_low_for: tuple[Any, ...] = ()
    no_low_backward: bool = False
    tries_low: bool = False
    accumulates: tuple[Any, ...] = ()
    folds: bool = False
    direct: tuple[str, ...] = ()
    bodies: str = ""
    operands_at: int = 0
    recomputed: bool = False
    switches: str = ""
    known: bool = True
    since: str = ""
    until: str = ""

    def kind(self, device: str) -> str:
        """Return the kind on a CPU or on CUDA; any other device names the one whose lists it shares."""
        return self.cpu if device == "cpu" else self.cuda

    @property
    def gives(self) -> str:
        """The kind of its first output; "" if that is no tensor."""
        return self.out[0] if self.out else ""


# The columns of a table of all ops; one op is shown with every column that says something.
SUMMARY = (
    "name", "cpu", "cuda", "reason", "sensitive", "uncast", "same_dtype", "widest", "casts_out", "dtype_arg", "out",
    "commutes", "no_low", "since", "until",
)  # fmt: skip

# What is known of an op that has no row.
UNKNOWN = Rule("", KEEP, KEEP, "unknown op", known=False)

Entry = tuple[str, dict[str, Any]]
_SEVERAL = frozenset(f.name for f in fields(Rule) if f.default == () or f.name == "out")


def of(names: str, **columns: Any) -> Entry:
    """Return an entry of a group: ops that have the same columns beside those of the whole group."""
    return names, columns


def group(cpu: str, cuda: str, reason: str, *entries: str | Entry, **shared: Any) -> tuple[Rule, ...]:
    """Return the rows of ops of one kind.

    Args:
        cpu: Kind on a CPU.
        cuda: Kind on CUDA.
        reason: Why.
        *entries: Names of ops, by themselves or `of` them.
        **shared: Columns that all of them have. Words of a column that holds several are separated by spaces.
    """
    split = [(e, {}) if isinstance(e, str) else e for e in entries]
    rows = [(name, _values(shared | own)) for names, own in split for name in names.split()]
    return tuple(Rule(name, cpu, cuda, reason, **columns) for name, columns in rows)


def _values(columns: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v.split()) if k in _SEVERAL and isinstance(v, str) else v for k, v in columns.items()}
