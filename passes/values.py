"""What each value of a graph is: its dtype, what it aliases, what is mutated, and where grad mode changes.

Analyses only; nothing here changes a graph.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from . import ops
from ._torch import FakeTensor, FakeTensorMode, pytree
from .rules import rule

LOW = (torch.float16, torch.bfloat16)
ELIGIBLE = (torch.float32, *LOW)  # what autocast casts: floating point, and not float64


def module_path(node: Node) -> str:
    """Return the path of the innermost module that made a node, "" for the root."""
    stack = node.meta.get("nn_module_stack")
    return "" if not stack else str(list(stack.values())[-1][0])


def module_stack(node: Node) -> list[tuple[str, str]]:
    """Return (path, qualified type name) of the modules a node was made in, outermost first."""
    return [(str(p), t if isinstance(t, str) else f"{t.__module__}.{t.__qualname__}") for p, t in node.meta.get("nn_module_stack", {}).values()]


def source(node: Node) -> str:
    """Return "file.py:12: code" of the line that made a node, "" when capture did not keep it."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith("File "):
            file, _, rest = lines[i].removeprefix('File "').partition('", line ')
            code = lines[i + 1] if i + 1 < len(lines) else ""
            return f"{file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{rest.split(',')[0]}: {code}"
    return ""


def keys(graph: Graph) -> dict[Node, str]:
    """Return a key for every call node that no unrelated edit of the model changes: module path, op, ordinal there."""
    count: dict[str, int] = {}
    out = {}
    for node in graph.nodes:
        if node.op.startswith("call"):
            stem = f"{module_path(node)}/{ops.name(node)}"
            out[node] = f"{stem}#{count.get(stem, 0)}"
            count[stem] = count.get(stem, 0) + 1
    return out


def original_dtypes(graph: Graph, attribute: Callable[[str], Any]) -> dict[Node, Any]:
    """Return the dtype of every value of the graph as captured: a dtype, a tuple of them, None, or ANY.

    `attribute` resolves the target of a get_attr.
    """
    infer, out = SymbolicInference(), dict[Node, Any]()
    for node in graph.nodes:
        if "val" in node.meta:
            out[node] = dtypes_of(node.meta["val"])
        elif node.op == "get_attr":
            out[node] = dtypes_of(attribute(str(node.target)))
        elif node.op == "placeholder":
            out[node] = ANY
        elif node.op == "call_module":
            out[node] = ANY
        else:
            out[node] = infer(node, out.__getitem__) if node.op != "output" else None
    return out


def dtypes_of(value: Any) -> Any:
    """Return the dtype of a tensor, a tuple for a container, None for anything else."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(dtypes_of(v) for v in value)
    return None


def is_floating(dtype: Any) -> bool:
    """Say whether this is a floating dtype, or a container with one in it."""
    if isinstance(dtype, tuple):
        return any(is_floating(d) for d in dtype)
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


class Inference:
    """Output dtypes of a node from operand dtypes, by running the op on fake tensors of concrete sizes.

    The same (op, dtypes, literal arguments) is run once: dtypes do not depend on sizes, only on which operands are
    zero-dimensional.
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._memo: dict[Any, Any] = {}
        self._shapes: dict[int, tuple[int, ...]] = {}

    def __call__(self, node: Node, dtype_of: Callable[[Node], Any]) -> Any:
        """Return the dtypes of the node's output when its operands have the given dtypes.

        Raises whatever the op raises when it rejects them.
        """
        if node.target is ops.operator.getitem and isinstance(node.args[0], Node):
            held = dtype_of(node.args[0])
            if isinstance(held, tuple):
                return held[node.args[1]]  # type: ignore[index]
        key = self._key(node, dtype_of)
        if key is not None and key in self._memo:
            return self._memo[key]
        result = self._run(node, dtype_of)
        if key is not None:
            self._memo[key] = result
        return result

    def _key(self, node: Node, dtype_of: Callable[[Node], Any]) -> Any:
        def token(arg: Any) -> Any:
            if isinstance(arg, Node):
                val = arg.meta.get("val")
                if isinstance(val, torch.Tensor):
                    return dtype_of(arg), min(val.dim(), 1), val.dim()
                if isinstance(val, (tuple, list)):
                    return dtype_of(arg)
                return type(val)
            if isinstance(arg, (list, tuple)):
                return tuple(token(a) for a in arg)
            if isinstance(arg, (float, complex)) or (isinstance(arg, int) and not isinstance(arg, bool)):
                return type(arg)
            return arg

        key = (node.op, node.target, token(node.args), tuple((k, token(v)) for k, v in node.kwargs.items()))
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def _run(self, node: Node, dtype_of: Callable[[Node], Any]) -> Any:
        def fake(arg: Node) -> Any:
            val = arg.meta.get("val")
            wanted = dtype_of(arg)
            leaves, spec = pytree.tree_flatten(val)
            flat = pytree.tree_leaves(wanted, is_leaf=lambda x: x is None)
            if len(flat) != len(leaves):
                flat = [None] * len(leaves)
            return pytree.tree_unflatten([self._fake(v, d) for v, d in zip(leaves, flat, strict=True)], spec)

        with self._mode, torch.no_grad():
            args = torch.fx.map_arg(node.args, fake)
            kwargs = torch.fx.map_arg(node.kwargs, fake)
            if node.op == "call_method":
                return dtypes_of(getattr(args[0], str(node.target))(*args[1:], **kwargs))
            return dtypes_of(node.target(*args, **kwargs))  # type: ignore[operator]

    def _fake(self, value: Any, dtype: torch.dtype | None) -> Any:
        if isinstance(value, torch.Tensor):
            size = [_hint(s) for s in value.shape]
            stride = [_hint(s) for s in value.stride()] if value.layout is torch.strided else None
            made = dtype or value.dtype
            if stride is None:
                return torch.empty(size, dtype=made, device=value.device)
            return torch.empty_strided(size, stride, dtype=made, device=value.device)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return _hint(value)
        return value


def _hint(size: Any) -> Any:
    """Return a concrete number for a symbolic one; 4 where nothing is known of it."""
    if isinstance(size, (int, float, bool)):
        return size
    hint = getattr(size.node, "hint", None)
    return 4 if hint is None else hint


# CompositeImplicit ops that may return their input or a view of it without saying so in their schema.
_MAY_ALIAS = frozenset(
    "reshape flatten unflatten contiguous to type_as dropout feature_dropout alpha_dropout expand_as view_as reshape_as ravel "
    "movedim narrow chunk tensor_split hsplit vsplit dsplit numpy_T matrix_H mT atleast_1d atleast_2d atleast_3d squeeze "
    "broadcast_to swapaxes real imag resolve_conj resolve_neg positive size getitem alias detach rrelu meshgrid "
    "broadcast_tensors diagonal transpose permute t select slice unsqueeze expand view split unbind unfold".split()
)


def may_alias(node: Node) -> bool:
    """Say whether a node's output may share storage with an operand."""
    base = ops.name(node)
    if base.endswith("_") and not base.endswith("__"):
        return True
    if base in _MAY_ALIAS or base.startswith(("higher_order::", "module:")) or base == "setitem":
        return True
    schema = ops.schema_of(node)
    return bool(schema) and any(r.alias_info is not None for r in schema.returns)


def mutated_operands(node: Node) -> list[Node]:
    """Return the operands that a node writes to."""
    base = ops.name(node)
    if base in ("setitem",) or (base.endswith("_") and not base.endswith("__") and "::" not in base):
        return [a for a in node.args[:1] if isinstance(a, Node)]
    if "out" in node.kwargs:
        return [o.node for o in ops.operands(node) if o.name == "out"]
    schema = ops.schema_of(node) if isinstance(node.target, torch._ops.OpOverload) else None
    if schema is None:
        return []
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    return [o.node for o in ops.operands(node) if o.name in written]


class Aliases:
    """Sets of values that may share storage (union-find), and how often each set has been written by a point in time."""

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[Node, Node] = {}
        self.mutated: set[Node] = set()  # representatives
        self._epoch: dict[Node, list[int]] = {}
        self._order = {n: i for i, n in enumerate(graph.nodes)}
        writes: list[tuple[int, Node]] = []
        for node in graph.nodes:
            self._parent.setdefault(node, node)
            if not node.op.startswith("call"):
                continue
            if may_alias(node):
                for operand in ops.operands(node):
                    if _shares(node, operand):
                        self._union(operand.node, node)
            writes += [(self._order[node], w) for w in mutated_operands(node)]
        for when, written in writes:
            root = self.find(written)
            self.mutated.add(root)
            self._epoch.setdefault(root, []).append(when)

    def find(self, node: Node) -> Node:
        """Return the representative of a value's alias set."""
        while self._parent.setdefault(node, node) is not node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def epoch(self, node: Node, at: Node) -> int:
        """Return how many writes to the value's storage come before the node `at`."""
        when = self._order[at]
        return sum(1 for w in self._epoch.get(self.find(node), ()) if w < when)

    def is_mutated(self, node: Node) -> bool:
        """Say whether anything in the value's alias set is ever written."""
        return self.find(node) in self.mutated

    def sets(self) -> dict[Node, list[Node]]:
        """Return the mutated alias sets, by representative."""
        out: dict[Node, list[Node]] = {root: [] for root in self.mutated}
        for node in self._parent:
            root = self.find(node)
            if root in out:
                out[root].append(node)
        return out

    def _union(self, a: Node, b: Node) -> None:
        self._parent[self.find(b)] = self.find(a)


def _shares(node: Node, operand: ops.Operand) -> bool:
    """Say whether this operand, of an op that aliases, is one that it aliases (the first, unless the schema says)."""
    schema = ops.schema_of(node)
    if schema is not None and any(r.alias_info is not None for r in schema.returns):
        for argument in schema.arguments:
            if argument.name == operand.name:
                return argument.alias_info is not None
    base = ops.name(node)
    if base.startswith(("higher_order::", "module:")) or base in ("meshgrid", "broadcast_tensors", "atleast_1d"):
        return True
    return operand.node is (node.args[0] if node.args else None)


SET_GRAD = torch._C._set_grad_enabled


def grad_regions(graph: Graph) -> dict[Node, int]:
    """Return for each node the number of its grad-mode region: no cast is shared or moved across a border."""
    region, out = 0, {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is SET_GRAD:
            region += 1
        out[node] = region
    return out


class _Any:
    """The dtype of a value that nothing is known of: an input of a model captured without inputs."""

    def __repr__(self) -> str:
        return "any"


ANY = _Any()


class SymbolicInference:
    """Output dtypes without shapes: from the rules alone. What it says is sound; ANY where it cannot say."""

    def __call__(self, node: Node, dtype_of: Callable[[Node], Any]) -> Any:
        """Return the dtypes of the node's output when its operands have the given dtypes."""
        name = ops.name(node)
        if name == "getitem" and isinstance(node.args[0], Node):
            held = dtype_of(node.args[0])
            if isinstance(held, tuple) and isinstance(node.args[1], int):
                return held[node.args[1]]
            return held
        if name in ("getattr", "size", "dim", "numel", "is_floating_point", "stride", "shape", "storage_offset"):
            return None
        literal = literal_dtype(node)
        if literal is not None:
            return literal
        given = [d for d in (dtype_of(o.node) for o in ops.operands(node)) if d is not None]
        floats = [d for d in _leaves(given) if isinstance(d, torch.dtype) and d.is_floating_point]
        found = rule(name)
        out = found.out if found else ("float",)
        ran = floats[0] if floats and (out[0] == "first" or name.endswith("_")) else _widest(floats)
        if ran is None:
            ran = ANY if any(d is ANY for d in _leaves(given)) else (given[0] if given else None)
        if not given and found is not None and found.cpu == "keep":
            ran = ANY
        kinds = {"float": ran, "first": ran, "bool": torch.bool, "int": torch.int64, "complex": ANY}
        made = tuple(kinds[o] for o in out)
        return made[0] if len(made) == 1 or "dim" not in node.kwargs and name in ("max", "min") else made


def _leaves(dtypes: Any) -> list[Any]:
    return [x for d in dtypes for x in (_leaves(d) if isinstance(d, tuple) else [d])]


def _widest(dtypes: Sequence[torch.dtype]) -> torch.dtype | None:
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def literal_dtype(node: Node) -> torch.dtype | None:
    """Return the dtype that a call names literally: a cast's, or a `dtype=` argument's."""
    if node.op == "call_method" and str(node.target) in ops.CAST_METHODS:
        return ops.CAST_METHODS[str(node.target)]
    given = ops.argument(node, "dtype")
    if isinstance(given, torch.dtype):
        return given
    if ops.name(node) == "to":
        return next((a for a in node.args if isinstance(a, torch.dtype)), None)
    return None


@contextlib.contextmanager
def no_autocast(devices: Sequence[str] = ("cpu", "cuda")) -> Any:
    """Run without ambient autocast on any of the devices fxamp converts for."""
    with contextlib.ExitStack() as stack:
        for device in devices:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


__all__ = ["FakeTensor"]
