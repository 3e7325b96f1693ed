"""The user's request: a level, a dtype, a device, and overrides per module, type and op.

A `Policy` is frozen and hashable, and its string form round-trips::

    Policy("O2", dtype="bf16", modules={"fc3": "fp32", nn.LayerNorm: "fp32"}, ops={"softmax": "low"})
    O2,dtype=bf16,modules.fc3=fp32,modules.torch.nn.LayerNorm=fp32,ops.softmax=low
"""

from __future__ import annotations

import difflib
import enum
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from .devices import DEVICES
from .errors import PolicyError, public


class Level(str, enum.Enum):
    """A level of conversion; it compares equal to its name, and prints as its name."""

    rounds: bool  # some ops may run in the low dtype; otherwise results are the model's own, bit for bit
    is_autocasts: bool  # values are those of `torch.autocast`, bit for bit where the plan names no deviation
    stores_low: bool  # values that autocast would keep in FP32 may be stored low
    rounds_sensitive: bool  # sensitive ops run low too, wherever they have a kernel
    # A loss is split from the sum of its terms, which is FP32, and so are sums into a written value.
    keeps_sums_fp32: bool
    may_keep_products_fp32: bool  # with measured costs, a product whose casts do not pay is FP32

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


Pairs: TypeAlias = tuple[tuple[str, str], ...]
# Keys are str or type[nn.Module]. A mapping's key type is invariant, so naming them would refuse most literals.
ModuleOverrides: TypeAlias = Mapping[Any, object] | Iterable[tuple[Any, object]]
OpOverrides: TypeAlias = Mapping[str, object] | Iterable[tuple[str, object]]
# The modules a node lies in, from the root to the innermost: (path, names of its type and of the type's bases).
Stack: TypeAlias = Sequence[tuple[str, Sequence[str]]]

COLOURS = ("low", "fp32", "keep")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SHORT = {dtype: name for name, dtype in DTYPES.items()}
CHOICES = {
    "output_dtype": ("original", "autocast", "low"),
    "cost": ("bytes", "measured"),
    "unknown_ops": ("autocast", "keep", "fp32", "error"),
    "share_casts": ("always", "weights", "never", "storage"),
}

_DTYPE_SPELLINGS = DTYPES | {"float16": torch.float16, "half": torch.float16, "bfloat16": torch.bfloat16}
# Words that people use for something that has another name here.
_MEANT = {"gpu": "cuda"} | dict.fromkeys(_DTYPE_SPELLINGS, "low")
_LIKE = 0.55  # least likeness of a suggested name: "fp8" is like "fp16", and "fp16" is not like "fp32"
_FP32_SPELLINGS = ("float32", "torch.float32", "float")


@public
@dataclass(frozen=True, init=False)
class Policy:
    """How a model is converted: a level, a dtype, a device, and overrides. Its string form can be parsed back.

    A policy is frozen, hashable and equal by value. If two module overrides match, a path wins over a type, and of two
    paths the one with the longer literal prefix wins. An override of a module wins over one of an op, and one of a
    single node over both.

    Args:
        level: "O0" computes everything in FP32. "O1" runs the ops of `torch.autocast` in 16 bits. "O2" adds ops that
            are not numerically sensitive, if fewer bytes are then moved, counting the casts. "O3" runs all ops that
            have a 16-bit kernel.
        dtype: The low dtype: `torch.float16`, `torch.bfloat16`, "fp16" or "bf16". None takes the dtype of the
            surrounding `torch.autocast`, or its default for the device: BF16 on a CPU, FP16 on CUDA.
        device: "cpu", "cuda" or "xpu": the device whose list of ops is used. None takes the device of the model. A plan
            for a device that is absent can be made, saved and compared.
        modules: Overrides by module: a mapping from a path, a glob of paths (`*` stays within one segment, and a key
            covers its submodules) or a type to "low", "fp32" or "keep" (the dtypes before conversion).
        ops: Overrides by op: a mapping from names as `fxamp.rules()` lists them to "low", "fp32" or "keep". The key of
            a decision ("fc1/linear#0") names one node of each graph; one that no graph has is then an error only where
            the model is converted with example inputs. What writes in place has the dtype of its target in any case.
        output_dtype: "original" returns outputs in the dtypes of the model's outputs, "autocast" in those that
            `torch.autocast` would hand out, for a part of a larger model, "low" in those that they were computed in.
        cost: "bytes" places casts where the fewest bytes move. "measured" places them where this machine takes the
            least time, and keeps an op in FP32 if its casts take more time than 16 bits save.
        unknown_ops: What an op without a rule, custom or higher-order, gets: the dtypes that `torch.autocast` would
            hand it, under which it runs ("autocast"), the dtypes before conversion ("keep"), FP32 ("fp32"), or an error
            ("error").
        share_casts: Which values are cast once for all ops that read them in 16 bits: "always" means all values,
            "weights" only weights, "never" none. The gradients of a value that is cast once are summed in 16 bits.
            "storage" changes no gradient: `torch.autocast` sums those of a weight in 16 bits and all others in FP32, so
            that the readers of another value that needs gradients share the storage of one copy, through a node of
            autograd each. None is "always" from O2 on, and at O1 "storage" for values so large that it takes less time
            than a cast for each reader.

    Raises:
        PolicyError: A value is unknown (the message lists the legal ones), or two overrides contradict each other.

    Example:
        >>> policy = fxamp.Policy("O2", dtype="bf16", modules={"fc3": "fp32"}, ops={"softmax": "low"})
        >>> str(policy)
        'O2,dtype=bf16,modules.fc3=fp32,ops.softmax=low'
        >>> fxamp.Policy.parse(str(policy)) == policy
        True
    """

    # The arguments have other types than the fields, so `__init__` is written out. It stays a dataclass, and not one
    # of attrs, since users call `dataclasses.replace` on it.
    level: Level
    _: KW_ONLY
    dtype: torch.dtype | None
    device: str | None
    modules: Pairs
    ops: Pairs
    output_dtype: str
    cost: str
    unknown_ops: str
    share_casts: str | None

    def __init__(
        self,
        level: str = "O1",
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        modules: ModuleOverrides = (),
        ops: OpOverrides = (),
        output_dtype: str = "original",
        cost: str = "bytes",
        unknown_ops: str = "autocast",
        share_casts: str | None = None,
    ) -> None:
        if isinstance(level, str) and "," in level:
            raise PolicyError(f"unknown level {level!r}; a policy as text is Policy.parse({level!r})")
        values = {
            "level": Level(_choice("level", level, LEVELS)),
            "dtype": _dtype(dtype),
            # Lists and facts are those of a device type; which of several devices it is does not matter.
            "device": None if device is None else _choice("device", re.sub(r":\d+$", "", str(device)), tuple(DEVICES)),
            "modules": _pairs("modules", modules),
            "ops": _pairs("ops", ops),
            "share_casts": None if share_casts is None else _choice("share_casts", share_casts, CHOICES["share_casts"]),
        }
        chosen = {"output_dtype": output_dtype, "cost": cost, "unknown_ops": unknown_ops}
        values |= {name: _choice(name, value, CHOICES[name]) for name, value in chosen.items()}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read a pickled policy through `__init__`, since one of an older fxamp may hold other types."""
        self.__init__(**state)  # type: ignore[misc]

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read the string form, `LEVEL[,KEY=VALUE]...`: keys are arguments of `Policy`, `modules.NAME` and `ops.NAME`.

        Raises:
            PolicyError: The text is not a policy; the message shows the correct form.

        Example:
            >>> fxamp.Policy.parse("O1,dtype=fp16,modules.head=fp32").modules
            (('head', 'fp32'),)
        """
        level, *settings = (part.strip() for part in text.split(","))
        if level not in LEVELS:
            raise PolicyError(f"unknown level {level!r}; legal: {', '.join(LEVELS)}{_instead_of_level(text, level)}")
        plain: dict[str, str] = {}
        modules: list[tuple[str | type[nn.Module], object]] = []
        ops: list[tuple[str, object]] = []
        for setting in settings:
            key, equals, value = (part.strip() for part in setting.partition("="))
            if not equals or not key or not value:
                raise PolicyError(f"policy {text!r}: {setting!r} is not KEY=VALUE; write LEVEL[,KEY=VALUE]...")
            if key.startswith("modules."):
                modules.append((key.removeprefix("modules."), value))
            elif key.startswith("ops."):
                ops.append((key.removeprefix("ops."), value))
            elif "." in key:
                legal = [f"{field}.{key.partition('.')[2]}" for field in ("modules", "ops")]
                raise PolicyError(f"unknown key {key!r}; overrides are modules.NAME and ops.NAME{nearest(key, legal)}")
            elif key in plain:
                raise PolicyError(f"policy {text!r}: {key!r} is given twice; keep one")
            else:
                plain[_choice("key", key, ("dtype", "device", *CHOICES), more="modules.NAME, ops.NAME")] = value
        return cls(level, modules=modules, ops=ops, **plain)

    @classmethod
    def of(cls, value: Policy | str | None) -> Policy:
        """Return a policy from what the public functions take: None is O1, a string is parsed.

        Raises:
            PolicyError: `value` is none of these, or the string cannot be parsed.

        Example:
            >>> fxamp.Policy.of(None) == fxamp.Policy.of("O1") == fxamp.Policy("O1")
            True
        """
        if value is None:
            return cls()
        if isinstance(value, Policy):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        raise PolicyError(
            f'a policy is a text, such as "O1,dtype=bf16", or a fxamp.Policy, not {value!r} ({type(value).__name__})'
        )

    @property
    def sharing(self) -> str:
        """How casts are shared: `share_casts`; where that is None, "always" from O2 on, and "large storage" below.

        Example:
            >>> fxamp.Policy("O1").sharing, fxamp.Policy("O2").sharing
            ('large storage', 'always')
        """
        return self.share_casts or ("always" if self.level.stores_low else "large storage")

    def __str__(self) -> str:
        """Write the string form that `parse` reads; settings at their default are left out."""
        default, parts = Policy(), [str(self.level)]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name in ("modules", "ops"):
                parts += [f"{field.name}.{key}={colour}" for key, colour in value]
            elif value != getattr(default, field.name):
                parts.append(f"{field.name}={SHORT.get(value, value)}")
        return ",".join(parts)


@dataclass(frozen=True)
class Override:
    """One override of a policy: by module or by op, its key, and its colour."""

    kind: Literal["path", "type", "op"]
    key: str
    colour: str

    def __str__(self) -> str:
        """Write the override as the policy string does."""
        return f"{'ops' if self.kind == 'op' else 'modules'}.{self.key}={self.colour}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch.", as plans and reports have it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class Target(NamedTuple):
    """What a graph is compiled for: the kind of device, and the low dtype on it."""

    device: str
    low: torch.dtype

    @classmethod
    def of(cls, policy: Policy) -> Target:
        """Return the target of a policy that leaves nothing open.

        Raises:
            PolicyError: it leaves the device or the dtype open.
        """
        if policy.device is None or policy.dtype is None:
            raise PolicyError(
                f"{policy} leaves open for which device or dtype a graph is compiled: add device= and dtype=."
            )
        return cls(policy.device, policy.dtype)


def module_override(policy: Policy, stack: Stack) -> Override | None:
    """Find the module override that applies to a node in this stack of modules, or None.

    A path beats a type. Of two globs the one with the longer literal prefix wins, of two types the one of the
    inner module, then the more derived one. Two of equal rank that ask for different colours are an error.
    """
    ranked = list(_matches(policy, stack))
    if not ranked:
        return None
    best = max(rank for rank, _ in ranked)
    first, *others = (override for rank, override in ranked if rank == best)
    for other in others:
        if other.colour != first.colour:
            raise PolicyError(
                f"module {stack[-1][0]!r}: {first} and {other} have equal rank and contradict each other; "
                "drop one, or write one with a longer literal prefix"
            )
    return first


def op_override(policy: Policy, op: str) -> Override | None:
    """Find the override of an op by its canonical name, or of one node by the key of its decision, or None."""
    return next((Override("op", key, colour) for key, colour in policy.ops if key == op), None)


def check_used(policy: Policy, stacks: Iterable[Stack], ops: Iterable[str]) -> None:
    """Refuse a policy with an override that matches nothing, naming the nearest name there is.

    The stacks are those of all nodes, or of all modules; among the ops are the keys of nodes.
    """
    stacks, ops = list(stacks), set(ops)
    matched = {override.key for stack in stacks for _, override in _matches(policy, stack)}
    for key, colour in policy.modules:
        if key not in matched:
            names = {name for stack in stacks for path, types in stack for name in (path, *map(_public_name, types))}
            unmatched = Override("path", key, colour)
            raise PolicyError(f"{unmatched} matches no module of this model{nearest(key, names - {''})}")
    for key, colour in policy.ops:
        if key not in ops:
            raise PolicyError(f"{Override('op', key, colour)} matches no op of this model{nearest(key, ops)}")


def type_names(kind: type | str) -> tuple[str, ...]:
    """List the names a type key may have, the most derived first: a class's own and its bases', or one name."""
    if isinstance(kind, str):
        return (_public_name(kind),)
    return tuple(_public_name(f"{base.__module__}.{base.__qualname__}") for base in kind.__mro__[:-1])


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Write the end of an error message that points to the candidate most like `name`; empty where none is like it."""
    # Sorted: the first of equally good candidates wins, and a set has no fixed order.
    ordered = sorted(candidates)
    close = [c for c in ordered if c == _MEANT.get(name)] or difflib.get_close_matches(name, ordered, 1, _LIKE)
    return f"; the nearest name is {close[0]!r}" if close else ""


# Precisions of Lightning and of Accelerate; 16-bit weights are no policy of fxamp's.
_OF_TRAINERS = {
    "bf16-mixed": "O1,dtype=bf16", "16-mixed": "O1,dtype=fp16", "fp16-mixed": "O1,dtype=fp16", "32-true": "O0",
    "32": "O0", "no": "O0",
}  # fmt: skip


def _instead_of_level(text: str, level: str) -> str:
    """Return an addition to an error message on a policy that does not begin with a level: its correct form."""
    words = level.split()
    if len(words) > 1 and words[0] in LEVELS:
        return f"; settings are separated by commas: {','.join((*words, *text.split(',')[1:]))!r}"
    if instead := _OF_TRAINERS.get(level):
        return f"; what Lightning and Accelerate call {level!r} is {instead!r} here"
    if level in _DTYPE_SPELLINGS:
        return f"; a policy begins with its level: {f'O1,dtype={text}'!r}"
    if ";" in level:
        return f"; settings are separated by commas: {text.replace(';', ',')!r}"
    if "=" in level:
        return f"; a policy begins with its level: {f'O1,{text}'!r}"
    return zero_for_o(level) or nearest(level.upper(), LEVELS)


def _matches(policy: Policy, stack: Stack) -> Iterable[tuple[tuple[int, int, int], Override]]:
    """Yield every module override that matches, with its rank; the greater rank wins."""
    if not stack:
        return
    path = stack[-1][0]
    for key, colour in policy.modules:
        # The root has no path, so that no glob matches it; only its type does.
        if path and glob(key).fullmatch(path):
            yield (1, len(key.partition("*")[0]), 0), Override("path", key, colour)
            continue
        for depth, (_, types) in reversed(list(enumerate(stack))):
            names = [_public_name(name) for name in types]
            if key in names:
                yield (0, depth, -names.index(key)), Override("type", key, colour)
                break


@functools.lru_cache(maxsize=1024)
def glob(key: str) -> re.Pattern[str]:
    """Compile a glob of module paths: `*` stays within one segment, submodules are covered.

    Text between two stars matches where it first occurs (a lookahead does not backtrack), so that the time to match
    grows with the length of a path and not with a power of it.
    """
    groups = itertools.count()

    def segment(text: str) -> str:
        first, *rest = map(re.escape, re.sub(r"\*+", "*", text).split("*"))
        if not rest:
            return first
        *middle, last = rest
        between = "".join(f"(?=(?P<g{n}>[^.]*?{part}))(?P=g{n})" for part, n in zip(middle, groups, strict=False))
        return rf"{first}{between}[^.]*{last}(?![^.])"

    return re.compile(r"\.".join(map(segment, key.split("."))) + r"(\..*)?")


def _public_name(name: str) -> str:
    """Turn the defining name of a torch.nn class into the documented one, leave others as they are."""
    if not name.startswith("torch.nn.modules."):
        return name
    short = name.rpartition(".")[2]
    return f"torch.nn.{short}" if hasattr(nn, short) else name


def _pairs(field: str, overrides: ModuleOverrides | OpOverrides) -> Pairs:
    """Bring overrides into canonical form: sorted (key, colour) pairs, since their order means nothing."""
    items = overrides.items() if isinstance(overrides, Mapping) else overrides
    colours: dict[str, str] = {}
    try:
        pairs = [(key, colour) for key, colour in items]
    except (TypeError, ValueError) as error:
        raise PolicyError(f"{field} must map names to 'low', 'fp32' or 'keep', got {overrides!r}") from error
    for key, value in pairs:
        name = _key(field, key)
        is_fp32 = value is torch.float32 or value in _FP32_SPELLINGS
        colour = "fp32" if is_fp32 else _choice(f"{field}.{name}", value, COLOURS)
        if colours.setdefault(name, colour) != colour:
            raise PolicyError(f"{field}.{name} is given twice, as {colours[name]!r} and as {colour!r}; keep one")
    return tuple(sorted(colours.items()))


def _key(field: str, key: object) -> str:
    if isinstance(key, type) and field == "modules":
        if not issubclass(key, nn.Module):
            raise PolicyError(f"modules: {key.__qualname__} is not a module type; give a subclass of nn.Module")
        return type_names(key)[0]
    if not isinstance(key, str):
        what = "a module path, a glob or a module type" if field == "modules" else "a canonical op name"
        raise PolicyError(f"{field}: {key!r} is not {what}")
    # A comma or an equals sign would not survive the string form.
    if not key.strip() or set(key) & set(",="):
        raise PolicyError(f"{field}: the key {key!r} is empty or holds one of ',='; write a module path or an op name")
    return _public_name(key.strip())


def _dtype(value: object) -> torch.dtype | None:
    if value is None or value in (torch.float16, torch.bfloat16):
        return value
    spelling = str(value).removeprefix("torch.")
    if spelling in _DTYPE_SPELLINGS:
        return _DTYPE_SPELLINGS[spelling]
    raise PolicyError(
        f"dtype {spelling!r} is not a low dtype; legal: fp16, bf16 (torch.float16, torch.bfloat16)"
        + nearest(spelling, _DTYPE_SPELLINGS)
    )


def _choice(name: str, value: object, legal: Sequence[str], more: str = "") -> str:
    if isinstance(value, str) and value in legal:
        return value
    options = ", ".join((*legal, more) if more else legal)
    hint = zero_for_o(str(value)) or nearest(str(value), legal)
    raise PolicyError(f"unknown {name} {value!r}; legal: {options}{hint}")
