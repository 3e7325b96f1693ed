"""One graph for both training modes: a literal that differs between them follows the owner's `training` flag.

Before: dropout(x, 0.5, True) in train mode, dropout(x, 0.5, False) in eval mode
After:  dropout(x, 0.5, encoder.drop.training)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from passes.errors import CaptureError
from passes.values import module_path


def by_mode(training: bool, train: Any, evaluation: Any) -> Any:
    """Return the literal of the mode the owner is in."""
    return train if training else evaluation


def merge(train: Graph, evaluation: Graph) -> Graph:
    """Return the train graph with every literal that differs in eval made to follow its owner's flag.

    Raises:
        CaptureError: the two graphs differ in more than literals; names the first node that does.
    """
    pairs = _align(train, evaluation)
    twin = {e: t for t, e in pairs}
    flags: dict[str, Node] = {}
    for node, other in pairs:
        owner = module_path(node)

        def flag(node: Node = node, owner: str = owner) -> Node:
            if owner not in flags:
                with train.inserting_before(next(iter(train.nodes))):
                    flags[owner] = _flag_node(train, owner)
            return flags[owner]

        def follow(a: Any, b: Any, node: Node = node, flag: Any = flag) -> Any:
            if isinstance(a, Node) or isinstance(b, Node):
                if isinstance(a, Node) and isinstance(b, Node):
                    plain, other_plain = _through_contiguous(a), _through_contiguous(b)
                    if twin.get(other_plain) is plain or _same_attribute(plain, other_plain):
                        return a if a is not plain or b is other_plain else _make_contiguous(train, node, a)
                raise _Differ(node)
            if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
                return type(a)(follow(x, y) for x, y in zip(a, b, strict=True))
            if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
                return {k: follow(a[k], b[k]) for k in a}
            if type(a) is type(b) and (a is b or a == b or (a != a and b != b)):
                return a
            if a is True and b is False:
                return flag()
            if isinstance(a, (bool, int, float, type(None))) and isinstance(b, (bool, int, float, type(None))):
                with train.inserting_before(node):
                    chosen = train.call_function(by_mode, (flag(), a, b))
                chosen.meta = {**node.meta, "val": a}
                return chosen
            raise _Differ(node)

        try:
            mine, theirs = _spelled_out(node, other)
            node.args, node.kwargs = follow(mine[0], theirs[0]), follow(mine[1], theirs[1])
        except _Differ:
            raise _refusal(node, other) from None
    return train


def _flag_node(graph: Graph, owner: str) -> Node:
    node = graph.create_node("get_attr", f"{owner}.training".lstrip("."))
    node.meta["val"] = True
    return node


class _Differ(Exception):  # noqa: N818 - a signal inside this file, not an error
    pass


def _align(train: Graph, evaluation: Graph) -> list[tuple[Node, Node]]:
    """Pair the nodes of both graphs; only batch norm's batch counter may stand in the train graph alone."""
    left = [n for n in train.nodes if n.op != "get_attr" and not _is_contiguous(n)]
    right = [n for n in evaluation.nodes if n.op != "get_attr" and not _is_contiguous(n)]
    pairs, j = [], 0
    for node in left:
        if j < len(right) and node.op == right[j].op and (node.target == right[j].target or node.op in ("output", "placeholder")):
            pairs.append((node, right[j]))
            j += 1
        elif _is_batch_counter(node):
            owner = module_path(node)
            with train.inserting_before(node):
                node.update_arg(1, _flag_node(train, owner))
        else:
            raise _refusal(node, right[j] if j < len(right) else None)
    if j < len(right):
        raise _refusal(None, right[j])
    return pairs


def _is_batch_counter(node: Node) -> bool:
    counter = node.args[0] if node.args else None
    return (
        isinstance(counter, Node)
        and counter.op == "get_attr"
        and str(counter.target).endswith("num_batches_tracked")
        and node.target in (torch.ops.aten.add_.Tensor, "add_", operator.iadd)
        and len(node.args) == 2
        and node.args[1] == 1
    )


def _spelled_out(node: Node, other: Node) -> tuple[Any, Any]:
    """Return (args, kwargs) of both; with defaults filled in where one call leaves out what the other gives."""
    pair = [(tuple(n.args), dict(n.kwargs)) for n in (node, other)]
    same = len(pair[0][0]) == len(pair[1][0]) and pair[0][1].keys() == pair[1][1].keys()
    if same or not isinstance(node.target, torch._ops.OpOverload):
        return pair[0], pair[1]
    arguments = node.target._schema.arguments

    def full(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        values = {a.name: given.get(a.name, a.default_value if a.has_default_value() else None) for a in arguments}
        return (
            tuple(values[a.name] for a in arguments if not a.kwarg_only),
            {a.name: values[a.name] for a in arguments if a.kwarg_only},
        )

    return full(*pair[0]), full(*pair[1])


def _is_contiguous(node: Node) -> bool:
    """The exporter leaves `.contiguous()` out where it does nothing, which kernels that depend on the mode decide."""
    return node.target is torch.ops.aten.contiguous.default


def _through_contiguous(node: Node) -> Node:
    while _is_contiguous(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _make_contiguous(graph: Graph, reader: Node, value: Node) -> Node:
    with graph.inserting_before(reader):
        made = graph.call_function(torch.ops.aten.contiguous.default, (value,))
    made.meta = {**reader.meta, "val": value.meta["val"]} if "val" in value.meta else dict(reader.meta)
    return made


def _same_attribute(a: Node, b: Node) -> bool:
    return a.op == b.op == "get_attr" and a.target == b.target


def _refusal(node: Node | None, other: Node | None) -> CaptureError:
    def show(n: Node | None) -> str:
        if n is None:
            return "nothing"
        trace = (n.meta.get("stack_trace") or "").strip().splitlines()
        return f"{n.target} in module '{module_path(n)}' ({trace[-2].strip() if len(trace) > 1 else 'no source line'})"

    return CaptureError(
        f"the model computes differently in train and in eval mode: {show(node)} against {show(other)}. One graph cannot hold both"
    )


def same_bodies(a: GraphModule, b: GraphModule) -> bool:
    """Say whether two sub-graphs are the same, so that one can stand for both modes."""
    return a.code == b.code
