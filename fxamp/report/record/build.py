"""Make the record of a converted model: its plan, joined with what its graphs cost."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn
from torch.fx import GraphModule, Node

from passes.contract.plan import Decision, Plan, installed
from passes.contract.policy import Policy
from passes.contract.reasons import DEVIATIONS, Code
from passes.graph.notes import is_inserted
from passes.graph.values import frames, own_frame
from passes.ops.rules import RULES
from passes.runtime.casts import again

from .colours import LOW
from .reads import dtype, named, origins, reads
from .record import RECORD_VERSION, TOTALS, Cast, NodeRecord, Read, Record, State, Totals
from .sizes import Size, SizeError, sizes_of

_NONE = Size()


@dataclass(frozen=True)
class Emitted:
    """One emitted graph.

    Attributes:
        first: its number in the plan; the graphs inside it, such as the body of a loop, follow.
        state: the state that it is for; "" if there is no other. A state that capture breaks has several graphs.
        module: the graph, with the example's shapes and dtypes in `meta["val"]` of its inputs.
        inputs: the user's names of its inputs; empty if its placeholders have them.
    """

    first: int
    state: str
    module: GraphModule
    inputs: Sequence[str]


def record_of(plan: Plan, graphs: Sequence[Emitted] = (), model: nn.Module | None = None) -> Record:
    """Return the record of a plan; without its graphs it has no sizes and no places of casts.

    Args:
        plan: decisions on all graphs.
        graphs: the graphs that carry them out.
        model: whose parameters are counted.
    """
    autocast = _autocast(plan.policy, model)
    parts = [_part(graph, plan, autocast) for graph in graphs]
    at = _Places(plan, parts)
    seen = set[Node]()
    nodes = tuple(_node(d, at.part(d), seen) for d in plan.decisions)
    return Record(
        version=RECORD_VERSION, policy=str(plan.policy), device=plan.policy.device or "cpu", capture=plan.capture,
        verified=plan.verified, torch=plan.torch_version, fxamp=installed() or "(not installed)",
        states=_states(plan, nodes, parts, at), nodes=nodes, notes=plan.notes, inserted_casts=plan.inserted_casts,
        parameters=sum(p.numel() for p in model.parameters()) if model is not None and parts else None,
    )  # fmt: skip


@dataclass(frozen=True)
class _Part:
    """One graph: the user's nodes by key, names and origins of values, and the costs of nodes, if known.

    There are three costs: of the graph as it is, without mixed precision, and under torch.autocast.
    """

    first: int
    state: str
    nodes: dict[str, Node]
    names: dict[Node, str]
    origins: dict[Node, tuple[Read, ...]]
    casts: tuple[Node, ...]  # every inserted cast, also those in bodies
    outputs: tuple[Node, ...]  # casts that the outputs read
    sizes: dict[Node, Size] | None
    fp32: dict[Node, Size] | None
    autocast: dict[Node, Size] | None


class _Places:
    """Where the decisions of a plan are carried out."""

    def __init__(self, plan: Plan, parts: Sequence[_Part]) -> None:
        self.parts = list(parts)
        self.named = [state.partition(": ") for state in plan.states]
        self.firsts = [p.first for p in parts] or [int(number) for number, _, _ in self.named] or [0]

    def number(self, d: Decision) -> int:
        """Return which of the graphs a decision is listed for."""
        return max(at for at, first in enumerate(self.firsts) if first <= d.graph)

    def part(self, d: Decision) -> _Part | None:
        return self.parts[self.number(d)] if self.parts else None

    def of(self, at: int, decisions: Sequence[Decision]) -> list[int]:
        """Return the places of the decisions that one graph carries out."""
        return [i for i, d in enumerate(decisions) if self.number(d) == at]

    def state(self, at: int) -> str:
        if self.parts:
            return self.parts[at].state
        return self.named[at][2] if self.named else ""


def _states(plan: Plan, nodes: Sequence[NodeRecord], parts: Sequence[_Part], at: _Places) -> tuple[State, ...]:
    """Return the states, in the order of their first graphs, each with the sums over its graphs."""
    found: dict[str, list[int]] = {}
    for number in range(len(at.firsts)):
        found.setdefault(at.state(number), []).append(number)
    seen = {c for p in parts for n in p.nodes.values() for c in n.all_input_nodes}
    out = []
    for name, numbers in found.items():
        places = [(number, place) for number in numbers for place in at.of(number, plan.decisions)]
        own = [parts[number] for number in numbers] if parts else []
        outputs = tuple(_cast(c, part) for part in own for c in part.outputs if c not in seen)
        totals = _totals([(nodes[place], own and parts[number]) for number, place in places], own)
        several = len(found) > 1
        if not own:
            totals = _as_saved(totals, plan, name if several else "")
        shown = tuple(place for _, place in places) if several else ()
        out.append(State(name if several else "", totals, shown, outputs))
    return tuple(out)


def _as_saved(totals: Totals, plan: Plan, state: str) -> Totals:
    """Return the totals that a plan without its graphs has saved."""
    saved = {key: plan.totals.get(f"{key} ({state})" if state else key) for key in TOTALS}
    kept: dict[str, Any] = {key: value for key, value in saved.items() if value is not None}
    whole = {} if state else {"casts": plan.casts}
    return msgspec.structs.replace(totals, **kept | whole)


def _part(graph: Emitted, plan: Plan, autocast: tuple[str, torch.dtype] | None) -> _Part:
    module = graph.module
    names = named(module.graph, graph.inputs)
    sizes = _sizes(module)
    fp32 = _sizes(module, casts=False) if sizes else None
    ambient = _sizes(module, casts=False, autocast=autocast) if sizes and autocast else None
    nodes = {name: node for node, name in names.items() if node.op.startswith("call")}
    outputs = tuple(filter(is_inserted, module.graph.output_node().all_input_nodes))
    inner = (m.graph for m in module.modules() if isinstance(m, GraphModule))
    casts = tuple(n for g in inner for n in g.nodes if is_inserted(n))
    given = origins(module.graph, names, {d.key for d in plan.decisions})
    return _Part(graph.first, graph.state, nodes, names, given, casts, outputs, sizes, fp32, ambient)


def _sizes(module: GraphModule, **how: Any) -> dict[Node, Size] | None:
    try:
        return sizes_of(module, **how)
    except SizeError:
        return None


def _autocast(policy: Policy, model: nn.Module | None) -> tuple[str, torch.dtype] | None:
    """Return the autocast to compare a model with; None if it is on another device or nothing is rounded."""
    if model is None or policy.dtype is None or policy.device is None or not policy.level.rounds:
        return None
    here = all(t.device.type == policy.device for t in (*model.parameters(), *model.buffers()))
    return (policy.device, policy.dtype) if here else None


def _node(d: Decision, part: _Part | None, seen: set[Node]) -> NodeRecord:
    node = part.nodes.get(d.key) if part is not None else None
    size = part.sizes.get(node, _NONE) if part is not None and part.sizes is not None and node is not None else None
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
        dtypes=size.dtypes if size else (), shapes=_shapes(node, size), bytes=size.bytes if size else None,
        flops=size.flops if size else None, saved_bytes=size.saved_bytes if size else None,
        casts=_casts(node, part, seen) if node is not None and part is not None else (),
        reads=reads(node, part.origins) if node is not None and part is not None else (),
    )  # fmt: skip


def _original(node: Node | None, part: _Part | None) -> str:
    """Return the dtype of a node's result without mixed precision, "" if it is unknown or there is none."""
    size = (part.fp32 or {}).get(node, _NONE) if node is not None and part is not None else _NONE
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


def _shapes(node: Node | None, size: Size | None) -> tuple[tuple[str, ...], ...]:
    """Return the shapes of a node's results, at the example's sizes if these are known."""
    if size is not None:
        return tuple(tuple(map(str, shape)) for shape in size.shapes)
    value = node.meta.get("val") if node is not None else None
    found = [value] if isinstance(value, torch.Tensor) else value if isinstance(value, (tuple, list)) else []
    return tuple(tuple(map(str, v.shape)) for v in found if isinstance(v, torch.Tensor))


def _relative(file: str) -> str:
    """Return a path below the working directory as one relative to it, any other as its last part."""
    here = os.getcwd().replace("\\", "/").rstrip("/") + "/"
    return file.removeprefix(here) if file.startswith(here) else file.rsplit("/", 1)[-1]


def _totals(run: Sequence[tuple[NodeRecord, Any]], graphs: Sequence[_Part]) -> Totals:
    """Sum over the nodes that a state runs, each with the graph that it is in."""
    nodes = [node for node, _ in run]
    low = Counter("low" if n.colour in LOW else n.colour for n in nodes)
    sized = bool(graphs) and all(g.sizes is not None for g in graphs)

    def total(field: str, sizes: str = "sizes", only: tuple[str, ...] = ()) -> int | None:
        if not graphs or any(getattr(g, sizes) is None for g in graphs):
            return None
        found = ((getattr(g, sizes), g.nodes.get(n.key)) for n, g in run if not only or n.colour in only)
        return sum(int(getattr(sizes[node], field)) for sizes, node in found if node in sizes)

    def share(field: str) -> float | None:
        whole, part = total(field), total(field, only=LOW)
        return round(100 * part / whole, 2) if whole and part is not None else None

    return Totals(
        nodes=len(nodes), low_ops=low["low"], fp32_ops=low["float32"],
        unknown_ops=sum(n.op not in RULES and n.reason_code in (Code.KEEP, Code.AS_AUTOCAST) for n in nodes),
        user_casts=sum(n.kind == "cast" for n in nodes), casts=sum(len(g.casts) for g in graphs) if graphs else None,
        cast_bytes=sum(_bytes(g.sizes or {}, n) for g in graphs for n in g.sizes or ()) if sized else None,
        bytes=total("bytes"), low_bytes=share("bytes"), flops=total("flops"), low_flops=share("flops"),
        saved_bytes=total("saved_bytes"), saved_bytes_fp32=total("saved_bytes", "fp32"),
        saved_bytes_autocast=total("saved_bytes", "autocast"),
        deviations=sum(n.reason_code in DEVIATIONS for n in nodes),
    )  # fmt: skip
