"""Storage in 16 bits of what a later kernel reads, which is O2 of a compiled step; arithmetic stays FP32.

Before: mul = x * y;                                               ...; grad = tangent * mul
After:  mul = x * y; low = mul.to(bfloat16); stored = low.float(); ...; grad = tangent * stored

A kernel of Inductor computes in FP32 registers, so that a dtype costs and rounds only where a value is stored. What is
stored is known once the joint graph of forward and backward is cut in two: a first cut says what is saved, and kernels
of libraries, such as products, lie between those that Inductor generates. Readers in the kernel that computes a value
read it unrounded, and so do those of forward: the loss is that of O1.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, Node

from passes._torch import OpOverload, example_of
from passes.contract.policy import dtype_name

from ..measure.inductor import STORED

Part: TypeAlias = Literal["saved", "backward"]
PARTS: tuple[Part, ...] = ("saved", "backward")
LEAST = 4096  # elements: below, a kernel takes as long as its launch
_CAST = torch.ops.prims.convert_element_type.default
# What Inductor computes where it is read, beside pointwise ops and reductions.
_MOVES = frozenset(
    "_unsafe_view alias broadcast_in_dim clone expand full getitem iota permute reshape select slice squeeze unsqueeze "
    "view".split()
)
# What has a kernel of its own that Inductor generates: it can cast what it reads, and what it makes.
_GENERATED = frozenset("cat embedding index index_put scatter scatter_add".split())


@dataclass(frozen=True)
class AtRest:
    """Which values are stored low: what is "saved" for backward, and what kernels of "backward" hand on."""

    low: torch.dtype
    parts: tuple[Part, ...] = PARTS

    def __call__(self, graph: Graph, saved: Collection[str]) -> None:
        """Round what is stored in a joint graph, in place, of which a first cut saves nodes with these names."""
        for node, readers in _stored(graph, saved, self.parts).items():
            _store(graph, node, readers, self.low)


def _stored(graph: Graph, saved: Collection[str], parts: Sequence[Part]) -> dict[Node, list[Node]]:
    """Return FP32 values that are stored, with the nodes that read them from memory."""
    kernels, backward, statistics = _kernels(graph), _backward(graph), _statistics(graph)
    chosen: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if not _computes(node) or _elements(node) < LEAST or node in statistics or "output" in {u.op for u in node.users}:
            continue
        inside = node in backward
        kept = {name for name in saved if name == node.name}
        later = list[Node]()
        for user, reader, path in _readers(node):
            if not _reads_fp32(reader):
                continue
            if reader in backward and not inside:
                is_saved = node.name in kept or any(n.name in saved for n in path)
                if "saved" in parts and is_saved:
                    later.append(user)
            elif inside and "backward" in parts and kernels[reader] - _starts(reader) > kernels[node]:
                later.append(user)
        if later:
            chosen[node] = list(dict.fromkeys(later))
    return chosen


def _store(graph: Graph, node: Node, readers: Sequence[Node], low: torch.dtype) -> None:
    """Let readers of an FP32 value read what was stored of it in a low dtype."""
    cast = next((u for u in node.users if u.target is _CAST and u.args[1] == low), None)
    meta = {key: node.meta[key] for key in _PLACE if key in node.meta}
    if cast is None:
        cast = graph.call_function(_CAST, (node, low))
        cast.meta = {**meta, "val": node.meta["val"].to(low)}
    node.append(cast)  # before all readers
    cast.meta[STORED] = {"name": node.name, "module": _module(node), "line": _line(node), "dtype": dtype_name(low)}
    with graph.inserting_after(cast):
        stored = graph.call_function(_CAST, (cast, torch.float32))
    stored.meta = {**meta, "val": node.meta["val"].to(torch.float32)}
    for reader in readers:
        reader.replace_input_with(node, stored)


_PLACE = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "seq_nr", "partitioner_tag", "recompute", "ac_graph_id")


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", "")).partition(".")[0]


def _is_pointwise(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _is_reduction(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.reduction in node.target.tags


def _moves(node: Node) -> bool:
    return node.op == "call_function" and _name(node) in _MOVES


def _starts(node: Node) -> int:
    """Return 1 for what is not computed in a kernel with its operands, else 0."""
    fused = node.op != "call_function" or _is_pointwise(node) or _is_reduction(node) or _moves(node)
    return int(not fused)


def _computes(node: Node) -> bool:
    """Say whether Inductor generates the kernel that computes an FP32 value, which is not just another dtype."""
    value = node.meta.get("val")
    return (
        node.op == "call_function" and isinstance(value, Tensor) and value.dtype == torch.float32
        and node.target is not _CAST and (_is_pointwise(node) or _name(node) in _GENERATED)
    )  # fmt: skip


def _reads_fp32(reader: Node) -> bool:
    """Say whether a reader is in a generated kernel, and reads more than what is stored low for it already."""
    if reader.target is _CAST:
        return reader.args[1] == torch.float32
    return _is_pointwise(reader) or _is_reduction(reader) or _name(reader) in _GENERATED


def _readers(node: Node, path: tuple[Node, ...] = ()) -> Iterator[tuple[Node, Node, tuple[Node, ...]]]:
    """Yield the user of a node, what reads it, in the end, through views, and these views."""
    for user in node.users:
        if _moves(user):
            yield from ((user, reader, views) for _, reader, views in _readers(user, (*path, user)))
        elif user.op != "output":
            yield user, user, path


def _elements(node: Node) -> int:
    value = node.meta["val"]
    elements = 1
    for size in value.shape:
        elements *= example_of(size) or 0
    return elements


def _kernels(graph: Graph) -> dict[Node, int]:
    """Return how many kernels of libraries come one after the other before a node, or its own if it is one."""
    found = defaultdict[Node, int](int)
    for node in graph.nodes:
        found[node] = max((found[i] for i in node.all_input_nodes), default=0) + _starts(node)
    return found


def _backward(graph: Graph) -> set[Node]:
    """Return what depends on the gradients of outputs."""
    found = set[Node]()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and str(node.target).startswith("tangents")
        if tangent or any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def _statistics(graph: Graph) -> set[Node]:
    """Return what is computed from results of reductions alone, such as the variance of each row."""
    found = set[Node]()
    most = dict[Node, int]()
    for node in graph.nodes:
        if not isinstance(node.meta.get("val"), Tensor):
            continue
        of = max((most.get(i, 0) for i in node.all_input_nodes), default=0) if not _starts(node) else 0
        most[node] = max(of, _elements(node) if _is_reduction(node) else 0)
        if 0 < _elements(node) <= most[node]:
            found.add(node)
    return found


def _module(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path, _ = next(reversed(stack.values()), ("", None))
    return str(path)


def _line(node: Node) -> str:
    """Return the author's line that a node was traced from, as "net.py:12"."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace", "")).splitlines()]
    last = next((line for line in reversed(lines) if line.startswith("File ")), "")
    match = re.match(r'File "(.*)", line (\d+)', last)
    return f"{PurePath(match[1]).name}:{match[2]}" if match else ""
