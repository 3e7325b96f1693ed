"""Make the record of a converted module: its plan, joined with what its graphs cost."""

from __future__ import annotations

import importlib.metadata
import os
from collections import Counter
from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from passes.insert_casts import is_inserted
from passes.plan import Decision, Plan
from passes.rules import RULES
from passes.values import LOW, frames, keys, own_frame

from ..module import ConvertedModule
from .record import RECORD_VERSION, Cast, NodeRecord, Record, Totals
from .sizes import Size, SizeError, sizes_of

_LOW = tuple(str(dtype).removeprefix("torch.") for dtype in LOW)
_NONE = Size()


def record_of(given: Plan | ConvertedModule) -> Record:
    """Return the record of a converted module, or of a plan, which says nothing of sizes and casts."""
    plan = given if isinstance(given, Plan) else given.plan
    parts = _parts(given) if isinstance(given, ConvertedModule) else {}
    sized = bool(parts) and all(sizes is not None for _, sizes in parts.values())
    nodes, seen = [], set[Node]()
    for d in plan.decisions:
        graph, sizes = parts.get(d.graph, ({}, None))
        nodes.append(_node(d, graph.get(d.key), sizes, seen))
    cast_bytes = sum(_bytes(sizes or {}, node) for graph, sizes in parts.values() for node in sizes or ())
    return Record(
        version=RECORD_VERSION, policy=str(plan.policy), device=plan.policy.device or "cpu", capture=plan.capture,
        verified=plan.verified, torch=plan.torch_version, fxamp=_version(), states=plan.states,
        parameters=sum(p.numel() for p in given.parameters()) if isinstance(given, ConvertedModule) else None,
        totals=_totals(nodes, plan, cast_bytes, sized), nodes=tuple(nodes), notes=plan.notes,
    )  # fmt: skip


Part = tuple[dict[str, Node], "dict[Node, Size] | None"]


def _parts(module: ConvertedModule) -> dict[int, Part]:
    """Return the nodes by key and their sizes for every graph of the plan that is no body of another."""
    firsts = [int(state.partition(":")[0]) for state in module.plan.states] or [0]
    parts: dict[int, Part] = {}
    for at, first in enumerate(firsts):
        part: GraphModule = module.only(at) if len(firsts) > 1 else module
        try:
            sizes = sizes_of(part)
        except SizeError:
            sizes = None
        parts[first] = (_by_key(part.graph), sizes)
    return parts


def _by_key(graph: Graph) -> dict[str, Node]:
    """Return the author's nodes by the keys that they had before anything was inserted."""
    return {key: node for node, key in keys(n for n in graph.nodes if not is_inserted(n)).items()}


def _node(d: Decision, node: Node | None, sizes: dict[Node, Size] | None, seen: set[Node]) -> NodeRecord:
    size = sizes.get(node, _NONE) if sizes is not None and node is not None else None
    frame = own_frame(node) if node is not None else None
    file, line, code = frame or ("", 0, "")
    if frame is None and d.source:
        file, _, rest = d.source.partition(":")
        number, _, code = rest.partition(": ")
        line = int(number) if number.isdecimal() else 0
    inner = frames(node)[-1] if node is not None and frames(node) else None
    torch_source = f"{inner[0].rsplit('/', 1)[-1]}:{inner[1]}" if inner is not None and inner != frame else ""
    casts = _casts(node, sizes, seen) if node is not None else ()
    return NodeRecord(
        key=d.key, graph=d.graph, op=d.op, module=d.module_path, file=_relative(file), line=line, code=code,
        torch_source=torch_source, colour=d.colour, autocast=d.autocast_dtype, kind=d.kind, reason_code=d.code,
        reason=d.reason.removeprefix(f"{d.code}:").strip(), causes=d.causes,
        dtypes=size.dtypes if size else (), shapes=_shapes(node), bytes=size.bytes if size else None,
        flops=size.flops if size else None, saved_bytes=size.saved_bytes if size else None, casts=casts,
    )  # fmt: skip


def _casts(node: Node, sizes: dict[Node, Size] | None, seen: set[Node]) -> tuple[Cast, ...]:
    """Return the casts in front of a node, each at the first node that reads it."""
    out = []
    for cast in node.all_input_nodes:
        if not is_inserted(cast) or cast in seen:
            continue
        seen.add(cast)
        value = cast.all_input_nodes[0]
        out.append(Cast(
            operand=str(value.target) if value.op == "get_attr" else value.name,
            before=_dtype(value), after=_dtype(cast),
            bytes=_bytes(sizes, cast) if sizes is not None else None, shared=len(cast.users),
        ))  # fmt: skip
    return tuple(out)


def _bytes(sizes: dict[Node, Size], node: Node) -> int:
    """Return what an inserted cast reads and writes; 0 for any other node, and for one that changes no dtype."""
    if not is_inserted(node) or _dtype(node) == _dtype(node.all_input_nodes[0]):
        return 0
    return sizes[node].read_bytes + sizes[node].bytes


def _dtype(node: Node) -> str:
    value = node.meta.get("val")
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "unknown"


def _shapes(node: Node | None) -> tuple[tuple[str, ...], ...]:
    value = node.meta.get("val") if node is not None else None
    found = [value] if isinstance(value, torch.Tensor) else value if isinstance(value, (tuple, list)) else []
    return tuple(tuple(map(str, v.shape)) for v in found if isinstance(v, torch.Tensor))


def _relative(file: str) -> str:
    """Return a path below the working directory as one relative to it, any other as its last part."""
    here = os.getcwd().replace("\\", "/").rstrip("/") + "/"
    return file.removeprefix(here) if file.startswith(here) else file.rsplit("/", 1)[-1]


def _totals(nodes: Sequence[NodeRecord], plan: Plan, cast_bytes: int, sized: bool) -> Totals:
    colours = Counter("low" if n.colour in _LOW else n.colour for n in nodes)

    def total(field: str, low: bool = False) -> int:
        return sum(getattr(n, field) or 0 for n in nodes if not low or n.colour in _LOW)

    def share(field: str) -> float | None:
        return round(100 * total(field, low=True) / total(field), 2) if sized and total(field) else None

    return Totals(
        nodes=len(nodes), low_ops=colours["low"], fp32_ops=colours["float32"],
        unknown_ops=sum(n.op not in RULES and n.kind == "keep" for n in nodes),
        user_casts=sum(n.kind == "cast" for n in nodes), casts=plan.casts,
        cast_bytes=cast_bytes if sized else None,
        bytes=total("bytes") if sized else None, low_bytes=share("bytes"),
        flops=total("flops") if sized else None, low_flops=share("flops"),
        saved_bytes=total("saved_bytes") if sized else None, deviations=len(plan.deviations),
    )  # fmt: skip


def _version() -> str:
    try:
        return importlib.metadata.version("fxamp")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"

