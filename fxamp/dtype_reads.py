"""Keep the author's relative casts relative while a model is captured.

The exporter bakes `x.to(y.dtype)` into `to(x, float32)`, and nothing in the graph says that `y` was meant. This mode
sees the read of `y.dtype` and hands the exporter an op that has `y` as an operand:

    x.to(y.dtype)                       ->  x.type_as(y)
    torch.zeros(n, dtype=y.dtype)       ->  y.new_zeros(n)
    torch.arange(n, dtype=y.dtype)      ->  torch.arange(n, dtype=float32).type_as(y)
    torch.softmax(x, 1, dtype=y.dtype)  ->  torch.softmax(x.type_as(y), 1)

A read counts when the call follows it in the same expression, or when it was stored in the local variable that the
call is given (`input_dtype = x.dtype; ...; x.to(input_dtype)`).

A cast that does nothing in FP32 returns the very tensor it was given, and the exporter would take every later use of
that tensor for a use of the cast. So each cast is given an alias, which `drop_aliases` takes out of the graph again;
two aliases where the dtype came from somewhere that cannot be seen.
"""

from __future__ import annotations

import dis
import functools
from bisect import bisect_right
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph

from passes._torch import TorchFunctionMode
from passes.ops import CAST_METHODS, CONVERTS_FIRST

from . import frames

_ALIAS = torch.ops.aten.alias.default
_READ = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_CASTS = frozenset(getattr(torch.Tensor, n) for n in ("to", "type_as", "type", *CAST_METHODS))
_FACTORIES = {torch.zeros: "new_zeros", torch.ones: "new_ones", torch.full: "new_full", torch.empty: "new_empty"}
_MADE = (torch.arange, torch.eye, torch.tensor, torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like)


class DtypeReads(TorchFunctionMode):
    """Track reads of `.dtype` per Python frame, and make the casts and factories that use them relative."""

    def __init__(self) -> None:
        super().__init__()
        # A read with nothing but attribute reads since, and where it was.
        self._last: tuple[FrameType, int, torch.Tensor] | None = None
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
        elif func in _MADE and isinstance(kwargs.get("dtype"), torch.dtype):
            reference = self._reference(kwargs["dtype"])
            if reference is not None:
                return _ALIAS(func(*args, **kwargs)).type_as(reference)
        elif args and getattr(func, "__name__", "") in CONVERTS_FIRST and isinstance(kwargs.get("dtype"), torch.dtype):
            reference = self._reference(kwargs["dtype"])
            if reference is not None:
                kwargs = {k: v for k, v in kwargs.items() if k != "dtype"}
                return func(_ALIAS(args[0]).type_as(reference), *args[1:], **kwargs)
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
            self._last = (frame, frame.f_lasti, tensor)

    def _reference(self, wanted: Any) -> torch.Tensor | None:
        """Return the tensor whose dtype was read for the call being made, if its dtype is the one wanted."""
        if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
            return None
        frame = _user_frame()
        if frame is None:
            return None
        last, self._last = self._last, None
        if last is not None and last[0] is frame and _one_expression(frame.f_code, last[1], frame.f_lasti):
            return last[2]
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
    if frame is None:
        return False
    listing, at = _instructions(frame.f_code, frame.f_lasti)
    before = [i for i in listing[max(0, at - 4) : at] if not i.opname.startswith("KW_NAMES")]
    return any(i.opname == "LOAD_ATTR" and isinstance(getattr(torch, str(i.argval), None), torch.dtype) for i in before)


def _as_size(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return factory arguments as the `new_` method takes them: the size as one tuple."""
    if func is torch.full or (args and isinstance(args[0], (tuple, list, torch.Size))):
        return args
    return (tuple(args),) if args else ()


def _user_frame() -> FrameType | None:
    """Return the frame that made the call, past this mode, the exporter's own, and functions that hand a dtype on."""
    frame = frames.caller(("user", "nn"))
    while frame is not None and _hands_on(frame.f_code):
        frame = frame.f_back
    return frame


def _hands_on(code: CodeType) -> bool:
    file = code.co_filename
    return frames.kind(file) not in ("user", "nn") or (file == F.__file__ and code.co_name in CONVERTS_FIRST)


@functools.lru_cache(maxsize=1024)
def _listing(code: CodeType) -> tuple[list[dis.Instruction], list[int]]:
    """Return the instructions of a code object, and their offsets."""
    skipped = ("CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "RESUME")
    listing = [i for i in dis.get_instructions(code) if i.opname not in skipped]
    return listing, [i.offset for i in listing]


def _instructions(code: CodeType, offset: int) -> tuple[list[dis.Instruction], int]:
    """Return the instructions of a code object, and which of them is at an offset, or in progress there."""
    listing, offsets = _listing(code)
    return listing, bisect_right(offsets, offset) - 1


def _instruction_after(code: CodeType, offset: int) -> dis.Instruction | None:
    listing, at = _instructions(code, offset)
    return listing[at + 1] if at + 1 < len(listing) else None


def _one_expression(code: CodeType, read: int, call: int) -> bool:
    """Say whether nothing between a read and a call uses the dtype up, as a comparison or an assignment does."""
    listing, at = _instructions(code, read)
    until = _instructions(code, call)[1]
    return at < until and not any(i.opname.startswith(_USES_UP) for i in listing[at + 1 : until])


_USES_UP = ("COMPARE", "CONTAINS", "IS_OP", "STORE", "POP_JUMP", "POP_TOP", "RETURN", "YIELD")


def _loads_before_call(code: CodeType, offset: int) -> list[str]:
    """Return the local names loaded for a call, the nearest first, up to the previous call."""
    listing, at = _instructions(code, offset)
    names = []
    for instruction in reversed(listing[max(0, at - 12) : at]):
        if instruction.opname.startswith(("CALL", "STORE")):
            break
        if instruction.opname.startswith("LOAD_") and isinstance(instruction.argval, str):
            names.append(instruction.argval)
    return names
