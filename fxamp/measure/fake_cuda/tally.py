"""What a step runs on the GPU that is not there: compiled graphs, ops outside of them, and the memory of both.

Tensors are fake, so that nothing is computed; but they are made and freed as they would be. What is in memory when a
graph runs is thus observed, whoever holds it: gradients, what other graphs have saved, an output that a result keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from passes._torch import pytree

from ...observe.watch import casts_in
from ..inductor import Counts, Graph
from .breakdown import Breakdown

# torch's kernels over lists of tensors: elements of a chunk, and chunks and tensors of a launch, by number of lists.
_CHUNK, _CHUNKS = 65536, 320
_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_NOTHING: Any = MappingProxyType({})


class FakeGpu(FakeTensorMode):
    """Makes tensors fake, and counts what runs on the GPU outside of compiled graphs."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._inside = self._in_graph = False
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._base = 0
        self._by_kind: dict[str, Counts] = {}
        self.begin()

    def begin(self) -> None:
        """Count from here on; what is in memory now counts as held between steps."""
        self._base = self._live()
        self._peak = 0
        self._by_kind = {"forward": Counts(), "backward": Counts(), "inference": Counts(), "outside": Counts()}

    def breakdown(self) -> Breakdown:
        """Return what was counted."""
        return Breakdown(**self._by_kind, peak=self._peak)

    def run(self, graph: Graph, results: Callable[[], Any]) -> Any:
        """Count a compiled graph, whose memory is known, and return its results."""
        self._by_kind[graph.kind] += graph.counts
        self._peak = max(self._peak, self._live() - self._base - graph.inputs + graph.counts.peak)
        self._in_graph = True
        try:
            return results()
        finally:
            self._in_graph = False

    def __torch_dispatch__(self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = _NOTHING) -> Any:
        """Run an op on fake tensors, and count it if it is not a part of another op, nor traced."""
        if self._inside or TracingContext.try_get() is not None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._inside = True
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._inside = False
        made = list(_on_gpu(out))
        for tensor in made:
            storage = tensor.untyped_storage()
            self._storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        if not self._in_graph:
            self._count(func, args, kwargs, out, made)
            self._peak = max(self._peak, self._live() - self._base)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, made: list[Tensor]) -> None:
        name = func._opname
        copies = name in ("copy_", "_foreach_copy_")  # into what they do not read
        read = list(_on_gpu((args[1:] if copies else args, kwargs)))
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if views or func.namespace != "aten" or not (read or made) or "empty" in name:
            return
        lists = [value for value in args if isinstance(value, (list, tuple)) and any(True for _ in _on_gpu(value))]
        kernels = sum(_launches(lists)) if lists and name.startswith(("_foreach", "_fused")) else 1
        written = _written(func, args, made)
        self._by_kind["outside"] += Counts(
            kernels=kernels,
            cast_kernels=kernels if casts_in(func, args, out) else 0,
            moved_bytes=sum(t.nbytes for t in {id(t): t for t in read}.values()) + sum(t.nbytes for t in written),
        )

    def _live(self) -> int:
        """Return the bytes that are in memory, of what was made since this mode was."""
        self._storages = {key: found for key, found in self._storages.items() if not found[0].expired()}
        return sum(size for _, size in self._storages.values())


def _on_gpu(value: Any) -> Iterator[Tensor]:
    return (t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and t.device.type == "cuda")


def _written(func: Any, args: tuple[Any, ...], made: list[Tensor]) -> list[Tensor]:
    """Return what an op writes: what it returns, or its arguments; a fused optimizer only reads gradients."""
    places = [
        index for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and index < len(args)
        and not (func._opname.startswith("_fused") and argument.name == "grads")
    ]  # fmt: skip
    changed = [tensor for place in places for tensor in _on_gpu(args[place])]
    return changed or made


def _launches(lists: Sequence[Sequence[Tensor]]) -> Iterator[int]:
    """Yield 1 for each launch of a kernel over lists of tensors, as torch's `multi_tensor_apply` divides them."""
    most = _TENSORS[min(len([each for each in lists if len(each) == len(lists[0])]), max(_TENSORS))]
    tensors = chunks = 0
    for tensor in lists[0]:
        tensors += 1
        for chunk in reversed(range(-(-tensor.numel() // _CHUNK))):
            chunks += 1
            if chunks == _CHUNKS or (tensors == most and not chunk):
                yield 1
                tensors, chunks = int(chunk > 0), 0
    if chunks:
        yield 1
