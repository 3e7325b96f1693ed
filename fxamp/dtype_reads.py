"""Keep the author's relative casts relative while a model is captured.

The exporter bakes `x.to(y.dtype)` into `to(x, float32)`, and nothing in the graph says that `y` was meant. This mode
sees the read of `y.dtype` and hands the exporter an op that has `y` as an operand:

    x.to(y.dtype)                       ->  x.type_as(y)
    torch.zeros(n, dtype=y.dtype)       ->  y.new_zeros(n)

A read counts when the call follows it in the same expression, or when it was stored in the local variable that the
call is given (`input_dtype = x.dtype; ...; x.to(input_dtype)`).

A cast that does nothing in FP32 returns the very tensor it was given, and the exporter would take every later use of
that tensor for a use of the cast. So each cast is given an alias, which `drop_aliases` takes out of the graph again;
two aliases where the dtype came from somewhere that cannot be seen.
"""

from __future__ import annotations

import dis
import functools
from types import CodeType, FrameType
from typing import Any

import torch
from torch.fx import Graph

from passes._torch import TorchFunctionMode
from passes.ops import CAST_METHODS

from . import frames

_ALIAS = torch.ops.aten.alias.default
_READ = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_CASTS = frozenset(getattr(torch.Tensor, n) for n in ("to", "type_as", "type", *CAST_METHODS))
_FACTORIES = {torch.zeros: "new_zeros", torch.ones: "new_ones", torch.full: "new_full", torch.empty: "new_empty"}


class DtypeReads(TorchFunctionMode):
    """Track reads of `.dtype` per Python frame, and make the casts and factories that use them relative."""

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[FrameType, torch.Tensor] | None = None  # a read with nothing but attribute reads since
        self._stored: dict[tuple[FrameType, str], torch.Tensor] = {}

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._last, self._stored = None, {}  # do not keep frames alive

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _READ or func == _READ:
            self._read(args[0])
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        if func in _CASTS and args[0].is_floating_point():
            reference = None
            if func is torch.Tensor.to and len(args) + len(kwargs) == 2:
                reference = self._reference(args[1] if len(args) > 1 else kwargs.get("dtype"))
            self._last = None
            alias = _ALIAS(args[0])
            if reference is not None:
                return alias.type_as(reference)
            if not _is_literal(func):
                alias = _ALIAS(alias)
            return func(alias, *args[1:], **kwargs)
        if func is torch.Tensor.to and len(args) + len(kwargs) == 2:  # of integers or booleans
            reference = self._reference(args[1] if len(args) > 1 else kwargs.get("dtype"))
            if reference is not None:
                return args[0].type_as(reference)
        elif func in _FACTORIES and isinstance(kwargs.get("dtype"), torch.dtype):
            reference = self._reference(kwargs["dtype"])
            if reference is not None:
                rest = {k: v for k, v in kwargs.items() if k != "dtype"}
                if "size" in rest or args:
                    return getattr(reference, _FACTORIES[func])(*_as_size(func, args), **rest)
        self._last = None
        return func(*args, **kwargs)

    def _read(self, tensor: torch.Tensor) -> None:
        frame = _user_frame()
        if frame is None or not tensor.is_floating_point():
            return
        following = _instruction_after(frame.f_code, frame.f_lasti)
        if following is not None and following.opname.startswith("STORE_") and isinstance(following.argval, str):
            self._stored[frame, following.argval] = tensor
        else:
            self._last = (frame, tensor)

    def _reference(self, wanted: Any) -> torch.Tensor | None:
        """Return the tensor whose dtype was read for the call being made, if its dtype is the one wanted."""
        if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
            return None
        frame = _user_frame()
        if frame is None:
            return None
        last, self._last = self._last, None
        if last is not None and last[0] is frame:
            return last[1]
        names = _loads_before_call(frame.f_code, frame.f_lasti)
        return next((self._stored[frame, n] for n in names if (frame, n) in self._stored), None)


def drop_aliases(graph: Graph) -> None:
    """Remove the aliases that stand before casts, and leave in `meta["cast"]` what they said: two mean "undecided"."""
    for node in list(graph.nodes):
        if node.target is _ALIAS:
            value: Any = node.args[0]
            for reader in node.users:
                reader.meta["cast"] = "undecided" if value.target is _ALIAS or "cast" in node.meta else "literal"
            node.replace_all_uses_with(value)
            graph.erase_node(node)


def _is_literal(func: Any) -> bool:
    """Say whether the dtype of a cast stands in the call itself: `.float()`, `.to(torch.float32)`."""
    if func is not torch.Tensor.to:
        return func is not torch.Tensor.type_as
    frame = _user_frame()
    found = _instructions(frame.f_code).get(frame.f_lasti) if frame is not None else None
    if found is None:
        return False
    listing, at = found
    before = [i for i in listing[max(0, at - 4) : at] if not i.opname.startswith("KW_NAMES")]
    return any(i.opname == "LOAD_ATTR" and isinstance(getattr(torch, str(i.argval), None), torch.dtype) for i in before)


def _as_size(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return factory arguments as the `new_` method takes them: the size as one tuple."""
    if func is torch.full or (args and isinstance(args[0], (tuple, list, torch.Size))):
        return args
    return (tuple(args),) if args else ()


def _user_frame() -> FrameType | None:
    """Return the frame that made the call, past this mode and the exporter's own modes."""
    return frames.caller(("user", "nn"))


@functools.lru_cache(maxsize=1024)
def _instructions(code: CodeType) -> dict[int, tuple[list[dis.Instruction], int]]:
    skipped = ("CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME")
    listing = [i for i in dis.get_instructions(code) if i.opname not in skipped]
    return {i.offset: (listing, n) for n, i in enumerate(listing)}


def _instruction_after(code: CodeType, offset: int) -> dis.Instruction | None:
    found = _instructions(code).get(offset)
    if found is None or found[1] + 1 >= len(found[0]):
        return None
    return found[0][found[1] + 1]


def _loads_before_call(code: CodeType, offset: int) -> list[str]:
    """Return the local names loaded for a call, the nearest first, up to the previous call."""
    found = _instructions(code).get(offset)
    if found is None:
        return []
    listing, at = found
    names = []
    for instruction in reversed(listing[max(0, at - 12) : at]):
        if instruction.opname.startswith(("CALL", "STORE")):
            break
        if instruction.opname.startswith("LOAD_") and isinstance(instruction.argval, str):
            names.append(instruction.argval)
    return names
