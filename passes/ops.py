"""One canonical name for an op, whatever the dialect it is spelled in.

`nn.ReLU()(x)`, `F.relu(x)`, `torch.relu(x)`, `x.relu()` and `torch.ops.aten.relu.default(x)` are all `relu`; their in-place
forms are all `relu_`. The name is that of the ATen operator, without the overload. Operators of other namespaces
keep theirs (`my_lib::my_op`).

Before: node.target is F.relu, kwargs {"inplace": True}        After: name(node) == "relu_"
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

# Spellings whose Python name is not the ATen name.
ALIASES: dict[str, str] = {
    # operators
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
    "neg": "neg", "pos": "positive", "pow": "pow", "matmul": "matmul", "invert": "bitwise_not", "inv": "bitwise_not",
    "and_": "bitwise_and", "or_": "bitwise_or", "xor": "bitwise_xor", "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift", "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_",
    "ifloordiv": "floor_divide_", "imod": "remainder_", "ipow": "pow_", "imatmul": "matmul", "iand": "bitwise_and_",
    "ior": "bitwise_or_", "ixor": "bitwise_xor_",
    # torch functions and methods that are another op's synonym
    "absolute": "abs", "arccos": "acos", "arcsin": "asin", "arctan": "atan", "arctan2": "atan2", "arccosh": "acosh",
    "arcsinh": "asinh", "arctanh": "atanh", "clip": "clamp", "concat": "cat", "concatenate": "cat", "divide": "div",
    "true_divide": "div", "multiply": "mul", "subtract": "sub", "negative": "neg", "greater": "gt", "greater_equal": "ge",
    "less": "lt", "less_equal": "le", "not_equal": "ne", "fix": "trunc", "ger": "outer", "moveaxis": "movedim",
    "swapaxes": "transpose", "swapdims": "transpose", "row_stack": "vstack", "float_power": "float_power",
    "special_expit": "sigmoid", "special_softmax": "softmax", "special_log_softmax": "log_softmax",
    "special_logsumexp": "logsumexp", "special_erf": "erf", "special_erfinv": "erfinv", "special_expm1": "expm1",
    "special_log1p": "log1p", "det": "det", "inverse": "inverse", "T": "t", "mT": "transpose", "H": "adjoint",
    # torch.nn.functional
    "cross_entropy": "cross_entropy_loss", "grid_sample": "grid_sampler", "affine_grid": "affine_grid_generator",
    "unfold": "im2col", "fold": "col2im", "lrn": "local_response_norm", "nll_loss_nd": "nll_loss",
    "max_pool1d_with_indices": "max_pool1d", "adaptive_max_pool1d_with_indices": "adaptive_max_pool1d",
    "_threshold": "threshold", "_adaptive_avg_pool2d": "adaptive_avg_pool2d", "alpha_dropout": "alpha_dropout",
    # exporter's spellings
    "_to_copy": "to", "convert_element_type": "to", "dtype": "to", "_softmax": "_softmax", "sym_size": "sym_size",
    "_safe_softmax": "_safe_softmax", "_unsafe_view": "view", "lift_fresh_copy": "clone", "lift_fresh": "clone",
    # casts by method
    "float": "to", "half": "to", "bfloat16": "to", "double": "to", "long": "to", "int": "to", "short": "to",
    "char": "to", "byte": "to", "bool": "to", "cfloat": "to", "cdouble": "to", "chalf": "to", "type": "to",
}  # fmt: skip

CAST_METHODS: dict[str, torch.dtype] = {
    "float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64,
    "long": torch.int64, "int": torch.int32, "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
    "bool": torch.bool, "cfloat": torch.complex64, "cdouble": torch.complex128, "chalf": torch.complex32,
}  # fmt: skip

# `unfold` the method is aten.unfold (a view); `F.unfold` is im2col.
_METHOD_ONLY = {"unfold": "unfold", "T": "t"}
_OPERATORS = {
    getattr(operator, n): ALIASES.get(n, n)
    for n in dir(operator)
    if not n.startswith("__") and callable(getattr(operator, n))
}


class Operand(NamedTuple):
    """One tensor operand of a node: the argument's name, its place in a list argument (else 0), and the producer."""

    name: str
    index: int
    node: Node


def name(node: Node) -> str:
    """Return the canonical op name of a call node, "" for any other node.

    An opaque leaf module is `module:` and its type's name.
    """
    if node.op == "call_module":
        return f"module:{node.meta.get('leaf_type', node.target)}"
    if node.op == "call_method":
        method = str(node.target)
        return _METHOD_ONLY.get(method) or canonical(method)
    if node.op != "call_function":
        return ""
    found = of_target(node.target)
    if not found.endswith("_") and node.kwargs.get("inplace") is True:
        return found + "_"
    if not found.endswith("_") and _positional_inplace(node):
        return found + "_"
    return found


@functools.lru_cache(maxsize=4096)
def of_target(target: Any) -> str:
    """Return the canonical name of a call_function target."""
    if isinstance(target, torch._ops.OpOverload):
        space, _, op = target._schema.name.partition("::")
        return canonical(op) if space in ("aten", "prims") else f"{space}::{op}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order::{target.name()}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        space, _, op = target._qualified_op_name.partition("::")
        return canonical(op) if space in ("aten", "prims") else f"{space}::{op}"
    if target in _OPERATORS:
        return _OPERATORS[target]
    dispatched = _boolean_dispatch(target)
    if dispatched:
        return dispatched
    plain = getattr(target, "__name__", type(target).__name__)
    module = getattr(target, "__module__", "") or ""
    if module.startswith(("torch", "_operator")) or module in ("", "builtins", "math"):
        return canonical(_namespace(target) + plain)
    return f"{module}.{plain}"


def canonical(op: str) -> str:
    """Return the canonical name for an ATen, function or method name."""
    inplace = op.endswith("_") and not op.endswith("__") and op not in ALIASES
    base = op[:-1] if inplace else op
    if base.startswith("__") and base.endswith("__"):
        base = base.strip("_")
        if base.startswith("r") and base[1:] in ALIASES:
            base = base[1:]
    base = ALIASES.get(base, base)
    return base + "_" if inplace and not base.endswith("_") else base


def _namespace(target: Any) -> str:
    """Return the ATen prefix of `torch.linalg`, `torch.fft` and `torch.special` functions."""
    plain = getattr(target, "__name__", "")
    for prefix in ("linalg", "fft", "special"):
        if plain.startswith(prefix + "_"):
            return ""
        space = getattr(torch, prefix)
        if getattr(space, plain, None) is target:
            return prefix + "_"
    return ""


@functools.cache
def _dispatched() -> dict[Any, str]:
    """Functions of torch.nn.functional that choose by `return_indices` and so have lost their name."""
    import torch.nn.functional as functional

    return {
        f: n.removesuffix("_with_indices")
        for n, f in vars(functional).items()
        if callable(f) and getattr(f, "__name__", "") == "fn"
    }


def _boolean_dispatch(target: Any) -> str:
    try:
        return _dispatched().get(target, "")
    except TypeError:  # unhashable target
        return ""


def _positional_inplace(node: Node) -> bool:
    """Say whether `inplace` was passed by position."""
    if not callable(node.target) or isinstance(node.target, torch._ops.OpOverload) or len(node.args) < 2:
        return False
    names = arg_names(node.target)
    return "inplace" in names and names.index("inplace") < len(node.args) and node.args[names.index("inplace")] is True


@functools.lru_cache(maxsize=4096)
def arg_names(target: Any) -> tuple[str, ...]:
    """Return the argument names of a target, as its schema or its Python signature has them; () when unknown."""
    if isinstance(target, torch._ops.OpOverload):
        return tuple(a.name for a in target._schema.arguments)
    if inspect.isfunction(target):
        return tuple(inspect.signature(target).parameters)
    schema = first_schema(of_target(target) if not isinstance(target, str) else canonical(target))
    return tuple(a.name for a in schema.arguments) if schema else ()


@functools.lru_cache(maxsize=4096)
def first_schema(op: str) -> Any:
    """Return the schema of the first overload of an ATen op, or None."""
    packet = getattr(torch.ops.aten, op, None) if op and "::" not in op else None
    if packet is None:
        return None
    try:
        return getattr(packet, packet.overloads()[0])._schema
    except (AttributeError, IndexError):
        return None


def schema_of(node: Node) -> Any:
    """Return the schema that says what a node aliases and mutates, or None."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema
    return first_schema(name(node)) or first_schema(name(node).removesuffix("_"))


def operands(node: Node) -> Iterator[Operand]:
    """Yield every Node operand of a call, with the argument it stands in."""
    names: tuple[str, ...] = ()
    if node.op == "call_function":
        names = arg_names(node.target)
    elif node.op == "call_method":
        names = ("self", *arg_names(str(node.target))[1:])
    for i, arg in enumerate(node.args):
        yield from _nodes_in(names[i] if i < len(names) else f"arg{i}", arg)
    for key, arg in node.kwargs.items():
        yield from _nodes_in(key, arg)


def _nodes_in(where: str, arg: Any) -> Iterator[Operand]:
    if isinstance(arg, Node):
        yield Operand(where, 0, arg)
    elif isinstance(arg, (list, tuple)):
        for i, item in enumerate(arg):
            if isinstance(item, Node):
                yield Operand(where, i, item)


def map_operands(node: Node, replace: Callable[[Operand], Node]) -> None:
    """Replace each operand of a node in place, position by position (one value may stand in several)."""
    names: tuple[str, ...] = ()
    if node.op == "call_function":
        names = arg_names(node.target)
    elif node.op == "call_method":
        names = ("self", *arg_names(str(node.target))[1:])

    def new(where: str, arg: Any) -> Any:
        if isinstance(arg, Node):
            return replace(Operand(where, 0, arg))
        if isinstance(arg, (list, tuple)):
            items = [replace(Operand(where, i, a)) if isinstance(a, Node) else a for i, a in enumerate(arg)]
            return type(arg)(items) if type(arg) in (list, tuple) else items
        return arg

    node.args = tuple(new(names[i] if i < len(names) else f"arg{i}", a) for i, a in enumerate(node.args))
    node.kwargs = {k: new(k, a) for k, a in node.kwargs.items()}


def argument(node: Node, key: str, default: Any = None) -> Any:
    """Return the value of an argument of a call by its name, wherever it was passed."""
    if key in node.kwargs:
        return node.kwargs[key]
    names: tuple[str, ...] = ()
    if node.op == "call_function":
        names = arg_names(node.target)
    elif node.op == "call_method":
        names = ("self", *arg_names(str(node.target))[1:])
    if key in names and names.index(key) < len(node.args):
        return node.args[names.index(key)]
    return default
