"""The code of a graph with what conversion did to it marked: casts that it inserted, and what runs in another dtype.

      x = input
    + x.to(bfloat16)
    + fc.weight.to(bfloat16)
    ! fc = self.fc(x)                                    runs in bfloat16
    + fc.to(float32)
      return fc

The original may call modules, while the converted graph has what Dynamo or export recorded: a call of a module stands
for all nodes that were made inside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from passes.contract.policy import dtype_name
from passes.graph.notes import is_inserted
from passes.graph.values import dtypes_of, literal_dtype, module_path
from passes.ops import ops
from passes.ops.rules import row_named

from ...harmless import visible
from ...observe.places import unique_keys
from ..record.record import LOW
from .changes import Change, another_model, merged
from .items import arguments, arrow, dtype_of, target_of
from .match import Item, match

_NO_CALLS = ("placeholder", "get_attr", "module _guards_fn")
_WIDE = 60


@dataclass
class _Unit:
    """One node of the original, or the nodes that conversion may have made of it."""

    label: str
    nodes: list[Node] = field(default_factory=list)


def marked(original: GraphModule, converted: GraphModule) -> tuple[list[str], list[Change]]:
    """Return the code of a graph with marks that show how it, or its model, was converted; and what is marked."""
    called = Counter(str(n.target) for n in original.graph.find_nodes(op="call_module"))
    before = [_Unit(_label(n), [n]) for n in original.graph.nodes]
    after = _units(converted.graph, called)
    pairs, alike = match(_items(before), _items(after))
    if not alike:
        change = another_model(before, after, pairs)
        return [str(change)], [change]
    writer = _Writer(original.graph, before, after, pairs)
    writer.write()
    return writer.code, writer.changes


def _units(graph: Graph, called: Counter[str]) -> list[_Unit]:
    """Return the units of the user's nodes in a converted graph; all nodes of one call of a module form one unit."""
    owners = {node: _owner(node, called) for node in graph.nodes if not is_inserted(node)}
    left = Counter(owners.values())
    # A module that is called twice has made the same nodes each time.
    size = {owner: n // called[owner] if owner and n % called[owner] == 0 else n for owner, n in left.items()}
    out, last = list[_Unit](), dict[str, _Unit]()
    for node, owner in owners.items():
        if owner and left[owner] % size[owner]:
            last[owner].nodes.append(node)
        else:
            last[owner] = _Unit(f"module {owner}" if owner else _label(node), [node])
            out.append(last[owner])
        left[owner] -= 1
    return out


def _owner(node: Node, called: Counter[str]) -> str:
    """Return the path of the innermost module that the original calls, of those that a node lies in; "" for none."""
    parts = module_path(node).split(".") if node.op.startswith("call") else []
    paths = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((path for path in paths if path in called), "")


def _label(node: Node) -> str:
    if node.op == "call_module":
        return f"module {node.target}"
    if node.op.startswith("call"):
        return ops.name(node).rstrip("_")  # `x += y` is traced as `x + y`
    return f"{node.op} {node.target}" if node.op == "get_attr" else node.op


def _items(units: Sequence[_Unit]) -> list[Item]:
    """Return the units as items to match; the parameters of a module do not count as operands of its call."""
    places = {node: at for at, unit in enumerate(units) for node in unit.nodes}
    counts: dict[str, int] = {}
    out = []
    for at, unit in enumerate(units):
        read = [_source(n) for node in unit.nodes for n in node.all_input_nodes]
        of_module = unit.label.startswith("module ")
        operands = [places[n] for n in read if n in places and not (of_module and n.op == "get_attr")]
        counts[unit.label] = counts.get(unit.label, -1) + 1
        key = f"{unit.label}#{counts[unit.label]}"
        out.append(Item(key, "", unit.label, tuple(o for o in dict.fromkeys(operands) if o < at), {}))
    return out


def _source(node: Node) -> Node:
    """Return the operand of an inserted cast; return any other node itself."""
    while is_inserted(node):
        node = node.all_input_nodes[0]
    return node


class _Writer:
    """Writes the original's code, and next to each node what conversion did to it."""

    def __init__(self, graph: Graph, before: Sequence[_Unit], after: Sequence[_Unit], pairs: dict[int, int]) -> None:
        self.before, self.after = before, after
        self.keys = unique_keys(graph)
        self.became = {old: new for new, old in pairs.items()}
        self.names = {node: before[old].nodes[0].name for new, old in pairs.items() for node in after[new].nodes[-1:]}
        self.shown: set[Node] = set()
        self.sizes = _sizes(graph)
        self.code: list[str] = []
        self.changes: list[Change] = []

    def write(self) -> None:
        for old, new in merged(len(self.before), len(self.after), self.became, last=True):
            if old < 0:
                self._added(self.after[new])
            elif new < 0:
                self._removed(self.before[old])
            else:
                self._kept(self.before[old].nodes[0], self.after[new])

    def _removed(self, unit: _Unit) -> None:
        (node,) = unit.nodes
        silent = self._is_silent(node, unit.label)
        self.code.append(visible(f"{' ' if silent else '-'} {_written(node)}"))
        if not silent:
            self.changes.append(Change("removed", self.keys[node], "target", target_of(node), None))

    def _is_silent(self, node: Node, label: str) -> bool:
        """Say whether a missing node is none: a size, a module that does nothing, an item of a module's result."""
        owner = node.graph.owning_module
        if node.op == "call_module" and owner is not None:
            return _is_silent(label) or type(owner.get_submodule(str(node.target))) is nn.Identity
        part = label == "getitem" and node.all_input_nodes[0].op == "call_module"
        return part or _is_silent(label) or node.op in _NO_CALLS or node in self.sizes

    def _kept(self, node: Node, unit: _Unit) -> None:
        self._casts(unit, module_path(node))
        old, now = _dtype(node), _dtype(unit.nodes[-1])
        named = literal_dtype(node) if node.op.startswith("call") and row_named(_label(node)).is_cast else None
        if named is not None and old in (now, "None"):  # read by the author's code under autocast, it may come out FP32
            old = dtype_name(named)
        known = node.meta.get("val") is not None or named is not None
        changed = node.op.startswith("call") and (old != now if known else now in LOW)
        line = _written(node)
        if changed:
            self.changes.append(Change("changed", self.keys[node], "dtype", old if known else "as captured", now))
            line = f"{line:<{_WIDE}} runs in {now}"
        self.code.append(visible(f"{'!' if changed else ' '} {line}"))

    def _added(self, unit: _Unit) -> None:
        if not _computes(unit):
            return
        module = module_path(unit.nodes[0])
        self._casts(unit, module)
        for node in unit.nodes:
            self.code.append(visible(f"+ {_written(node, self.names):<{_WIDE}} {dtype_of(node)}"))
            self.changes.append(Change("added", f"{module}/{node.name}", "target", None, target_of(node)))

    def _casts(self, unit: _Unit, module: str) -> None:
        """Write the casts that a unit reads, each where it is first read."""
        for cast in dict.fromkeys(n for node in unit.nodes for n in node.all_input_nodes if is_inserted(n)):
            if cast in self.shown:
                continue
            self.shown.add(cast)
            source = _source(cast)
            name = str(source.target) if source.op == "get_attr" else self.names.get(source, source.name)
            self.code.append(visible(f"+ {name}.to({dtype_of(cast)})"))
            key = f"{module}/{name}.to({dtype_of(cast)})"
            self.changes.append(Change("added", key, "cast", None, arrow(cast)))


def _computes(unit: _Unit) -> bool:
    """Say whether a unit computes floating values: whether it is a call, and not one that capture may leave out."""
    node = unit.nodes[0]
    value = node.meta.get("val")
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return node.op.startswith("call") and not _is_silent(unit.label) and floating


def _is_silent(label: str) -> bool:
    """Say whether a node has no floating dtype, or is one that capture may keep or leave out."""
    return label in (*_NO_CALLS, "contiguous") or row_named(label).asks in ("shape", "attribute", "dtype", "asserts")


def _sizes(graph: Graph) -> set[Node]:
    """Return the nodes that are computed only from sizes."""
    found = set[Node]()
    for node in graph.nodes:
        read, asks = node.all_input_nodes, row_named(_label(node)).asks in ("shape", "attribute")
        if node.op.startswith("call") and (asks or (read and found.issuperset(read))):
            found.add(node)
    return found


def _dtype(node: Node) -> str:
    """Return the dtype of a node's result; of several tensors, the dtype that they share."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        found = {str(dtypes_of(item)).removeprefix("torch.") for item in value}
        return found.pop() if len(found) == 1 else dtype_of(node)
    return dtype_of(node)


class _Names(dict[Node, str]):
    """The names that nodes have in the original; a node that is not in it has its own name."""

    def __missing__(self, node: Node) -> str:
        return self.get(_source(node), node.name)


def _written(node: Node, known: Mapping[Node, str] = MappingProxyType({})) -> str:
    """Write a node as a line of Python, approximately; nodes that are known have those names."""
    names = _Names(known)
    if node.op == "placeholder":
        return f"{node.name} = input"
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}"
    if node.op == "output":
        return f"return {arguments(node, names)}"
    if node.op == "call_module":
        return f"{node.name} = self.{node.target}({arguments(node, names)})"
    if node.op == "call_method":
        first, _, rest = arguments(node, names).partition(", ")
        return f"{node.name} = {first}.{node.target}({rest})"
    return f"{node.name} = {target_of(node)}({arguments(node, names)})"
