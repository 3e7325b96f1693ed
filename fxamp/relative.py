"""Find, in the line of source that made a cast, the tensor whose dtype it read: Dynamo keeps the dtype alone.

    dt + bias.to(dt.dtype)[..., None]        ->  the value that the cast is added to
    bmm(q, k / scale.to(dtype=q.dtype))      ->  the first operand of the product
    softmax(x, 1, dtype=x.dtype)             ->  the operand itself

A tensor can be told where its name is an operand in the same expression: of the call that casts, or of an operation
that the result goes into. The graph must then have the same operations, in the same line, one by one.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from torch.fx import Graph, Node

from passes import ops
from passes.values import dtypes_of, is_floating, source

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
        if not node.op.startswith("call") or not _is_tensor(node):
            continue
        paths = _paths(source(node).partition(": ")[2])
        if len(paths) != 1:
            continue
        (path,) = paths
        if ops.name(node) == "to" and path:
            reference = _operand(node, path)
            if reference in seen:
                node.op, node.target, node.args, node.kwargs = "call_method", "type_as", (node.args[0], reference), {}
        elif ops.name(node) != "to" and not path and "dtype" in node.kwargs:
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
def _paths(line: str) -> frozenset[tuple[str, ...]]:
    """Return, for each call in a line that is given `x.dtype`, the operations from it to the one that x is in."""
    if ".dtype" not in line:
        return frozenset()
    try:
        tree = ast.parse(line)
    except SyntaxError:  # a line of a longer statement
        return frozenset()
    return frozenset(_climb(parents) for parents in _reads(tree, ()))


def _reads(tree: ast.AST, above: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, ...]]:
    """Yield every read of a variable's dtype, after what it stands in from the outermost on."""
    here = (*above, tree)
    if isinstance(tree, ast.Attribute) and tree.attr == "dtype" and isinstance(tree.value, ast.Name):
        yield here
    for child in ast.iter_child_nodes(tree):
        yield from _reads(child, here)


def _climb(parents: tuple[ast.AST, ...]) -> tuple[str, ...]:
    """Return the names of the operations up to the one that has the variable itself as an operand; else ("?",)."""
    *above, read = parents
    assert isinstance(read, ast.Attribute)
    assert isinstance(read.value, ast.Name)
    names: list[str] = []
    for node in reversed(above):
        if isinstance(node, (ast.keyword, ast.Attribute)):  # a method's; an attribute in the graph has a node more
            continue
        name, operands = _operation(node)
        if any(isinstance(o, ast.Name) and o.id == read.value.id for o in operands):
            return tuple([*names, name][1:])
        if not name:
            break
        names.append(name)
    return ("?",)


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
