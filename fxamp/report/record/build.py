"""Make the record of a converted model: its plan, joined with what its graphs cost.

What a node reads is told as in the graph before conversion: linear(to_dtype(x), to_dtype(weight)) reads x and weight,
each by way of a cast.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from passes.contract.plan import Decision, Plan, installed
from passes.contract.policy import Policy, dtype_name
from passes.contract.reasons import DEVIATIONS, Code
from passes.graph.notes import is_inserted, note_of
from passes.graph.values import frames, node_names, own_frame
from passes.ops.rules import RULES
from passes.runtime.casts import again

from .record import LOW, RECORD_VERSION, TOTALS, Cast, NodeRecord, Read, Record, State, Totals
from .sizes import Size, sizes_of

_NONE = Size()
Sizes = Mapping[Node, Size]


@dataclass(frozen=True)
class Emitted:
    """One emitted graph, of a state as the record has it; a state that capture breaks has several.

    Attributes:
        first: its number in the plan; the graphs inside it, such as the body of a loop, follow.
        state: the name of its state.
        module: the graph, with the example's shapes and dtypes in `meta["val"]` of its inputs.
        compiler: the compiler behind it; "" if it runs as it is.
        kept: bytes that the compiled graph kept for backward when it ran; None if that was not seen.
    """

    first: int
    state: str
    module: GraphModule
    compiler: str = ""
    kept: int | None = None


def record_of(plan: Plan, graphs: Sequence[Emitted] = (), model: nn.Module | None = None) -> Record:
    """Return the record of a plan, whose model is given for its parameters.

    Without the graphs that carry the plan out it has no sizes and no places of casts.
    """
    decided, autocast = {d.key for d in plan.decisions}, _autocast(plan.policy, model)
    parts = [_Part(graph, decided, autocast) for graph in graphs]
    named = [state.partition(": ") for state in plan.states]
    starts = [(g.first, g.state) for g in graphs] or [(int(number), name) for number, _, name in named] or [(0, "")]
    owner = [bisect_right(starts, d.graph, key=lambda start: start[0]) - 1 for d in plan.decisions]
    seen = set[Node]()
    nodes = tuple(_node(d, parts[at] if parts else None, seen) for d, at in zip(plan.decisions, owner, strict=True))
    return Record(
        version=RECORD_VERSION, policy=str(plan.policy), device=plan.policy.device or "cpu", capture=plan.capture,
        verified=plan.verified, torch=plan.torch_version, fxamp=installed() or "(not installed)",
        states=_states(plan, nodes, [name for _, name in starts], owner, parts), nodes=nodes,
        notes=(*plan.notes, *_handed_out(parts)),
        inserted_casts=plan.inserted_casts,
        parameters=sum(p.numel() for p in model.parameters()) if model is not None and parts else None,
    )  # fmt: skip


def _handed_out(parts: Sequence[_Part]) -> list[str]:
    """Say how many bytes the casts of outputs that are handed out move, where a call moves a megabyte or more so."""
    sizes = [sum(_cast(cast, part).bytes or 0 for cast in part.outputs) for part in parts]
    if max(sizes, default=0) < 10**6:
        return []
    return [
        f"casts of outputs, which are handed out in the dtypes of the model itself, move up to {max(sizes) / 1e6:.1f} "
        "MB in a call: for large logits in a loop of your own, output_dtype='autocast' hands them out in 16 bits"
    ]


class _Part:
    """One graph: the user's nodes by key, names and origins of values, and the costs of nodes, None if unknown.

    There are three costs: of the graph as it is, without mixed precision, and under torch.autocast.
    """

    def __init__(self, emitted: Emitted, decided: Collection[str], autocast: tuple[str, torch.dtype] | None) -> None:
        self.emitted, module = emitted, emitted.module
        self.names = node_names(module.graph)
        self.nodes = {name: node for node, name in self.names.items() if node.op.startswith("call")}
        self.decided = [node for name, node in self.nodes.items() if name in decided]
        self.origins = _origins(module.graph, self.names, decided)
        self.outputs = tuple(filter(is_inserted, module.graph.output_node().all_input_nodes))
        inner = (m.graph for m in module.modules() if isinstance(m, GraphModule))
        self.casts = sum(is_inserted(n) for graph in inner for n in graph.nodes)  # also those in bodies
        self.sizes = sizes_of(module)
        self.fp32 = sizes_of(module, casts=False) if self.sizes else None
        self.autocast = sizes_of(module, casts=False, autocast=autocast) if self.sizes and autocast else None


def _autocast(policy: Policy, model: nn.Module | None) -> tuple[str, torch.dtype] | None:
    """Return the autocast to compare a model with; None if it is on another device or nothing is rounded."""
    if model is None or policy.dtype is None or policy.device is None or not policy.level.rounds:
        return None
    here = all(t.device.type == policy.device for t in (*model.parameters(), *model.buffers()))
    return (policy.device, policy.dtype) if here else None


def _states(
    plan: Plan, nodes: Sequence[NodeRecord], names: Sequence[str], owner: Sequence[int], parts: Sequence[_Part]
) -> tuple[State, ...]:
    """Return the states, in the order of their first graphs, each with the sums over its graphs.

    `names` has the state of each graph, `owner` the graph of each node; there are no parts for a plan alone.
    """
    read = {c for p in parts for n in p.nodes.values() for c in n.all_input_nodes}
    several, out = len(set(names)) > 1, []
    for name in dict.fromkeys(names):
        places = tuple(place for place, at in enumerate(owner) if names[at] == name)
        own, shown = [p for p, of in zip(parts, names, strict=False) if of == name], name if several else ""
        totals = _totals([nodes[place] for place in places], own)
        if not own:  # a plan without its graphs has what was saved with it
            saved = {key: plan.totals.get(f"{key} ({name})" if several else key) for key in TOTALS}
            known = {key: value for key, value in saved.items() if value is not None}
            totals = msgspec.structs.replace(totals, **known | ({} if several else {"casts": plan.casts}))
        outputs = tuple(_cast(c, p) for p in own for c in p.outputs if c not in read)
        kept = [p.emitted.kept for p in own if p.emitted.kept is not None]
        measured = sum(kept) if own and len(kept) == len(own) else None
        compiler = own[0].emitted.compiler if own else ""
        out.append(State(shown, totals, places if several else (), outputs, compiler, measured))
    return tuple(out)


def _totals(nodes: Sequence[NodeRecord], parts: Sequence[_Part]) -> Totals:
    """Sum over the nodes that a state runs, and over its graphs."""
    colours = Counter("low" if n.colour in LOW else n.colour for n in nodes)
    sizes = [part.sizes for part in parts if part.sizes is not None]
    sized = bool(parts) and len(sizes) == len(parts)

    def total(field: str, only: Sequence[NodeRecord] = nodes) -> int | None:
        return sum(getattr(n, field) or 0 for n in only) if sized else None

    def share(field: str) -> float | None:
        whole, low = total(field), total(field, [n for n in nodes if n.colour in LOW])
        return round(100 * low / whole, 2) if whole and low is not None else None

    return Totals(
        nodes=len(nodes), low_ops=colours["low"], fp32_ops=colours["float32"],
        unknown_ops=sum(n.op not in RULES and n.reason_code in (Code.KEEP, Code.AS_AUTOCAST) for n in nodes),
        user_casts=sum(n.kind == "cast" for n in nodes), casts=sum(p.casts for p in parts) if parts else None,
        cast_bytes=sum(_bytes(each, n) for each in sizes for n in each) if sized else None,
        bytes=total("bytes"), low_bytes=share("bytes"), flops=total("flops"), low_flops=share("flops"),
        saved_bytes=total("saved_bytes"), saved_bytes_fp32=_saved(parts, "fp32"),
        saved_bytes_autocast=_saved(parts, "autocast"), deviations=sum(n.reason_code in DEVIATIONS for n in nodes),
    )  # fmt: skip


def _saved(parts: Sequence[_Part], by: str) -> int | None:
    """Return the bytes that graphs would keep for backward without mixed precision, or under autocast."""
    found: list[tuple[_Part, Sizes | None]] = [(part, getattr(part, by)) for part in parts]
    if not parts or any(sizes is None for _, sizes in found):
        return None
    return sum(sizes[n].saved_bytes for part, sizes in found if sizes for n in part.decided if n in sizes)


def _node(d: Decision, part: _Part | None, seen: set[Node]) -> NodeRecord:
    node = part.nodes.get(d.key) if part is not None and part.emitted.first == d.graph else None
    size = part.sizes.get(node, _NONE) if part is not None and part.sizes is not None and node is not None else None
    frame = own_frame(node) if node is not None else None
    file, line, code = frame or _parsed(d.source)
    inner = frames(node)[-1] if node is not None and frames(node) else None
    torch_source = f"{inner[0].rsplit('/', 1)[-1]}:{inner[1]}" if inner is not None and inner != frame else ""
    before = (part.fp32 or {}).get(node, _NONE) if part is not None and node is not None else _NONE
    return NodeRecord(
        key=d.key, graph=d.graph, op=d.op, module=d.module_path, file=_relative(file), line=line, code=code,
        torch_source=torch_source, colour=d.colour, autocast=d.autocast_dtype, original="".join(before.dtypes[:1]),
        kind=d.kind, reason_code=d.code, reason=d.reason.removeprefix(f"{d.code}:").strip(), causes=d.causes,
        dtypes=size.dtypes if size else (), shapes=_shapes(node, size), bytes=size.bytes if size else None,
        flops=size.flops if size else None, saved_bytes=size.saved_bytes if size else None,
        casts=_casts(node, part, seen) if node is not None and part is not None else (),
        reads=_reads(node, part.origins) if node is not None and part is not None else (),
    )  # fmt: skip


def _parsed(source: str) -> tuple[str, int, str]:
    """Return the file, the line and the code of a decision's source."""
    file, _, rest = source.partition(":")
    number, _, code = rest.partition(": ")
    return file, int(number) if number.isdecimal() else 0, code


def _casts(node: Node, part: _Part, seen: set[Node]) -> tuple[Cast, ...]:
    """Return the casts in front of a node, each at the first node that reads it."""
    own = [cast for cast in node.all_input_nodes if is_inserted(cast) and cast not in seen]
    seen.update(own)
    return tuple(_cast(cast, part) for cast in own)


def _cast(cast: Node, part: _Part) -> Cast:
    value = cast.all_input_nodes[0]
    return Cast(
        operand=part.names.get(value, value.name), before=_dtype(value), after=_dtype(cast),
        bytes=_bytes(part.sizes, cast) if part.sizes is not None else None, shared=len(cast.users),
    )  # fmt: skip


def _bytes(sizes: Sizes, node: Node) -> int:
    """Return the bytes that an inserted cast reads and writes; 0 for other nodes and for casts that copy nothing."""
    if not is_inserted(node) or node.target is again or _dtype(node) == _dtype(node.all_input_nodes[0]):
        return 0
    return sizes[node].read_bytes + sizes[node].bytes


def _shapes(node: Node | None, size: Size | None) -> tuple[tuple[str, ...], ...]:
    """Return the shapes of a node's results, at the example's sizes if these are known."""
    if size is not None:
        return tuple(tuple(map(str, shape)) for shape in size.shapes)
    value = node.meta.get("val") if node is not None else None
    found = value if isinstance(value, (tuple, list)) else [value]
    return tuple(tuple(map(str, v.shape)) for v in found if isinstance(v, torch.Tensor))


def _relative(file: str) -> str:
    """Return a path below the working directory as one relative to it, any other as its last part."""
    here = os.getcwd().replace("\\", "/").rstrip("/") + "/"
    return file.removeprefix(here) if file.startswith(here) else file.rsplit("/", 1)[-1]


def _origins(graph: Graph, names: Mapping[Node, str], decided: Collection[str]) -> dict[Node, tuple[Read, ...]]:
    """Return the origins of every value of an emitted graph, as a reading node sees them.

    A node without a decision, mostly on integers, has the origins of its operands.
    """
    found: dict[Node, tuple[Read, ...]] = {}
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            found[node] = ()  # a size, which has no dtype to follow
        elif node.op in ("placeholder", "get_attr"):
            attribute = node.op == "get_attr" or note_of(node).role == "parameter"
            found[node] = (Read(names[node], "attribute" if attribute else "input", ""),)
        elif is_inserted(node):
            found[node] = tuple(Read(r.value, r.kind, _dtype(node)) for r in found[node.all_input_nodes[0]])
        elif names.get(node) in decided:
            found[node] = (Read(names[node], "node", ""),)
        else:
            found[node] = tuple(Read(r.value, r.kind, "") for r in _reads(node, found))
    return found


def _reads(node: Node, found: Mapping[Node, tuple[Read, ...]]) -> tuple[Read, ...]:
    """Return the values that a node is given, each once."""
    return tuple(dict.fromkeys(read for operand in node.all_input_nodes for read in found[operand]))


def _dtype(node: Node) -> str:
    """Return the dtype of a value, without "torch."."""
    value = node.meta.get("val")
    return dtype_name(value.dtype) if isinstance(value, torch.Tensor) else "unknown"
