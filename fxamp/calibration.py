"""What `fxamp.calibrate` measured, as plain data: the range of each value and gradient, and for which parameters.

Before: O1,dtype=fp16                                        by the rules
After:  O1,dtype=fp16,ops.fc2/linear#0=fp32                  what came near FP16's largest number runs in FP32
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import torch
from torch import Tensor, nn

from passes.contract.errors import PlanError, public
from passes.contract.plan import Plan
from passes.contract.plan_format import LONGEST, strictly, write_text
from passes.contract.policy import Policy

from .errors import in_short
from .results import Result, table

LARGEST = float(torch.finfo(torch.float16).max)  # 65504
ROOM = 8.0  # a value that was seen beyond this part of the largest number may overflow on another batch
_SHOWN = 10
_VERSION = 4  # of the file; 4 has what tells the code
_AGAIN = "calibrate again"


@dataclass(frozen=True)
class Range:
    """The range of the values of one node, or of the gradients that arrive at it, over all batches.

    Attributes:
        largest: The largest magnitude; None if a value was not finite.
        zero: The share of elements, not 0 in FP32, that FP16 rounds to 0. Of tensors of more than 1,024 elements a
            sample is counted.
        subnormal: The share of those that FP16 keeps with fewer bits.
        not_finite: How many of the tensors that were seen held inf or NaN.
        bound: The largest magnitude that is possible, where the op proves one; None elsewhere.
    """

    largest: float | None
    zero: float
    subnormal: float
    not_finite: int
    bound: float | None = None

    @property
    def fits(self) -> bool:
        """Whether FP16 holds the values with room to spare, or provably."""
        if self.bound is not None:
            return self.bound <= LARGEST
        return self.largest is not None and self.largest * ROOM < LARGEST


@public
@dataclass(frozen=True, repr=False)
class Calibration(Result):
    """Measured ranges of values and gradients, by the keys of nodes.

    Attributes:
        values: The range of the value of each node; casts of its operands count too.
        gradients: The range of the gradient at each node, of a loss that is not scaled.
        readers: The nodes that read the value of each node.
        batches: How many batches were run.
        scale: The loss scale that `zero` and `subnormal` of gradients count with.
        parameters: The checksum of each parameter by its name.
        numbers: The numbers that a node computes with, where it does; with `readers` they tell the code.
        training: The model was in train mode.

    Example:
        >>> found = fxamp.calibrate(model, x, y, loss=nn.functional.cross_entropy)
        >>> sorted(found.values), found.large
        (['0/linear#0', '1/relu#0', '2/linear#0'], ())
    """

    values: Mapping[str, Range]
    gradients: Mapping[str, Range]
    readers: Mapping[str, tuple[str, ...]]
    batches: int
    scale: float
    parameters: Mapping[str, int]
    numbers: Mapping[str, str]
    training: bool

    @property
    def large(self) -> tuple[str, ...]:
        """The nodes whose value or gradient comes near FP16's largest number, and those that read such a value."""
        found = [key for key, held in self.values.items() if not held.fits]
        found += [reader for key in found for reader in self.readers.get(key, ())]
        found += [key for key, held in self.gradients.items() if not held.fits]
        return tuple(dict.fromkeys(found))

    def applied(self, policy: Policy, plan: Plan | None = None) -> Policy:
        """Return a policy by which no value near FP16's largest number is made or read in FP16.

        Args:
            policy: With its dtype; one of BF16, which has the range of FP32, comes back as it is.
            plan: Its plan, if it is known: only what this runs in FP16 is named.

        Example:
            >>> found = fxamp.calibrate(model, x, y, loss=nn.functional.cross_entropy)
            >>> str(found.applied(fxamp.Policy("O1", dtype="fp16")))
            'O1,dtype=fp16'
        """
        if policy.dtype is not torch.float16 or not policy.level.rounds:
            return policy
        low = None if plan is None else {d.key for d in plan.decisions if d.colour == "float16"}
        keys = [key for key in self.large if low is None or key in low]
        return replace(policy, ops=tuple({**dict.fromkeys(keys, "fp32"), **dict(policy.ops)}.items()))

    def refuse_stale(self, model: nn.Module) -> None:
        """Refuse a model whose parameters are not those that were there when it was calibrated.

        Raises:
            PlanError: A parameter is missing, is new, or has changed; the message names the first.

        Example:
            >>> fxamp.calibrate(model, x, y, loss=nn.functional.cross_entropy).refuse_stale(model)
        """
        now = checksums(model)
        for name in {**self.parameters, **now}:
            if name not in now or name not in self.parameters:
                side = "the calibration" if name not in now else type(model).__name__
                raise PlanError(f"this is the calibration of another model: only {side} has '{name}'. {_AGAIN}.")
            if now[name] != self.parameters[name]:
                raise PlanError(f"the calibration is stale: '{name}' has changed since. {_AGAIN.capitalize()}.")

    def refuse_edited(self, wiring: Mapping[str, tuple[tuple[str, ...], str]], *, whole: bool) -> None:
        """Refuse a graph whose code is not that which was calibrated: the names of nodes may be those of others.

        Args:
            wiring: Of each node, by key, the keys of its readers, and the numbers that it computes with.
            whole: It is all of the model, in which each node that is to run in FP32 has to be.

        Raises:
            PlanError: A node of the same name is another one, or one that is to run in FP32 is not there.

        Example:
            >>> found = fxamp.calibrate(model, x, y, loss=nn.functional.cross_entropy)
            >>> found.refuse_edited({"1/relu#0": (("2/linear#0",), "")}, whole=False)
        """
        both = wiring.keys() & self.readers.keys()
        for key, (readers, numbers) in wiring.items():
            if key not in self.readers:
                continue
            # What another level splits, as a loss, is in one of the two alone.
            if [r for r in self.readers[key] if r in both] != [r for r in readers if r in both]:
                was, now_by = _listed(self.readers[key]), _listed(readers)
                raise PlanError(_edited(f"{key!r} was read by {was}, and now by {now_by}"))
            if numbers != self.numbers.get(key, ""):
                known = self.numbers.get(key, "no number")
                raise PlanError(_edited(f"{key!r} computed with {known}, and computes with {numbers or 'none'}"))
        missing = [key for key in self.large if key not in wiring] if whole else []
        if missing:
            raise PlanError(_edited(f"{missing[0]!r}, which is to run in FP32, is not there"))

    @property
    def policy(self) -> Policy:
        """O1 in FP16 with what is too large for it in FP32, for `fxamp.convert`.

        Example:
            >>> str(fxamp.calibrate(model, x, y, loss=nn.functional.cross_entropy).policy)
            'O1,dtype=fp16'
        """
        return self.applied(Policy("O1", dtype=torch.float16))

    def _data(self) -> dict[str, Any]:
        return {**asdict(self), "version": _VERSION}

    @classmethod
    def from_json(cls, text: str, *, name: str = "calibration") -> Calibration:
        """Read a calibration from text.

        Raises:
            PlanError: It is none.

        Example:
            >>> found = fxamp.calibrate(model, x, y, loss=nn.functional.cross_entropy)
            >>> fxamp.Calibration.from_json(found.to_json()).batches
            1
        """
        data = strictly(text, name, "calibration")
        try:
            if data.pop("version") != _VERSION:
                raise PlanError(f"{name}: another version of fxamp wrote it; {_AGAIN}")
            kinds = get_type_hints(cls, globals())
            return cls(**{field: msgspec.convert(data[field], kind) for field, kind in kinds.items()})
        except (AttributeError, KeyError, TypeError, msgspec.ValidationError) as error:
            raise PlanError(f"{name}: JSON, but not a calibration ({in_short(error)}); {_AGAIN}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, atomically.

        Raises:
            PlanError: The file cannot be written.

        Example:
            >>> fxamp.calibrate(model, x, y, loss=nn.functional.cross_entropy).save("net.ranges.json")
        """
        try:
            write_text(path, self.to_json())
        except (OSError, ValueError) as error:
            raise PlanError(f"cannot write the calibration to {os.fspath(path)!r}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read it from a file.

        Raises:
            PlanError: The file cannot be read, or holds none.

        Example:
            >>> fxamp.calibrate(model, x, y, loss=nn.functional.cross_entropy).save("net.ranges.json")
            >>> found = fxamp.Calibration.load("net.ranges.json")
            >>> again = fxamp.convert(model, (x,), policy="O1,dtype=fp16", calibration=found)
        """
        try:
            with Path(path).open(encoding="utf-8") as file:
                text = file.read(LONGEST + 1)  # no more: a device file may never end
        except (OSError, ValueError) as error:
            raise PlanError(f"cannot read the calibration {os.fspath(path)!r}: {error}; {_AGAIN}") from error
        return cls.from_json(text, name=os.fspath(path))

    def _text(self, style: str) -> str:
        def size(key: str) -> float:
            held = self.values[key].largest
            return math.inf if held is None else held

        rows, large = [], set(self.large)
        for key in sorted(self.values, key=size, reverse=True)[:_SHOWN]:
            value, gradient = self.values[key], self.gradients.get(key)
            proved = "" if value.bound is None else f"{value.bound:.3g}"
            shown = ["", "", ""] if gradient is None else _cells(gradient)
            rows.append([key, *_cells(value), proved, *shown, "FP32" if key in large else "FP16"])
        head = ["node", "largest", "% to 0", "% subnormal", "proved",
                "gradient", "its % to 0", "its % subnormal", "runs in"]  # fmt: skip
        more = f"\nand {len(self.values) - _SHOWN} more in .values" if len(self.values) > _SHOWN else ""
        return f"{repr(self)[1:-1]}\n{table(head, rows, style)}{more}"

    def __repr__(self) -> str:
        count = f"{len(self.values)} values, {self.batches} batches, {len(self.large)} nodes too large for FP16"
        return f"<fxamp calibration: {count}>"


def _edited(what: str) -> str:
    return f"the calibration is of other code, or for another policy: {what}. {_AGAIN.capitalize()}, by this policy."


def _listed(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names[:3])) or "nothing"


def _cells(held: Range) -> list[str]:
    largest = "not finite" if held.largest is None else f"{held.largest:.3g}"
    return [largest, f"{100 * held.zero:.2g}", f"{100 * held.subnormal:.2g}"]


def checksums(model: nn.Module) -> dict[str, int]:
    """Return a checksum of the name, the shape and the bits of each parameter; devices are read once each."""
    found: dict[str, int] = {}
    sums: list[Tensor] = []
    for name, p in model.named_parameters():
        bits = p.detach().contiguous().flatten().view(torch.uint8)
        whole = bits.numel() // 8 * 8 if bits.storage_offset() % 8 == 0 else 0
        # Words of 64 bits need no conversion to be added up, which takes longer than a step of a small model. Each has
        # a factor of its own, so that their order counts, and is mixed, so that flipped signs do not cancel out.
        words = bits[:whole].view(torch.int64)
        words = words * (2 * torch.arange(len(words), device=bits.device) + 1)
        rest = bits[whole:].long() * (torch.arange(len(bits) - whole, device=bits.device) + 1)
        sums.append(((words ^ (words >> 29)).sum() + rest.sum()).cpu())
        found[name] = zlib.crc32(f"{name}{tuple(p.shape)}{p.dtype}".encode())
    return {name: zlib.crc32(str(int(s)).encode(), start) for (name, start), s in zip(found.items(), sums, strict=True)}
