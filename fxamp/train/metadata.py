"""What `torch.distributed.checkpoint` says in `.metadata` of the shards beside it, read as data.

That file is a pickle, and a pickle is a program: to unpickle it is to import and call whatever it names. Here nothing
is imported or called. The few opcodes that such a file needs make lists, dictionaries and stand-ins for instances, and
torch's public classes are then made of what is expected in them. All else is refused.
"""

from __future__ import annotations

import copy
import math
import pickletools
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from .files import size_of

LONGEST = 256 << 20  # bytes; 4,000 tensors over 8 ranks take 5 MB
_SHARD = re.compile(r"__\d+_\d+\.distcp")  # the names that torch gives to shards: a path would lead out of the folder
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_LAYOUT = f"{_METADATA}._MEM_FORMAT_ENCODING"
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_NAMES = {
    *(f"{_METADATA}.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *(f"{_METADATA}.{kind}StorageMetadata" for kind in ("Tensor", "Chunk", "Bytes")),
    f"{_FILES}._StorageInfo", _LAYOUT, "torch.Size", "torch.serialization._get_layout",
    *(f"{module}.{kind}Path" for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
    "builtins.getattr",  # by which some releases of Python 3.11 name a member of an enumeration
    *_DTYPES,
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a part of a checkpoint lies in a shard, and, for a part of a tensor, what has to be there."""

    file: str  # the name of the shard, in the folder of the checkpoint
    offset: int  # in bytes, as the length
    length: int
    shape: tuple[int, ...] | None = None  # of the part of a tensor
    dtype: torch.dtype | None = None


def metadata_in(file: Path) -> Metadata:
    """Return what a `.metadata` says, with a Place for each part, which its shard has; ValueError if it is wrong."""
    if size_of(file) > LONGEST:
        raise ValueError(f"it is longer than {LONGEST >> 20} MB, which no model needs")
    try:
        return _checked(_Parser().value_of(file.read_bytes()), file.parent)
    except (LookupError, TypeError, AttributeError, OverflowError, MemoryError) as error:  # of another structure
        raise ValueError(f"it is damaged, or no metadata of a checkpoint ({type(error).__name__})") from error


class _Name(str):
    """The name of what a pickle would import."""

    __slots__ = ()


@dataclass(eq=False, repr=False)
class _Instance:
    """What a pickle would make by a call of `kind` with `args`, and then give `state`."""

    kind: _Name
    args: tuple[Any, ...]
    state: Any = None


class _Parser:
    """A stack machine that knows the opcodes by which `pickle.dump` writes metadata."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []

    def value_of(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            act = _ACTS.get(opcode.name)
            if act is None:
                raise ValueError(f"it has the opcode {opcode.name}, which metadata does not need")
            act(self, copy.copy(_ARGUMENTS.get(opcode.name, argument)))
        (value,) = self.stack
        return value

    def marked(self) -> list[Any]:
        at = self.marks.pop()
        items = self.stack[at:]
        del self.stack[at:]
        return items

    def last(self, count: int) -> tuple[Any, ...]:
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        return items

    def name(self, _: Any) -> None:
        name = ".".join(self.last(2))
        if name not in _NAMES:
            raise ValueError(f"it names {name[:120]!r}, which metadata does not need")
        self.stack.append(_Name(name))

    def call(self, _: Any) -> None:
        kind, args = self.last(2)
        member = kind == "builtins.getattr" and args[0] == _LAYOUT
        if not isinstance(kind, _Name) or type(args) is not tuple or (kind == "builtins.getattr" and not member):
            raise ValueError(f"it calls {reprlib.repr(kind)}, which metadata does not need")
        self.stack.append(_Instance(kind, args))

    def build(self, _: Any) -> None:
        state = self.stack.pop()
        instance = self.stack[-1]
        if type(instance) is not _Instance or instance.state is not None:
            raise ValueError(f"it gives a state to {reprlib.repr(instance)}")
        instance.state = state

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError(f"it adds to {reprlib.repr(self.stack[-1])}, which is no list")
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        # The hash of another key, a tuple within tuples, could take more of the stack than there is.
        if type(self.stack[-1]) is not dict or not all(type(key) in (str, _Instance) for key in items[::2]):
            raise ValueError("it sets something other than items by their names")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))


_ARGUMENTS: Mapping[str, Any] = {
    "NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "EMPTY_LIST": [], "EMPTY_DICT": {},
    "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3,
}  # fmt: skip
_ACTS: Mapping[str, Callable[[_Parser, Any], Any]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda parser, _: None),
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE", *_ARGUMENTS),
        lambda parser, value: parser.stack.append(value),
    ),
    **dict.fromkeys(("TUPLE1", "TUPLE2", "TUPLE3"), lambda parser, count: parser.stack.append(parser.last(count))),
    "TUPLE": lambda parser, _: parser.stack.append(tuple(parser.marked())),
    "MARK": lambda parser, _: parser.marks.append(len(parser.stack)),
    "MEMOIZE": lambda parser, _: parser.memo.append(parser.stack[-1]),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda parser, at: parser.stack.append(parser.memo[at])),
    "STACK_GLOBAL": _Parser.name,
    **dict.fromkeys(("NEWOBJ", "REDUCE"), _Parser.call),
    "BUILD": _Parser.build,
    "APPEND": lambda parser, _: parser.extend([parser.stack.pop()]),
    "APPENDS": lambda parser, _: parser.extend(parser.marked()),
    "SETITEM": lambda parser, _: parser.update([*parser.last(2)]),
    "SETITEMS": lambda parser, _: parser.update(parser.marked()),
}


def _checked(value: Any, folder: Path) -> Metadata:
    fields = _fields(value, f"{_METADATA}.Metadata")
    entries: dict[str, Any] = fields["state_dict_metadata"]
    places = {_index(key): _place(info) for key, info in fields["storage_data"].items()}
    _refuse_short_shards(places, folder)
    tensors = {name: entry for name, entry in entries.items() if entry.kind == f"{_METADATA}.TensorStorageMetadata"}
    others = [name for name, entry in entries.items() if entry.kind == f"{_METADATA}.BytesStorageMetadata"]
    if len(tensors) + len(others) < len(entries):
        raise ValueError("it describes something other than tensors and bytes")
    parts = sum(len(_fields(entry)["chunks"]) for entry in tensors.values()) + len(others)
    if parts != len(places):  # also a bound for the work: a file may name one list of parts many times
        raise ValueError(f"it has {parts} parts, and places for {len(places)}")
    known: dict[str, Any] = {name: BytesStorageMetadata() for name in others if places[MetadataIndex(name)]}
    for name, entry in tensors.items():
        known[name] = tensor = _tensor(entry)
        for index, place in _parts(name, tensor, places):
            places[index] = place
    return Metadata(state_dict_metadata=known, storage_data=places)


def _fields(value: _Instance, kind: str = "") -> dict[str, Any]:
    fields: Any = value.state
    if (kind and value.kind != kind) or type(fields) is not dict:
        raise ValueError(f"it has {value.kind} where {kind or 'its fields'} should be")
    return dict(fields)


def _whole(*values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise ValueError(f"it has {reprlib.repr(values)} where sizes should be")
    return values


def _size(value: Any) -> torch.Size:
    if value.kind != "torch.Size":
        raise ValueError(f"it has {value.kind} where a size should be")
    return torch.Size(_whole(*(value.args[0] if value.args else ())))


def _index(value: Any) -> MetadataIndex:
    fields = _fields(value, f"{_METADATA}.MetadataIndex")
    offset = fields.get("offset")
    return MetadataIndex(fields["fqn"], None if offset is None else _size(offset))


def _place(value: Any) -> Place:
    fields = _fields(value, f"{_FILES}._StorageInfo")
    file: Any = fields["relative_path"]
    if not _SHARD.fullmatch(file):
        raise ValueError(f"it has the shard {reprlib.repr(file)}, which is not a name that torch gives to one")
    if fields.keys() != {"relative_path", "offset", "length"}:
        raise ValueError("its shards are compressed or encrypted, which those of fxamp are not")
    offset, length = _whole(fields["offset"], fields["length"])
    return Place(file, offset, length)


def _refuse_short_shards(places: Mapping[MetadataIndex, Place], folder: Path) -> None:
    taken, ends = Counter[str](), Counter[str]()
    for place in places.values():
        taken[place.file] += place.length
        ends[place.file] = max(ends[place.file], place.offset + place.length)
    for file, length in taken.items():
        path = folder / file
        size = size_of(path)
        if max(ends[file], length) > size:
            raise ValueError(f"the shard '{path}' is cut short, or of another checkpoint: it has {size} bytes")


def _tensor(entry: Any) -> TensorStorageMetadata:
    fields = _fields(entry)
    dtype = _DTYPES[fields["properties"].state[0]]
    chunks = [_fields(chunk, f"{_METADATA}.ChunkStorageMetadata") for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=_size(fields["size"]),
        chunks=[ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _parts(
    name: str, tensor: TensorStorageMetadata, places: Mapping[MetadataIndex, Place]
) -> Iterator[tuple[MetadataIndex, Place]]:
    """Yield the places of a tensor's parts with what has to be there; the parts fill the tensor."""
    dtype, size = tensor.properties.dtype, tensor.size
    for chunk in tensor.chunks:
        index = MetadataIndex(name, chunk.offsets)
        place = places[index]
        inside = all(o + n <= s for o, n, s in zip(chunk.offsets, chunk.sizes, size, strict=True))
        if not inside or math.prod(chunk.sizes) * dtype.itemsize > place.length:
            raise ValueError(
                f"a part of {reprlib.repr(name)} is outside of it, or larger than its place in the shard {place.file}"
            )
        yield index, Place(place.file, place.offset, place.length, tuple(chunk.sizes), dtype)
    if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(size):
        raise ValueError(f"its parts of {reprlib.repr(name)} do not fill it")
