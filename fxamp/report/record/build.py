"""Make the record of a converted module: its plan, joined with what its graphs cost."""

from __future__ import annotations

import importlib.metadata
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes.contract.dtypes import dtype_name
from passes.contract.plan import Decision, Plan
from passes.contract.reasons import Code
from passes.graph.notes import is_inserted
from passes.graph.values import LOW_DTYPES, frames, own_frame
from passes.ops.rules import RULES
from passes.runtime.casts import again

from ...module.module import ConvertedModule
from .reads import dtype, named, origins, reads
from .record import RECORD_VERSION, Cast, NodeRecord, Read, Record, Totals
from .sizes import Size, SizeError, sizes_of

_LOW = tuple(map(dtype_name, LOW_DTYPES))
_NONE = Size()


def record_of(given: Plan | ConvertedModule) -> Record:
    """Return the record of a converted module; or of a plan, without sizes and the places of casts."""
    plan = given if isinstance(given, Plan) else given.plan
    parts = _parts(given) if isinstance(given, ConvertedModule) else {}
    sized = bool(parts) and all(part.sizes is not None for part in parts.values())
    seen = set[Node]()
    decided = [(d, parts.get(d.graph, _Part())) for d in plan.decisions]
    nodes = [_node(d, part, seen) for d, part in decided]
    saved = [_saved(decided, name) for name in ("fp32", "autocast")]
    cast_bytes = sum(_bytes(part.sizes or {}, node) for part in parts.values() for node in part.sizes or ())
    return Record(
        version=RECORD_VERSION, policy=str(plan.policy), device=plan.policy.device or "cpu", capture=plan.capture,
        verified=plan.verified, torch=plan.torch_version, fxamp=_version(), states=plan.states,
        parameters=sum(p.numel() for p in given.parameters()) if isinstance(given, ConvertedModule) else None,
        totals=_totals(nodes, plan, cast_bytes, sized, saved), nodes=tuple(nodes), notes=plan.notes,
        output_casts=tuple(_cast(c, part) for part in parts.values() for c in part.outputs if c not in seen),
    )  # fmt: skip


@dataclass(frozen=True)
class _Part:
    """One graph: the user's nodes by key, names and origins of values, and the costs of nodes, if known.

    There are three costs: of the graph as it is, without mixed precision, and under torch.autocast.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    names: dict[Node, str] = field(default_factory=dict)
    origins: dict[Node, tuple[Read, ...]] = field(default_factory=dict)
    sizes: dict[Node, Size] | None = None
    fp32: dict[Node, Size] | None = None
    autocast: dict[Node, Size] | None = None
    outputs: tuple[Node, ...] = ()  # casts that the outputs read


def _parts(module: ConvertedModule) -> dict[int, _Part]:
    """Return every graph of the plan, by its number, except bodies of other graphs."""
    firsts = [int(state.partition(":")[0]) for state in module.plan.states] or [0]
    decided = {d.key for d in module.plan.decisions}
    parts: dict[int, _Part] = {}
    for at, first in enumerate(firsts):
        part = module.only(at) if len(firsts) > 1 else module
        call = part.variants[0].call_spec
        names = named(part.graph, [leaf.name for leaf in call.leaves if leaf.tensor])
        sizes = _sizes(part)
        fp32 = _sizes(part, casts=False) if sizes else None
        autocast = _sizes(part, casts=False, autocast=_autocast(module)) if sizes and _autocast(module) else None
        nodes = {name: node for node, name in names.items() if node.op.startswith("call")}
        outputs = tuple(filter(is_inserted, part.graph.output_node().all_input_nodes))
        parts[first] = _Part(nodes, names, origins(part.graph, names, decided), sizes, fp32, autocast, outputs)
    return parts


def _sizes(module: GraphModule, **how: Any) -> dict[Node, Size] | None:
    try:
        return sizes_of(module, **how)
    except SizeError:
        return None


def _autocast(module: ConvertedModule) -> tuple[str, torch.dtype] | None:
    """Return the autocast to compare a module with; None if the model is on another device or nothing is rounded."""
    policy = module.plan.policy
    if policy.dtype is None or policy.device is None or not policy.level.rounds:
        return None
    here = all(t.device.type == policy.device for t in (*module.parameters(), *module.buffers()))
    return (policy.device, policy.dtype) if here else None


def _node(d: Decision, part: _Part, seen: set[Node]) -> NodeRecord:
    node, sizes = part.nodes.get(d.key), part.sizes
    size = sizes.get(node, _NONE) if sizes is not None and node is not None else None
    frame = own_frame(node) if node is not None else None
    file, line, code = frame or ("", 0, "")
    if frame is None and d.source:
        file, _, rest = d.source.partition(":")
        number, _, code = rest.partition(": ")
        line = int(number) if number.isdecimal() else 0
    inner = frames(node)[-1] if node is not None and frames(node) else None
    torch_source = f"{inner[0].rsplit('/', 1)[-1]}:{inner[1]}" if inner is not None and inner != frame else ""
    return NodeRecord(
        key=d.key, graph=d.graph, op=d.op, module=d.module_path, file=_relative(file), line=line, code=code,
        torch_source=torch_source, colour=d.colour, autocast=d.autocast_dtype, original=_original(node, part),
        kind=d.kind, reason_code=d.code, reason=d.reason.removeprefix(f"{d.code}:").strip(), causes=d.causes,
        dtypes=size.dtypes if size else (), shapes=_shapes(node), bytes=size.bytes if size else None,
        flops=size.flops if size else None, saved_bytes=size.saved_bytes if size else None,
        casts=_casts(node, part, seen) if node is not None else (),
        reads=reads(node, part.origins) if node is not None else (),
    )  # fmt: skip


def _original(node: Node | None, part: _Part) -> str:
    """Return the dtype of a node's result without mixed precision, "" if it is unknown or there is none."""
    size = (part.fp32 or {}).get(node, _NONE) if node is not None else _NONE
    return size.dtypes[0] if size.dtypes else ""


def _casts(node: Node, part: _Part, seen: set[Node]) -> tuple[Cast, ...]:
    """Return the casts in front of a node, each at the first node that reads it."""
    out = []
    for cast in node.all_input_nodes:
        if not is_inserted(cast) or cast in seen:
            continue
        seen.add(cast)
        out.append(_cast(cast, part))
    return tuple(out)


def _cast(cast: Node, part: _Part) -> Cast:
    value = cast.all_input_nodes[0]
    return Cast(
        operand=part.names.get(value, value.name), before=dtype(value), after=dtype(cast),
        bytes=_bytes(part.sizes, cast) if part.sizes is not None else None, shared=len(cast.users),
    )  # fmt: skip


def _bytes(sizes: dict[Node, Size], node: Node) -> int:
    """Return the bytes that an inserted cast reads and writes; 0 for other nodes and for casts that copy nothing."""
    if not is_inserted(node) or node.target is again or dtype(node) == dtype(node.all_input_nodes[0]):
        return 0
    return sizes[node].read_bytes + sizes[node].bytes


def _shapes(node: Node | None) -> tuple[tuple[str, ...], ...]:
    value = node.meta.get("val") if node is not None else None
    found = [value] if isinstance(value, torch.Tensor) else value if isinstance(value, (tuple, list)) else []
    return tuple(tuple(map(str, v.shape)) for v in found if isinstance(v, torch.Tensor))


def _relative(file: str) -> str:
    """Return a path below the working directory as one relative to it, any other as its last part."""
    here = os.getcwd().replace("\\", "/").rstrip("/") + "/"
    return file.removeprefix(here) if file.startswith(here) else file.rsplit("/", 1)[-1]


def _saved(decided: Iterable[tuple[Decision, _Part]], variant: str) -> int | None:
    """Return the bytes that nodes keep for backward without mixed precision, or under autocast."""
    total = 0
    for decision, part in decided:
        sizes: dict[Node, Size] | None = getattr(part, variant)
        if sizes is None:
            return None
        node = part.nodes.get(decision.key)
        total += sizes[node].saved_bytes if node in sizes else 0
    return total


def _totals(
    nodes: Sequence[NodeRecord], plan: Plan, cast_bytes: int, sized: bool, saved: Sequence[int | None]
) -> Totals:
    colours = Counter("low" if n.colour in _LOW else n.colour for n in nodes)

    def total(field: str, low: bool = False) -> int:
        return sum(getattr(n, field) or 0 for n in nodes if not low or n.colour in _LOW)

    def share(field: str) -> float | None:
        return round(100 * total(field, low=True) / total(field), 2) if sized and total(field) else None

    return Totals(
        nodes=len(nodes), low_ops=colours["low"], fp32_ops=colours["float32"],
        unknown_ops=sum(n.op not in RULES and n.reason_code in (Code.KEEP, Code.AS_AUTOCAST) for n in nodes),
        user_casts=sum(n.kind == "cast" for n in nodes), casts=plan.casts,
        cast_bytes=cast_bytes if sized else None,
        bytes=total("bytes") if sized else None, low_bytes=share("bytes"),
        flops=total("flops") if sized else None, low_flops=share("flops"),
        saved_bytes=total("saved_bytes") if sized else None, saved_bytes_fp32=saved[0], saved_bytes_autocast=saved[1],
        deviations=len(plan.deviations),
    )  # fmt: skip


def _version() -> str:
    try:
        return importlib.metadata.version("fxamp")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
