"""The nodes of plans, converted modules and graphs as `match` and `diff` look at them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from passes._torch import OpOverload
from passes.contract.plan import Decision, Plan, Stored
from passes.contract.policy import dtype_name
from passes.graph.notes import is_inserted
from passes.graph.values import module_path, node_names
from passes.ops import ops

from ...observe.places import unique_keys
from ..record.build import Emitted
from .changes import ORDINAL, STORED
from .match import Item

DECISION_FIELDS = ("colour", "autocast_dtype", "kind", "reason")


def of_plan(plan: Plan, graphs: Sequence[Emitted] = ()) -> list[Item]:
    """Return the decisions as items, in order. Each has the one before it as its operand, since a plan has no edges.

    The graphs that carry the plan out, if they are known, tell which casts are in front of each node.
    """
    nodes = {g.first: {key: node for node, key in node_names(g.module.graph).items()} for g in graphs}
    last: dict[int, int] = {}
    items = []
    for at, d in enumerate(plan.decisions):
        node = nodes.get(d.graph, {}).get(d.key)
        fields = {name: getattr(d, name) for name in DECISION_FIELDS}
        if node is not None:
            fields["casts"] = casts_of(node)
        operands = (last[d.graph],) if d.graph in last else ()
        items.append(Item(_in_graph(d, d.key), _in_graph(d, d.module_path), d.op, operands, fields))
        last[d.graph] = at
    return items


def of_stored(plan: Plan) -> list[Item]:
    """Return what a compiled step stores in 16 bits beside as items, in order, each with the one before it as operand.

    Numbers in names are no part of their labels: where the model is edited, names in its joint graph differ in them.
    """
    return [
        Item(
            _in_graph(s, f"{s.module}/{s.name}" if s.module else s.name), _in_graph(s, s.module),
            f"{s.part} {ORDINAL.sub('', s.name)}", (at - 1,) if at else (),
            {STORED: ", ".join(filter(None, (s.part, s.dtype, s.line))), "dtype": s.dtype},
        )
        for at, s in enumerate(plan.stored)
    ]  # fmt: skip


def _in_graph(of: Decision | Stored, text: str) -> str:
    return f"{of.graph}:{text}" if of.graph else text


def casts_of(node: Node) -> str:
    """Say which casts fxamp has inserted before a node: "float32 to bfloat16 (2)"."""
    casts = Counter(arrow(n) for n in node.all_input_nodes if is_inserted(n))
    return ", ".join(f"{a} ({count})" if count > 1 else a for a, count in sorted(casts.items())) or "none"


def arrow(cast: Node) -> str:
    """Describe an inserted cast: its two dtypes."""
    return f"{dtype_of(cast.all_input_nodes[0])} to {dtype_of(cast)}"


def of_graph(graph: Graph) -> list[Item]:
    """Return the nodes of a graph as items, with keys of their own; operands are compared after matching."""
    named, places = unique_keys(graph), {node: at for at, node in enumerate(graph.nodes)}
    return [
        Item(
            key, module_path(node), label(node), tuple(places[n] for n in node.all_input_nodes),
            {"target": target_of(node), "dtype": dtype_of(node)},
        )
        for node, key in named.items()
    ]  # fmt: skip


def label(node: Node) -> str:
    """Return the canonical name of a node's op, which is the same for all front ends."""
    if node.op != "call_module":
        return ops.name(node) if node.op.startswith("call") else f"{node.op} {node.target}"
    owner = node.graph.owning_module
    return f"call_module {type(owner.get_submodule(str(node.target))).__name__ if owner is not None else ''}"


def _short_name(node: Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        return str(target.overloadpacket.__name__)
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def target_of(node: Node) -> str:
    """Return a call's target as text, without the address in the repr of a function."""
    if isinstance(node.target, str | OpOverload):
        return str(node.target)
    return f"{getattr(node.target, '__module__', '')}.{_short_name(node)}"


def dtype_of(node: Node) -> str:
    """Return the dtype of a node's result as text, "None" if it is unknown or the result is no tensor."""
    return _dtype(node.meta.get("val"))


def _dtype(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_dtype, value))})"
    return dtype_name(value.dtype) if isinstance(value, torch.Tensor) else "None"


def arguments(node: Node, names: Mapping[Node, str]) -> str:
    """Write the arguments with the given names, since an edit elsewhere may renumber those of the graph."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda operand: _Bare(names[operand]))
    written: Sequence[str] = [*(_shown(a) for a in args), *(f"{k}={_shown(v)}" for k, v in kwargs.items())]
    return ", ".join(written)


def _shown(value: object) -> str:
    return repr(value) if not callable(value) or isinstance(value, type) else getattr(value, "__name__", "function")


class _Bare(str):
    """Show a key without quotes."""

    __slots__ = ()
    __repr__ = str.__str__
