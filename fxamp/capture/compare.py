"""Walk two captures of one model side by side, and say where they differ.

Captures are compared op by op, in order, and argument by argument. Arithmetic on sizes and the exporter's assertions
may be written differently in the two captures; sizes are compared by their symbolic expressions.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from passes._torch import OpOverload, own_schema
from passes.graph.values import module_path, source
from passes.ops import ops
from passes.ops.rules import row_of

Path = tuple[Any, ...]  # where a literal stands: position or name of the argument, then indices and keys
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Differ(Exception):  # noqa: N818 - a signal inside this package, not an error
    """Two captures do not line up. It holds the first node of each that differs; None if that capture has ended."""

    def __init__(self, left: Node | None, right: Node | None) -> None:
        super().__init__()
        self.left, self.right = left, right

    def __str__(self) -> str:
        return f"{show(self.left)} against {show(self.right)}"


def show(node: Node | None) -> str:
    """Describe a node and its place in the user's code, for an error."""
    if node is None:
        return "nothing"
    return f"{node.target} in module '{module_path(node)}' ({source(node) or 'no source line'})"


def attribute_of(root: Any, path: str) -> Any:
    """Return what the target of a get_attr refers to."""
    return functools.reduce(getattr, path.split("."), root)


class Walk:
    """Two graphs side by side.

    Attributes:
        twin: the node of the first graph for each of the second that was paired.

    Args:
        left: a graph.
        right: another capture of the same model.
        held: returns the value of a get_attr target in the first graph, None for one of the model's own.
        other: the same for the second.
    """

    def __init__(self, left: Graph, right: Graph, held: Callable[[str], Any], other: Callable[[str], Any]) -> None:
        self.left, self.right, self.held, self.other = left, right, held, other
        self.twin: dict[Node, Node] = {}
        self._sizes: dict[Any, Any] = {}  # symbols of the second graph, as the first calls them

    def pair(self, a: Node, b: Node) -> None:
        """Note that two nodes are the same call."""
        self.twin[b] = a
        for x, y in zip(_symbols(a.meta.get("val")), _symbols(b.meta.get("val")), strict=False):
            if isinstance(y, SYMBOLS) and isinstance(x, SYMBOLS) and y.node.expr.is_symbol:
                self._sizes.setdefault(y.node.expr, x.node.expr)

    def literals(self, a: Node, b: Node) -> Iterator[tuple[Path, Any, Any]]:
        """Yield where two calls, all of whose operands are paired, have other literals.

        Raises:
            Differ: they have other operands, or arguments of other kinds.
        """
        mine, theirs = spelled_out(a, b)
        try:
            yield from self._differences(mine, theirs, ())
        except _Unlike:
            raise Differ(a, b) from None

    def _differences(self, a: Any, b: Any, path: Path) -> Iterator[tuple[Path, Any, Any]]:
        mine, theirs = _items(a), _items(b)
        if mine is not None and theirs is not None and mine[0] is theirs[0]:
            if mine[1].keys() != theirs[1].keys():
                raise _Unlike
            for key, held in mine[1].items():
                yield from self._differences(held, theirs[1][key], (*path, key))
        elif isinstance(a, Node) or isinstance(b, Node):
            if not (isinstance(a, Node) and isinstance(b, Node) and self.same_value(a, b)):
                raise _Unlike
        elif not same_literal(a, b):
            yield path, a, b

    def same_value(self, a: Node, b: Node) -> bool:
        """Say whether two operands are the same value."""
        if a.op == b.op == "get_attr":
            return self.same_attribute(a, b)
        if is_size(a) and is_size(b):
            return bool(a.meta["val"].node.expr == b.meta["val"].node.expr.xreplace(self._sizes))
        return self.twin.get(b) is a

    def same_attribute(self, a: Node, b: Node) -> bool:
        """Say whether two reads give the same parameter, buffer, constant or inner graph."""
        mine, theirs = self.held(str(a.target)), self.other(str(b.target))
        if mine is None and theirs is None:
            return a.target == b.target
        return same_constant(mine, theirs)


def _items(value: Any) -> tuple[type, dict[Any, Any]] | None:
    """Return the kind of a container and its items by key; None for anything else."""
    if isinstance(value, (list, tuple)):
        return tuple, dict(enumerate(value))
    if isinstance(value, dict):
        return dict, value
    if isinstance(value, slice):
        return slice, {key: getattr(value, key) for key in ("start", "stop", "step")}
    return None


class _Unlike(Exception):  # noqa: N818 - a signal inside this file
    pass


def counts(node: Node) -> bool:
    """Say whether a node must have a counterpart in the other capture."""
    return node.op != "get_attr" and not is_size(node) and ops.name(node) != "_assert_tensor_metadata"


def same_call(a: Node, b: Node) -> bool:
    """Say whether two nodes call the same function."""
    return a.op == b.op and (a.target == b.target or a.op in ("output", "placeholder"))


def is_size(node: Node) -> bool:
    """Say whether a node is arithmetic on sizes, which both captures may write in their own way."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), SYMBOLS):
        return False
    target: Any = node.target
    if isinstance(target, OpOverload):
        return row_of(node).asks == "shape"
    return getattr(target, "__module__", "") in ("_operator", "math", "torch") or target in vars(operator).values()


def _symbols(value: Any) -> list[Any]:
    """Return the sizes of a value, where it has some."""
    if isinstance(value, torch.Tensor):
        return list(value.shape)
    return [value] if isinstance(value, SYMBOLS) else []


def same_literal(a: Any, b: Any) -> bool:
    """Say whether two literals are the same, NaN and NaN too."""
    return type(a) is type(b) and bool(a is b or a == b or (a != a and b != b))


def same_constant(a: Any, b: Any) -> bool:
    """Say whether two lifted constants are the same; tensors and inner graphs are compared by content."""
    if isinstance(a, GraphModule) and isinstance(b, GraphModule):
        mine, theirs = _tensors(a), _tensors(b)
        same = a.code == b.code and mine.keys() == theirs.keys()
        return same and all(same_constant(v, theirs[k]) for k, v in mine.items())
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a is b or (a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
    return a is b


def _tensors(gm: GraphModule) -> dict[str, torch.Tensor]:
    return dict(gm.named_buffers()) | dict(gm.named_parameters())


def spelled_out(node: Node, other: Node) -> tuple[Any, Any]:
    """Return (args, kwargs) of both calls, with the default where only one of them leaves an argument out."""
    pair = [(tuple(n.args), dict(n.kwargs)) for n in (node, other)]
    same = len(pair[0][0]) == len(pair[1][0]) and pair[0][1].keys() == pair[1][1].keys()
    if same or not isinstance(node.target, OpOverload):
        return pair[0], pair[1]
    arguments = own_schema(node.target).arguments

    def full(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        values = {a.name: given.get(a.name, a.default_value if a.has_default_value() else None) for a in arguments}
        return (
            tuple(values[a.name] for a in arguments if not a.kwarg_only),
            {a.name: values[a.name] for a in arguments if a.kwarg_only},
        )

    return full(*pair[0]), full(*pair[1])
