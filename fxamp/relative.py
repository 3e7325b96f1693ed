"""Find, in the line of source that made a cast, the tensor whose dtype it read: Dynamo keeps the dtype alone.

    dt + bias.to(dt.dtype)[..., None]        ->  the value that the cast is added to
    bmm(q, k / scale.to(dtype=q.dtype))      ->  the first operand of the product
    softmax(x, 1, dtype=x.dtype)             ->  the operand itself

A tensor can be told where its name is an operand in the same expression: of the call that casts, or of an operation
that the result goes into. The graph must then have the same operations, in the same line, one by one, and the line no
second cast.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from typing import Any

from torch.fx import Graph, Node

from passes import ops
from passes.values import dtypes_of, is_floating, literal_dtype, source

_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.MatMult: "matmul", ast.Pow: "pow"
}  # fmt: skip


def make_relative(graph: Graph) -> None:
    """Turn casts to the dtype of a tensor that can be told into `type_as`, and drop the dtype of `f(x, dtype=x.dtype)`.

    The nodes have their `val`; the graph is changed in place.
    """
    seen: set[Node] = set()
    for node in graph.nodes:
        seen.add(node)
        found = _path(source(node).partition(": ")[2]) if node.op.startswith("call") and _is_tensor(node) else None
        if found is None or ops.name(node) != ops.canonical(found[0]):
            continue
        reference: Any = node.args[0] if not found[1] else _operand(node, found[1])
        if reference not in seen or dtypes_of(reference.meta.get("val")) != literal_dtype(node):
            continue
        if ops.name(node) == "to":
            node.op, node.target, node.args, node.kwargs = "call_method", "type_as", (node.args[0], reference), {}
        elif not found[1]:
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "dtype"}


def _is_tensor(value: object) -> bool:
    return isinstance(value, Node) and is_floating(dtypes_of(value.meta.get("val")))


def _operand(cast: Node, path: tuple[str, ...]) -> Node | None:
    """Return the other operand of the operation at the end of a path of operations that begins at a cast."""
    value, line = cast, source(cast)
    for i, name in enumerate(path):
        readers = [n for n in value.users if source(n) == line]
        if len(readers) != 1 or ops.name(readers[0]) != name:
            return None
        others = [o.node for o in ops.operands(readers[0]) if o.node is not value and _is_tensor(o.node)]
        if i + 1 == len(path):
            return others[0] if len(others) == 1 else None
        value = readers[0]
    return None


@functools.lru_cache(maxsize=4096)
def _path(line: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the call that is given `x.dtype`, and the operations from it to the one that x itself is an operand of.

    None for a line with another cast or another such read, which could not be told apart in the graph.
    """
    if line.count(".dtype") != 1:
        return None
    try:
        tree = ast.parse(line)
    except SyntaxError:  # a line of a longer statement
        return None
    casts = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _casts(n)]
    reads = list(_reads(tree, ()))
    if len(casts) != 1 or len(reads) != 1 or casts[0] not in reads[0][1]:
        return None
    variable, parents = reads[0]
    names: list[str] = []
    for node in reversed(parents[: parents.index(casts[0]) + 1]):
        if isinstance(node, (ast.keyword, ast.Attribute)):  # a method's; an attribute in the graph has a node more
            continue
        name, operands = _operation(node)
        names.append(name)
        if any(isinstance(o, ast.Name) and o.id == variable for o in operands):
            return names[0], tuple(names[1:])
        if not name:
            break
    return None


def _reads(tree: ast.AST, above: tuple[ast.AST, ...]) -> Iterator[tuple[str, tuple[ast.AST, ...]]]:
    """Yield every variable whose dtype is read, and what that stands in from the outermost on."""
    if isinstance(tree, ast.Attribute) and tree.attr == "dtype" and isinstance(tree.value, ast.Name):
        yield tree.value.id, above
    for child in ast.iter_child_nodes(tree):
        yield from _reads(child, (*above, tree))


def _casts(call: ast.Call) -> bool:
    """Say whether a call may convert a tensor."""
    named = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return named in ("to", "type", "type_as", *ops.CAST_METHODS) or any(k.arg in ("dtype", None) for k in call.keywords)


def _operation(node: ast.AST) -> tuple[str, list[ast.expr]]:
    """Return the canonical name of an operation, "" for what is none, and its operands."""
    if isinstance(node, ast.BinOp):
        return _OPERATORS.get(type(node.op), ""), [node.left, node.right]
    if isinstance(node, ast.AugAssign):
        return f"{_OPERATORS.get(type(node.op), '')}_", [node.target, node.value]
    if isinstance(node, ast.Subscript):
        return "getitem", []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr, [node.func.value, *node.args]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id, list(node.args)
    return "", []
