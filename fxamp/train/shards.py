"""The shards of a checkpoint, which ranks read together: tensors and plain values, as `.metadata` places them."""

from __future__ import annotations

import io
import itertools
import os
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from .files import naming, weights
from .metadata import Place, metadata_in


class Shards(FileSystemReader):
    """Reads a checkpoint for `torch.distributed.checkpoint.load`, whose own reader unpickles `.metadata`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        self.folder = Path(folder)
        with naming(self.folder / ".metadata"):
            self.metadata = metadata_in(self.folder / ".metadata")
        self.storage_data: dict[MetadataIndex, Place] = self.metadata.storage_data

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what was read already."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors into those of a plan; other values are read by `course` alone."""
        places = [(self.storage_data[item.storage_index], item) for item in plan.items]
        places.sort(key=lambda pair: (pair[0].file, pair[0].offset))
        for name, items in itertools.groupby(places, key=lambda pair: pair[0].file):
            path = self.folder / name
            with naming(path), path.open("rb") as file:
                for place, item in items:
                    part = _tensor(file, place)
                    wanted = zip(item.storage_offsets, item.lengths, strict=True)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part[tuple(slice(offset, offset + length) for offset, length in wanted)])
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def course(self) -> dict[str, Any]:
        """Return what the checkpoint holds besides tensors."""
        place = self.storage_data[MetadataIndex("course")]
        path = self.folder / place.file
        with naming(path), path.open("rb") as file:
            found = weights(_slice(file, place))
            if type(found) is not tuple or len(found) != 1 or type(found[0]) is not dict:
                raise ValueError("it does not hold what fxamp.save_checkpoint writes")
            return found[0]


def _tensor(file: IO[bytes], place: Place) -> Tensor:
    found: Tensor = weights(_slice(file, place))
    plain = type(found) is Tensor and found.layout == torch.strided and found.device.type == "cpu"
    if not plain or (tuple(found.shape), found.dtype) != (place.shape, place.dtype):
        raise ValueError(f"a tensor of {place.dtype} with shape {place.shape} should be at byte {place.offset}")
    return found.detach()


def _slice(file: IO[bytes], place: Place) -> IO[bytes]:
    file.seek(place.offset)
    return io.BytesIO(file.read(place.length))
