"""What Inductor made of a graph: its kernels, the bytes that they move, what is saved for backward, and peak memory.

    before = recorded()
    torch.compile(model, options=recording())(x).sum().backward()
    sum((graph.counts for graph in recorded_since(before)), Counts())

A scheduler pass, which Inductor calls with what it has scheduled, reads each graph once its code is generated. What it
reads becomes one of Inductor's own counters. Inductor keeps these with the code in its caches, and counts them again
where it takes the code from there, so that the counts of a graph are known whether or not it was compiled in this
process. Names that are private to Inductor are in this file alone.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias

import torch
from torch._dynamo.utils import counters
from torch._inductor import custom_graph_pass, dependencies, ir, scheduler
from torch._inductor.virtualized import V

Kind: TypeAlias = Literal["forward", "backward", "inference"]

# Kernels of an op of a library that launches several: the backward of flash attention sums a product, computes all
# three gradients, and converts that of the queries. Fills of workspaces are not counted.
LAUNCHES = {"_scaled_dot_product_flash_attention_backward": 3, "_flash_attention_backward": 3}
# What a kernel that only casts consists of, in Inductor's loop bodies.
_CAST_OPS = {"ops", "load", "store", "to_dtype", "constant", "index_expr", "get_index", "output", "placeholder"}
_PREFIX = "fxamp counts "
STORED = "fxamp_stored"  # in `meta` of a node: what `Graph.stored` says of it


@dataclass(frozen=True)
class Counts:
    """What Inductor made of one graph or of several, which are added by `+`.

    Attributes:
        kernels: Kernels that run: those that Inductor generates, and those of libraries, such as matrix products.
        cast_kernels: How many of them change the dtype of what they read, and do nothing else.
        moved_bytes: Bytes that kernels load and store, each buffer once a kernel, by Inductor's own count.
        saved_bytes: Bytes that forward makes and keeps for backward.
        peak: The most bytes that are allocated at once, without inputs and parameters; of backward, what was saved for
            it included. Of several graphs it is the largest, since they run one after the other.
    """

    kernels: int = 0
    cast_kernels: int = 0
    moved_bytes: int = 0
    saved_bytes: int = 0
    peak: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Return the counts of both."""
        ours, theirs = asdict(self), asdict(other)
        return Counts(**{k: max(v, theirs[k]) if k == "peak" else v + theirs[k] for k, v in ours.items()})


KEYS = tuple(field.name for field in fields(Counts))


@dataclass(frozen=True)
class Graph:
    """One graph that Inductor has compiled.

    Attributes:
        kind: "forward" and "backward" of a graph that is differentiated, else "inference".
        counts: What Inductor made of it.
        inputs: How many bytes of its inputs `counts.peak` includes: those that it can free while it runs.
        stored: What its nodes say that they store, in order.
    """

    kind: Kind
    counts: Counts
    inputs: int = 0
    stored: tuple[Mapping[str, Any], ...] = ()


_Pass: Any = getattr(
    custom_graph_pass, "CustomSchedulerPass", object
)  # from torch 2.12 on; before, any callable may be


class _Recorder(_Pass):  # type: ignore[misc]
    """Changes nothing that is scheduled, and has each graph read when the code of its kernels is there."""

    def __init__(self) -> None:
        self.key = custom_graph_pass.get_hash_for_files((__file__,))

    def __call__(self, nodes: list[Any]) -> list[Any]:
        graph: Any = V.graph
        wrapper = graph.wrapper_code
        if getattr(wrapper, "launcher_fn_name", "call") == "call" and "generate" not in vars(wrapper):
            generate = wrapper.generate

            def read(*args: Any, **kwargs: Any) -> Any:
                code = generate(*args, **kwargs)
                counters["inductor"][_PREFIX + json.dumps(asdict(read_graph(graph, code[0].value)))] += 1
                return code

            wrapper.generate = read
        return nodes

    def uuid(self) -> Any:
        """Return what tells code that was compiled with these counts from any other in Inductor's caches."""
        return self.key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Recorder)

    def __hash__(self) -> int:
        return hash(_Recorder)


def recording() -> dict[str, Any]:
    """Return the options of `torch.compile` with which Inductor records what it makes of each graph."""
    return {"_post_fusion_custom_pass": _Recorder()}


def recorded() -> Counter[str]:
    """Return a mark for `recorded_since`."""
    return Counter({key: count for key, count in counters["inductor"].items() if key.startswith(_PREFIX)})


def recorded_since(mark: Counter[str]) -> list[Graph]:
    """Return the graphs that were compiled or taken from a cache, with the options of `recording`, since a mark."""
    return [_parse(key) for key in (recorded() - mark).elements()]


def _parse(key: str) -> Graph:
    data = json.loads(key.removeprefix(_PREFIX))
    return Graph(data["kind"], Counts(**data["counts"]), data["inputs"], tuple(data["stored"]))


def read_graph(graph: Any, code: str) -> Graph:
    """Read what Inductor made of a graph: a GraphLowering that has generated kernels, and the Python that runs them."""
    kernels = [node for node in graph.scheduler.nodes if _runs(node)]
    kind: Kind = "backward" if graph.is_backward else "inference" if graph.is_inference else "forward"
    memory = _Memory(graph, kind)
    memory.follow(code)
    saved = sum(map(memory.size, memory.inputs)) if kind == "backward" else 0
    counts = Counts(
        kernels=_launches(kernels, code),
        cast_kernels=sum(map(_only_casts, kernels)),
        moved_bytes=sum(map(_moved, graph.scheduler.nodes)),
        saved_bytes=saved,
        peak=memory.peak,
    )
    stored = (node.meta[STORED] for node in graph.module.graph.nodes if STORED in node.meta)
    return Graph(kind, counts, memory.start, tuple(stored))


def _runs(node: Any) -> bool:
    """Say whether something of the schedule runs: not what only names one of several results, or allocates."""
    if isinstance(node, scheduler.NopKernelSchedulerNode):
        return False
    return not (isinstance(node, scheduler.ExternKernelSchedulerNode) and isinstance(node.node, ir.MultiOutput))


def _launches(kernels: Sequence[Any], code: str) -> int:
    """Return how many kernels run; those of a list of tensors at once are divided when their code is generated."""
    lists = [node for node in kernels if isinstance(node, scheduler.ForeachKernelSchedulerNode)]
    single = sum(_of_library(node) for node in kernels) - len(lists)
    if not lists:
        return single
    generated = sum(not node.is_extern() for node in kernels) - len(lists)
    return single + len(re.findall(r"^\s+\w+\.run\(", code, re.M)) - generated


def _of_library(node: Any) -> int:
    if not node.is_extern():
        return 1
    op = getattr(node.node, "op_overload", None)
    return LAUNCHES.get(getattr(op, "_opname", ""), 1)


def _moved(node: Any) -> int:
    """Return the bytes that a kernel loads and stores.

    Of a kernel over a list of tensors, Inductor also counts what one tensor's part hands on in registers; and as read
    what a kernel only overwrites, after others have read it.
    """
    parts = node.snodes if isinstance(node, scheduler.ForeachKernelSchedulerNode) else [node]
    return sum(int(size) for part in parts for name, size in _accesses(part).items() if not _overwrites(part, name))


def _accesses(node: Any) -> dict[str, int]:
    found: dict[str, int] = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    return found


def _overwrites(node: Any, buffer: str) -> bool:
    """Say whether a node writes a buffer and loads nothing of it: it only has to run after those who wrote it."""
    if node.is_extern() or not any(buffer in output.get_mutations() for output in node.get_outputs()):
        return False
    adds = any(getattr(dep, "mode", None) == "atomic_add" for dep in node.read_writes.writes)
    # A load has an index; what else stands among the reads is what has to run before.
    return not adds and not any(
        isinstance(d, dependencies.MemoryDep) for d in node.read_writes.reads if d.name == buffer
    )


def _only_casts(node: Any) -> bool:
    if node.is_extern():
        return False
    bodies = [getattr(part, "_body", None) for part in node.get_nodes()]
    if any(body is None or not _ops(body) <= _CAST_OPS for body in bodies):
        return False
    loaded, stored = (
        {_dtype(name) for name in node.get_read_write_buffer_accesses(include_reads=reads, include_writes=not reads)}
        for reads in (True, False)
    )
    return bool(loaded) and loaded != stored


def _ops(body: Any) -> set[str]:
    blocks = [body.root_block, *body.subblocks.values()]
    targets = [node.target for block in blocks for node in block.graph.nodes]
    return {str(getattr(target, "__name__", target)).rpartition(".")[2] for target in targets}


def _dtype(buffer: str) -> torch.dtype:
    dtype: torch.dtype = V.graph.get_dtype(buffer)
    return dtype


class _Memory:
    """Follows what the Python that Inductor generated for a graph allocates and frees.

    Attributes:
        inputs: The names of inputs that were made for this graph alone, which it may free: what forward has saved.
        start: Bytes of these inputs, and of the gradients that backward gets.
        peak: The most bytes at once.
    """

    _LINES = (
        ("allocate", re.compile(r"(\w+) = empty_strided\w*\(")),
        ("reuse", re.compile(r"(\w+) = (\w+); del (\w+)\s*# reuse")),
        ("reuse", re.compile(r"(\w+) = reinterpret_tensor\((\w+),.*; del (\w+)\s*# reuse")),
        ("view", re.compile(r"(\w+) = reinterpret_tensor\((\w+),")),
        ("allocate", re.compile(r"(\w+) = \w+\[\d+\]$")),
        ("allocate", re.compile(r"(buf\w+) = (?:torch\.ops|aten|extern_kernels)")),
        ("delete", re.compile(r"del ([\w, ]+)$")),
    )

    def __init__(self, graph: Any, kind: Kind) -> None:
        self._sizes = {name: _nbytes(buffer) for name, buffer in graph.name_to_buffer.items()}
        given = {name: _nbytes(value) for name, value in graph.graph_inputs.items() if isinstance(value, ir.IRNode)}
        self._sizes.update(given)
        freed = [name for name in given if kind == "backward" and not name.startswith(("primals", "arg"))]
        self.inputs = [name for name in freed if not name.startswith("tangents")]
        self._root: dict[str, str] = {}
        self._names: Counter[str] = Counter()
        self._live = self.peak = 0
        for name in freed:
            self._allocate(name)
        self.start = self._live

    def size(self, name: str) -> int:
        """Return the bytes of a buffer."""
        return self._sizes.get(name, 0)

    def follow(self, code: str) -> None:
        """Read the function that runs the kernels, line by line."""
        body = code[code.index("def call(") :] if "def call(" in code else code
        for line in map(str.strip, body.splitlines()):
            found = next(((what, match) for what, of in self._LINES if (match := of.match(line))), None)
            if line.startswith("return ("):
                break
            if found is not None:
                self._follow(found[0], found[1].groups())

    def _follow(self, what: str, names: Sequence[str]) -> None:
        if what == "allocate":
            self._allocate(names[0])
        elif what == "delete":
            for name in names[0].replace(" ", "").split(","):
                self._delete(name)
        elif names[1] in self._root:
            self._name(names[0], self._root[names[1]])
            for name in names[2:]:
                self._delete(name)

    def _allocate(self, name: str) -> None:
        self._name(name, name)
        self._live += self.size(name)
        self.peak = max(self.peak, self._live)

    def _name(self, name: str, root: str) -> None:
        self._root[name] = root
        self._names[root] += 1

    def _delete(self, name: str) -> None:
        root = self._root.pop(name, None)
        if root is not None:
            self._names[root] -= 1
            self._live -= 0 if self._names[root] else self.size(root)


def _nbytes(buffer: Any) -> int:
    """Return the bytes of a buffer or an input; 0 for what is no tensor, or several."""
    layout = buffer.maybe_get_layout() if buffer.has_tensor_output() else None
    if layout is None:
        return 0
    reach = [(_hint(size) - 1) * _hint(stride) for size, stride in zip(layout.size, layout.stride, strict=True)]
    empty = any(_hint(size) == 0 for size in layout.size)
    return 0 if empty else (1 + sum(reach)) * int(layout.dtype.itemsize)


def _hint(size: Any) -> int:
    """Return a size, of a symbolic one that of the example."""
    sizes: Any = V.graph.sizevars
    return int(sizes.optimization_hint(size, fallback=1))
