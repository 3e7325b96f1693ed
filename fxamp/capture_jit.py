"""From a graph that TorchDynamo captured to the form the compiler takes: what each value is, and where it was made.

Dynamo's graphs hold torch functions over flat placeholders, parameters among them. Under an ambient `torch.autocast`
their example values have autocast's dtypes; the compiler wants those of the model itself, so they are inferred anew.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from passes import ops
from passes._torch import enter_autocast, exit_autocast, pytree, source_name, without_transforms
from passes.values import ELIGIBLE, LOW, Inference, dtypes_of, is_floating, literal_dtype, origin, retyped, source

from .relative import make_relative
from .scope import Scope

_ROOT = re.compile(r"^[LG]\['\w+'\]\.?")
_ATOM = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.([A-Za-z]\w*)")  # not `_modules`, `_parameters`
# Of a line: a low dtype that is spelled out, or that is the module's own, as `self.weight.dtype` is.
_AUTHORS = re.compile(r"(b?float16|half|fp16|bf16)\b|(\.to\(|dtype=)\s*(dtype=)?self\.")
_RELATIVE = re.compile(r"\.dtype\b|type_as\(|\.to\((?:other|like)\b")
_LITERAL = re.compile(r"\.(float|half|bfloat16|double|type)\(|torch\.(float|half|bfloat16|double|float(16|32|64))\b")
_CASTS_AFTER = ("to", "getitem", "type_as")


def kind_of_line(line: str) -> str:
    """Return what a line of source says of the cast in it: "literal", "relative" or "undecided"."""
    if _RELATIVE.search(line):
        return "relative"
    return "literal" if _LITERAL.search(line) else "undecided"


def ambient_dtype(graph: Graph, device: str) -> torch.dtype | None:
    """Return the low dtype of the ambient autocast: a region round the whole graph, which is erased, or a state."""
    region = _whole_region(graph)
    if region is not None:
        entered, left = region
        for node in (left, entered):
            graph.erase_node(node)
        kind, dtype, enabled, _ = entered.args
        if kind == device and enabled and isinstance(dtype, torch.dtype):
            return dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _whole_region(graph: Graph) -> tuple[Node, Node] | None:
    """Return the switches of an enabled autocast region that all ops are in, but for casts of what comes out of it."""
    calls = [n for n in graph.nodes if n.op.startswith("call")]
    if not calls or calls[0].target is not enter_autocast or not calls[0].args[2]:
        return None
    left = next((n for n in calls if n.target is exit_autocast and n.args[0] is calls[0]), None)
    if left is None or any(ops.name(n) not in _CASTS_AFTER for n in calls[calls.index(left) + 1 :]):
        return None
    return calls[0], left


def describe(gm: GraphModule, *, ambient: bool, level: str, scope: Scope | None = None, inside: bool = False) -> None:
    """Leave on every node what the passes read: `val`, the module path, the autocast region, what a cast means.

    Args:
        gm: changed in place; of its ops, only casts to the dtype of a tensor.
        ambient: autocast was on while Dynamo traced, so the example values have its dtypes.
        level: that of the policy: which dtypes that autocast gave hold in the converted graph too.
        scope: where the graph lies in the compiled module, where that is known.
        inside: this is the body of a higher-order op.
    """
    infer, held = Inference(), dict[Node, Any]()
    regions: list[tuple[Node, tuple[str, bool, Any]]] = []
    for node in list(gm.graph.nodes):
        _describe_origin(node, scope)
        if node.op == "get_attr" and isinstance(body := attribute_of(gm, str(node.target)), GraphModule):
            describe(body, ambient=ambient, level=level, scope=scope, inside=True)
        if node.target is enter_autocast:
            kind, dtype, enabled, _ = node.args
            regions.append((node, (str(kind), bool(enabled), dtype)))
        elif node.target is exit_autocast:
            regions = [r for r in regions if r[0] is not node.args[0]]
        elif regions and node.op.startswith("call"):
            node.meta["autocast_region"] = regions[-1][1]
        value = pytree.tree_map(without_transforms, node.meta.get("example_value", node.meta.get("val")))
        if value is None:
            continue
        if ops.name(node) == "to" and is_floating(dtypes_of(value)):
            _describe_cast(node, ambient, level)
        elif ambient and node.op.startswith("call") and _is_read(node):
            cast = _without_read(node)
            before: Any = cast.args[0]
            cast.meta["val"], held[cast] = retyped(before.meta.get("val", value), torch.float32), torch.float32
            _describe_cast(cast, ambient, level)
        if ambient and node.op.startswith("call"):
            value = retyped(value, _inferred(node, value, infer, held))
        elif ambient and inside and node.op == "placeholder":
            value = retyped(value, _without_low(dtypes_of(value)))
        node.meta["val"] = value
        held[node] = dtypes_of(value)
    make_relative(gm.graph)


def _inferred(node: Node, value: Any, infer: Inference, held: dict[Node, Any]) -> Any:
    """Return the dtypes that a node gives without autocast; those it has where fake tensors cannot run it."""
    if ops.name(node).startswith("higher_order::"):
        return _without_low(dtypes_of(value))
    try:
        return infer(node, lambda n: held.get(n))
    except Exception:  # whatever a fake kernel raises
        return dtypes_of(value)


def _without_low(dtypes: Any) -> Any:
    if isinstance(dtypes, tuple):
        return tuple(_without_low(d) for d in dtypes)
    return torch.float32 if dtypes in LOW else dtypes


def _describe_origin(node: Node, scope: Scope | None) -> None:
    """Bring module paths into the form `blocks.0.attn`, the root being ""."""
    if scope is not None:
        node.meta["nn_module_stack"] = scope.stack(node)
    elif stack := node.meta.get("nn_module_stack"):
        node.meta["nn_module_stack"] = {k: (_ROOT.sub("", path), kind) for k, (path, kind) in stack.items()}


def _describe_cast(node: Node, ambient: bool, level: str) -> None:
    """Say whether the author wrote the dtype of a cast or read it off a tensor: Dynamo bakes both.

    What was read under autocast is a dtype of autocast's making; it becomes the one that the model itself has there.
    `meta["read"]` is what was read, if the tensor has that dtype at this level: at O1 any, beyond only a low one.
    """
    read = literal_dtype(node)
    if ambient and _is_read(node):
        node.meta["cast"] = "relative"
        node.args, node.kwargs = pytree.tree_map(lambda a: torch.float32 if a is read else a, (node.args, node.kwargs))
    else:
        name = str(node.target) if node.op == "call_method" else ""
        node.meta["cast"] = "literal" if name in ops.CAST_METHODS else kind_of_line(source(node))
    if ambient and node.meta["cast"] != "literal" and read in {"O0": (), "O1": ELIGIBLE}.get(level, LOW):
        node.meta["read"] = read


def _is_read(node: Node) -> bool:
    """Say whether a dtype that is low under autocast was read there, and neither written out nor the module's own."""
    return literal_dtype(node) in LOW and not _AUTHORS.search(source(node))


def _without_read(node: Node) -> Node:
    """Take a dtype that autocast made low from an op, and return the cast that does the same.

    Before: softmax(x, 1, dtype=bfloat16)        After: softmax(to(x, bfloat16), 1)
    Before: zeros(2, dtype=bfloat16)             After: to(zeros(2, dtype=float32), bfloat16)
    """
    read, graph, value = literal_dtype(node), node.graph, node.args[0] if node.args else None
    floating = isinstance(value, Node) and is_floating(dtypes_of(value.meta.get("val")))
    first = floating and ops.name(node) in ops.CONVERTS_FIRST
    settled = None if first else torch.float32
    node.args, node.kwargs = pytree.tree_map(lambda a: settled if a is read else a, (node.args, node.kwargs))
    with graph.inserting_before(node) if first else graph.inserting_after(node):
        cast = graph.call_method("to", (value if first else node, read))
    if first:
        node.args = (cast, *node.args[1:])
    else:
        node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    cast.meta = origin(node)
    return cast


def attribute_of(gm: GraphModule, path: str) -> Any:
    """Return what the target of a get_attr refers to."""
    return functools.reduce(getattr, path.split("."), gm)


def is_attribute(placeholder: Node) -> bool:
    """Say whether Dynamo took an input of a graph from a module, as it does buffers, and not from the call."""
    return "._buffers[" in source_name(placeholder)


def parameter_path(placeholder: Node) -> str:
    """Return the path of a parameter in the module whose forward Dynamo captured, "" when it cannot be told."""
    name = source_name(placeholder)
    atoms = ["".join(found) for found in _ATOM.findall(name)]
    return ".".join(atoms[1:])  # the first is the local variable that the module is in
