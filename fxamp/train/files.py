"""The files of a checkpoint, which may come from anybody: to read them runs nothing that is in them."""

from __future__ import annotations

import contextlib
import io
import os
import pickletools
import re
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from passes.contract.errors import FxampError, PolicyError

from .._torch import ArchiveReader
from ..errors import in_short

_SHOWN = 120  # characters of a name


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file or folder that is read in an error: PolicyError for what is in it, OSError if it is not there."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        # What a hostile file has in place of a list or a number raises any error.
        said = str(error) if isinstance(error, (FxampError, ValueError)) else in_short(error)
        raise PolicyError(f"'{os.fspath(path)}' cannot be loaded: {said}") from error


def size_of(path: Path) -> int:
    """Return the number of bytes of a file; ValueError for a pipe or a device, which may have no end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"'{path}' is not a file")
    return found.st_size


def weights_in(path: str | os.PathLike[str], *, sharded: bool) -> Any:
    """Return what `torch.save` wrote to a file, of tensors and plain values; PolicyError if it holds anything else."""
    with naming(path):
        size_of(Path(path))
        with open(path, "rb") as file:
            return weights(file, sharded=sharded)


def weights(file: IO[bytes], *, sharded: bool = False) -> Any:
    """Return what `torch.save` wrote, of tensors and plain values; ValueError: there is something else."""
    try:
        _refuse_growth(file)
        # Torch allows the classes of DTensors by itself, and one of them starts a process group when a file calls it.
        distributed = "" if sharded else _distributed_name(file)
        # Said here, it holds also where the environment asks torch for loads that run code.
        found = None if distributed else torch.load(file, map_location="cpu", weights_only=True, mmap=False)
    except Exception as error:
        culprit = re.search(r"GLOBAL (\S+)", str(error))  # torch's own message advises to load it all the same
        raise ValueError(
            f"it names {culprit[1][:_SHOWN]!r}, and may hold tensors and plain values alone. Where you trust a "
            "class, torch.serialization.add_safe_globals([...]) allows it"
            if culprit
            else "it is damaged, or not what torch.save writes of tensors and plain values"
        ) from error
    if distributed:
        raise ValueError(f"it names {distributed[:_SHOWN]!r}, which only a state of sharded parameters may hold")
    return found


def refuse_objects(value: Any) -> None:
    """Raise PolicyError for a value that `weights` would not read again."""
    file = io.BytesIO()
    torch.save(value, file)
    try:
        weights(file)
    except ValueError as error:
        raise PolicyError(f"this state could not be loaded again: {error}") from error


def _refuse_growth(file: IO[bytes]) -> None:
    """Raise ValueError for an archive that takes more memory than it has bytes; `torch.save` compresses nothing."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    if any(e.compress_type != zipfile.ZIP_STORED for e in entries) or sum(e.file_size for e in entries) > size:
        raise ValueError("the archive is compressed")


def _distributed_name(file: IO[bytes]) -> str:
    opcodes = pickletools.genops(ArchiveReader(file).get_record("data.pkl"))
    file.seek(0)
    names = (str(argument).replace(" ", ".") for opcode, argument, _ in opcodes if opcode.name == "GLOBAL")
    return next((name for name in names if name.startswith("torch.distributed")), "")
