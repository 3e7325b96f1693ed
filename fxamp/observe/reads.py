"""Which storages a program reads: those of the operands of its ops, views aside."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from passes._torch import pytree

from .._torch import TorchDispatchMode, storage_id


class StorageReads(TorchDispatchMode):
    """Notes, in `storages`, the ids of the storages that ops inside read; an op that only makes a view reads none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op."""
        outputs = func(*args, **(kwargs or {}))
        read = {storage_id(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if not read.issuperset(storage_id(t) for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)):
            self.storages |= read
        return outputs
