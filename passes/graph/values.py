"""The values of a graph: where each comes from, and its dtype."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .._torch import SYMBOLS, FakeTensor, FakeTensorMode, example_sizes, pytree, quiet_fakes
from ..contract.devices import DEVICES
from ..contract.policy import type_names
from ..ops import ops
from ..ops.rules import row_of
from ..runtime.casts import ELIGIBLE as ELIGIBLE
from ..runtime.casts import cast_floating
from .notes import is_ours

LOW_DTYPES = (torch.float16, torch.bfloat16)
_FRAME = re.compile(r'File "(.*)", line (\d+)')
_TORCH = os.path.dirname(torch.__file__).replace("\\", "/") + "/"


# The dtype of a value: that of a tensor, one for each item of a container, None for what is no tensor.
ValueDtype: TypeAlias = "torch.dtype | tuple[ValueDtype, ...] | None"
Dtypes: TypeAlias = dict[Node, ValueDtype]


# Where a node comes from.


def module_path(node: Node) -> str:
    """Return the path of the innermost module that made a node, "" for the root."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]) if stack else ""


def module_stack(node: Node) -> list[tuple[str, str]]:
    """Return (path, qualified type name) of the modules a node was made in, outermost first."""
    stack = node.meta.get("nn_module_stack", {}).values()
    return [(str(path), t if isinstance(t, str) else f"{t.__module__}.{t.__qualname__}") for path, t in stack]


def module_types(graph: Graph) -> dict[Node, list[tuple[str, tuple[str, ...]]]]:
    """Return the modules that every call was made in, outermost first: (path, names of its class and their bases)."""

    def names(name: str) -> tuple[str, ...]:
        module, _, attribute = name.rpartition(".")
        kind = getattr(torch.nn, attribute, None) if module.startswith("torch.nn") else None
        return type_names(kind if isinstance(kind, type) else name)  # of a class of torch.nn the bases match too

    return {n: [(p, names(t)) for p, t in module_stack(n)] for n in graph.nodes if n.op.startswith("call")}


def frames(node: Node) -> list[tuple[str, int, str]]:
    """Return (file, line, code) of the calls that made a node, outermost first; none when capture did not keep them."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    out = []
    for i, line in enumerate(lines):
        if match := _FRAME.match(line):
            code = lines[i + 1] if i + 1 < len(lines) and not _FRAME.match(lines[i + 1]) else ""
            out.append((match[1].replace("\\", "/"), int(match[2]), code))
    return out


def own_frame(node: Node) -> tuple[str, int, str] | None:
    """Return the innermost frame outside torch, that of the user; else the innermost."""
    calls = frames(node)
    return next((f for f in reversed(calls) if not f[0].startswith(_TORCH)), calls[-1] if calls else None)


def source(node: Node) -> str:
    """Return "file.py:12: code" of the user's line that made a node, "" when capture did not keep it."""
    frame = own_frame(node)
    return f"{frame[0].rsplit('/', 1)[-1]}:{frame[1]}: {frame[2]}" if frame else ""


def described(node: Node) -> str:
    """Return a call as errors name it: its op, the user's line, and the module."""
    return f"{ops.name(node)} ({source(node) or node.name}, module '{module_path(node)}')"


def keys(nodes: Iterable[Node]) -> dict[Node, str]:
    """Return a key for every call, module path, op and ordinal; calls that only carry numbers have none."""
    return numbered(node for node in nodes if node.op.startswith("call") and not ops.carries_number(node))


def numbered(nodes: Iterable[Node]) -> dict[Node, str]:
    """Return a key for each node: module path, op, and ordinal among those of both; for what is no call, its target."""
    count: Counter[str] = Counter()
    out = {}
    for node in nodes:
        stem = f"{module_path(node)}/{ops.name(node) if node.op.startswith('call') else node.target}"
        out[node] = f"{stem}#{count[stem]}"
        count[stem] += 1
    return out


def node_names(graph: Graph) -> dict[Node, str]:
    """Return the name of every input, parameter, buffer and call of an emitted graph; calls have their keys."""
    targets = {n: str(n.target) for op in ("placeholder", "get_attr") for n in graph.find_nodes(op=op)}
    author = keys(n for n in graph.nodes if not is_ours(n))  # without what was inserted, so that keys stay the same
    return {**targets, **author}


# Dtypes.


def dtypes_of(value: Any) -> ValueDtype:
    """Return the dtype of a tensor, a tuple for a container, None for anything else."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(dtypes_of(v) for v in value)
    return None


def original_dtypes(graph: Graph, attribute: Callable[[str], Any]) -> Dtypes:
    """Return the dtype of every value of a graph as captured; `attribute` resolves the target of a get_attr."""
    return {
        n: dtypes_of(n.meta["val"] if "val" in n.meta else attribute(str(n.target)) if n.op == "get_attr" else None)
        for n in graph.nodes
    }


def retyped(value: Any, dtype: ValueDtype) -> Any:
    """Return a fake value in the dtype that it now has; a container item by item."""
    if isinstance(value, (tuple, list)) and isinstance(dtype, tuple) and len(value) == len(dtype):
        return type(value)([retyped(v, d) for v, d in zip(value, dtype, strict=True)])
    if not isinstance(value, torch.Tensor) or not isinstance(dtype, torch.dtype) or value.dtype == dtype:
        return value
    with torch.no_grad(), value.fake_mode if isinstance(value, FakeTensor) else contextlib.nullcontext():
        return value.to(dtype)


def recast(before: ValueDtype, dtype: torch.dtype) -> ValueDtype:
    """Return what a cast to a dtype makes of the dtypes of a value."""
    if isinstance(before, tuple):
        return tuple(recast(d, dtype) for d in before)
    return dtype if before in ELIGIBLE else before


def is_floating(dtype: ValueDtype) -> bool:
    """Say whether this is a floating dtype, or a container with one in it."""
    return first_float(dtype) is not None


def first_float(dtype: ValueDtype) -> torch.dtype | None:
    """Return the dtype if it is floating, or the first floating one of a container; else None."""
    if isinstance(dtype, tuple):
        return next((d for d in map(first_float, dtype) if d is not None), None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None


def refuse_mixed(node: Node, dtype_of: Callable[[Node], Any]) -> None:
    """Raise TypeError where a kernel rejects the mix of float dtypes of its operands, since not every fake one does."""
    row = row_of(node)
    if not row.same_dtype and not row.uncast:
        return
    dtypes = [(o.name in row.uncast, d) for o in ops.operands(node) if (d := dtype_of(o.node)) in ELIGIBLE]
    first, affine = ({d for of_weight, d in dtypes if of_weight is side} for side in (False, True))
    if row.same_dtype and len(first | affine) > 1:
        raise TypeError("the kernel takes operands of one floating dtype")
    fits = not affine or affine == first or (affine == {torch.float32} and first <= {*LOW_DTYPES})
    if "bias" in row.uncast and not fits:
        raise TypeError("the kernel takes weights of its input's dtype, or FP32 ones beside a low input")


def literal_dtype(node: Node) -> torch.dtype | None:
    """Return the dtype that a call names literally: a cast's, or a `dtype=` argument's."""
    target = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    is_cast = row_of(node).is_cast
    if is_cast and target in ops.CAST_METHODS:
        return ops.CAST_METHODS[target]
    named = ops.argument(node, "dtype")
    if isinstance(named, torch.dtype):
        return named
    arguments = (*node.args, *node.kwargs.values()) if is_cast else ()
    texts = (_LEGACY.get(a.rpartition(".")[2]) if isinstance(a, str) else a for a in arguments)
    return next((d for d in texts if isinstance(d, torch.dtype)), None)


# The types of `x.type("torch.DoubleTensor")`, whatever device one names.
_LEGACY = {
    f"{n}Tensor": getattr(torch, f"{n}Tensor").dtype
    for n in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
}


@contextlib.contextmanager
def no_autocast(devices: Iterable[str] = tuple(DEVICES)) -> Iterator[None]:
    """Run without ambient autocast on any of the devices fxamp converts for."""
    with contextlib.ExitStack() as stack:
        for device in devices:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


class Inference:
    """Output dtypes of a node from operand dtypes, by running the op on fake tensors of concrete sizes.

    Results are cached: an op's dtypes depend on the dtypes and ranks of its operands and on its literal arguments, not
    on sizes. Two exceptions are not remembered: custom ops, which may do anything, and those with several outputs,
    whose number sizes decide.
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        self._memo: dict[Any, ValueDtype] = {}

    def __call__(self, node: Node, dtype_of: Callable[[Node], ValueDtype]) -> ValueDtype:
        """Return the dtypes of the node's output for operands of these dtypes; raise what the op raises on them."""
        row = row_of(node)
        if node.target is cast_floating:
            return recast(dtype_of(node.args[0]), node.args[1])  # type: ignore[arg-type]
        if (row.asks == "item" or row.shards) and isinstance(node.args[0], Node):
            items = dtype_of(node.args[0])
            if row.shards or isinstance(items, tuple):
                return items if row.shards else items[node.args[1]]  # type: ignore[index]
        key = _key(node, dtype_of)
        if key is None:
            return self._run(node, dtype_of)
        if key not in self._memo:
            self._memo[key] = self._run(node, dtype_of)
        return self._memo[key]

    def _run(self, node: Node, dtype_of: Callable[[Node], ValueDtype]) -> ValueDtype:
        def fake(arg: Node) -> Any:
            if (owner := dtype_owner(arg)) is not None:
                return dtype_of(owner)
            leaves, spec = pytree.tree_flatten(arg.meta.get("val"))
            wanted = pytree.tree_leaves(dtype_of(arg), is_leaf=lambda d: d is None)
            if len(wanted) != len(leaves):
                wanted = [None] * len(leaves)
            return pytree.tree_unflatten([concrete(v, d) for v, d in zip(leaves, wanted, strict=True)], spec)

        try:
            with quiet_fakes(), self._mode, torch.no_grad():
                return dtypes_of(run_first_step(node, fake))
        except Exception:
            ran = {d for n in node.all_input_nodes if (d := dtype_of(n)) in ELIGIBLE}
            if not row_of(node).recurrent or len(ran) != 1:
                raise
            return recast(dtypes_of(node.meta.get("val")), ran.pop())  # cuDNN reads the state of its dropout


def run(node: Node, value_of: Callable[[Node], Any]) -> Any:
    """Run the op of a call on these values of its operands."""
    return _call(node, *torch.fx.map_arg((node.args, dict(node.kwargs)), value_of))


def first_step(x: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """Return the first time step of an input, [1, batch, features] of [steps, batch, features], or without a batch."""
    return x.narrow(1 if batch_first and x.dim() == 3 else 0, 0, 1)


def run_first_step(node: Node, value_of: Callable[[Node], Any]) -> Any:
    """Run the op of a call as `run` does, but a recurrence over its first time step alone, which is like all others."""
    args: Any
    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), value_of)
    if row_of(node).recurrent and "batch_first" in ops.names_of(node):
        args = (first_step(args[0], bool(ops.argument(node, "batch_first"))), *args[1:])
    return _call(node, args, kwargs)


def _call(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    target: Any = node.target
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def _key(node: Node, dtype_of: Callable[[Node], ValueDtype]) -> Any:
    """Return all that the output dtypes of a call can depend on; None if that is unknown."""
    schema = ops.schema_of(node)  # of a list of tensors a number among the arguments may decide the length
    lists = schema is not None and any(str(r.type) == "List[Tensor]" for r in schema.returns)
    if lists or "::" in ops.name(node) or isinstance(node.meta.get("val"), (tuple, list)):
        return None

    def token(arg: Any) -> Any:
        if isinstance(arg, Node):
            if (owner := dtype_owner(arg)) is not None:
                return dtype_of(owner)
            val = arg.meta.get("val")
            if isinstance(val, torch.Tensor):
                return dtype_of(arg), val.dim(), val.device, val.layout
            return (dtype_of(arg), len(val)) if isinstance(val, (tuple, list)) else type(val)
        if isinstance(arg, (list, tuple)):
            return type(arg), *(token(a) for a in arg)
        if isinstance(arg, slice):
            return slice
        return type(arg) if isinstance(arg, (int, float, complex)) and not isinstance(arg, bool) else arg

    key = (node.op, node.target, token(node.args), tuple((k, token(v)) for k, v in node.kwargs.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def concrete(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a value of concrete size like a fake one, of another dtype where one is given; fake in a fake mode."""
    if isinstance(value, SYMBOLS):
        return concrete_size(value)
    if not isinstance(value, torch.Tensor):
        return value
    size, dtype = [concrete_size(s) for s in value.shape], dtype or value.dtype
    if value.layout is not torch.strided:
        return torch.empty(size, dtype=dtype, device=value.device, layout=value.layout)
    return torch.empty_strided(size, [concrete_size(s) for s in value.stride()], dtype=dtype, device=value.device)


def concrete_size(size: Any) -> Any:
    """Return a concrete number for a symbolic one, others unchanged; every size that only data decides counts as 4."""
    if not isinstance(size, SYMBOLS):
        return size
    if size.node.is_nested_int():  # of a jagged dimension
        return 4
    expr = size.node.expr.xreplace(example_sizes(size))
    number = expr.xreplace(dict.fromkeys(expr.free_symbols, 4))
    return {int: int, float: float, bool: bool}[size.node.pytype](number)


DYNAMIC = 1_024  # what a dimension counts as that may have another size in another call


def counted_size(size: Any) -> int:
    """Return a size as decisions count it: a dynamic one as 1,024, lest a plan depend on the batch of the example."""
    if not isinstance(size, SYMBOLS):
        return int(size)
    if size.node.is_nested_int():  # of a jagged dimension
        return DYNAMIC
    expr = size.node.expr
    return max(1, int(expr.xreplace(dict.fromkeys(expr.free_symbols, DYNAMIC))))


def dtype_reference(node: Node) -> Node | None:
    """Return the tensor whose dtype a call takes: `x.to(y)`, `x.type_as(y)`, `zeros(2, dtype=y.dtype)`."""
    if not row_of(node).is_cast:
        dtype = ops.argument(node, "dtype")
        return dtype_owner(dtype) if isinstance(dtype, Node) else None
    for arg in (*node.args[1:], *node.kwargs.values()):
        if isinstance(arg, Node):
            owner = dtype_owner(arg)
            if owner is not None or row_of(arg).asks in ("", "item"):
                return owner or arg
    return None


def dtype_owner(node: Node) -> Node | None:
    """Return y where the node is `y.dtype`, which is read when the graph runs."""
    if not node.op.startswith("call") or row_of(node).asks != "attribute" or node.args[1] != "dtype":
        return None
    return node.args[0] if isinstance(node.args[0], Node) else None
