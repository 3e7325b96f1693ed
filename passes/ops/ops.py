"""One canonical name for an op, whatever the dialect it is spelled in.

`nn.ReLU()(x)`, `F.relu(x)`, `torch.relu(x)`, `x.relu()` and `torch.ops.aten.relu.default(x)` are all `relu`; their
in-place forms are all `relu_`. The name is that of the ATen operator, without the overload; a function that ATen does
not have keeps its own (`interpolate`). Operators of other namespaces keep theirs (`my_lib::my_op`), and so do functions
of other modules (`my_module.my_function`).

Before: node.target is F.relu, kwargs {"inplace": True}        After: name(node) == "relu_"
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.fx.node import map_aggregate

from .. import _torch
from .._torch import HigherOrderOperator, OpOverload, OpOverloadPacket, boolean_dispatched, own_schema, qualified_name
from ..contract.devices import DEVICES
from ..runtime import casts, norms, regions, rnn

# The tables: canonical name -> its other spellings in one dialect.

# Operators of ATen that do the same; their in-place forms follow.
_SYNONYMS = {
    "abs": "absolute", "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan",
    "atan2": "arctan2", "atanh": "arctanh", "cat": "concat concatenate", "clamp": "clip", "div": "divide true_divide",
    "mul": "multiply", "sub": "subtract", "neg": "negative", "trunc": "fix", "outer": "ger", "movedim": "moveaxis",
    "gt": "greater", "ge": "greater_equal", "lt": "less", "le": "less_equal", "ne": "not_equal",
    "transpose": "swapaxes swapdims", "mm": "dsmm spmm", "sigmoid": "special_expit", "softmax": "special_softmax",
    "log_softmax": "special_log_softmax", "logsumexp": "special_logsumexp", "erf": "special_erf",
    "erfinv": "special_erfinv", "expm1": "special_expm1", "log1p": "special_log1p", "xlogy": "special_xlogy",
    "conj": "_conj",
    "adaptive_max_pool1d": "adaptive_max_pool1d_with_indices",
    "adaptive_max_pool2d": "adaptive_max_pool2d_with_indices",
    "adaptive_max_pool3d": "adaptive_max_pool3d_with_indices",
    "fractional_max_pool2d": "fractional_max_pool2d_with_indices",
    "fractional_max_pool3d": "fractional_max_pool3d_with_indices",
    "to": "_to_copy", "view": "_unsafe_view", "clone": "lift_fresh_copy",  # as the exporter spells them
}  # fmt: skip

# The module `operator`, and the methods `__add__`, `__radd__`, `__iadd__` that it stands for.
_OPERATORS = {
    "add": "add", "sub": "sub", "rsub": "rsub", "mul": "mul", "div": "truediv div", "floor_divide": "floordiv",
    "remainder": "mod", "neg": "neg", "positive": "pos", "pow": "pow", "matmul": "matmul imatmul",
    "bitwise_not": "invert inv", "bitwise_and": "and_ and", "bitwise_or": "or_ or", "bitwise_xor": "xor",
    "bitwise_left_shift": "lshift", "bitwise_right_shift": "rshift", "add_": "iadd", "sub_": "isub", "mul_": "imul",
    "div_": "itruediv idiv", "floor_divide_": "ifloordiv", "remainder_": "imod", "pow_": "ipow", "bitwise_and_": "iand",
    "bitwise_or_": "ior", "bitwise_xor_": "ixor", "bitwise_left_shift_": "ilshift", "bitwise_right_shift_": "irshift",
}  # fmt: skip

CAST_METHODS: dict[str, torch.dtype] = {
    "float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64,
    "long": torch.int64, "int": torch.int32, "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
    "bool": torch.bool, "cfloat": torch.complex64, "cdouble": torch.complex128, "chalf": torch.complex32,
}  # fmt: skip

# Methods of a tensor, and its attributes (`getattr(x, "T")` in a symbolic graph).
_METHODS = {"to": " ".join((*CAST_METHODS, "type", *DEVICES)), "dim": "ndimension", "numel": "nelement"}
_ATTRIBUTES = {
    "numpy_T": "T", "mT": "mT", "matrix_H": "H", "mH": "mH", "real": "real", "imag": "imag", "detach": "data",
    "element_size": "itemsize nbytes",
}  # fmt: skip

# Primitives that ATen has under another name.
_PRIMS = {
    "to": "convert_element_type device_put", "permute": "transpose", "flip": "rev", "alias": "view_of",
    "expand": "broadcast_in_dim", "flatten": "collapse collapse_view", "unflatten": "split_dim", "arange": "iota",
    "erfinv": "erf_inv", "special_erfcx": "erfcx", "special_ndtri": "ndtri", "special_zeta": "zeta",
    "special_i0": "bessel_i0", "special_i0e": "bessel_i0e", "special_i1": "bessel_i1", "special_i1e": "bessel_i1e",
    "bitwise_left_shift": "shift_left", "bitwise_right_shift": "shift_right_arithmetic", "linalg_svd": "svd",
    "clone": "copy_strided", "copy_": "copy_to", "resize_": "resize",
}  # fmt: skip

# Functions whose name means another op in ATen, or is unknown there.
_FUNCTIONS: dict[Any, str] = {
    F.cross_entropy: "cross_entropy_loss", F.grid_sample: "grid_sampler", F.affine_grid: "affine_grid_generator",
    F.unfold: "im2col", F.fold: "col2im", F.threshold: "threshold", casts.again: "to", rnn.lstm: "lstm", rnn.rnn: "rnn",
    rnn.gru: "gru", norms.layer_norm: "layer_norm",
    abs: "abs", pow: "pow", round: "round", getattr: "getattr", _torch.DATA_OF: "detach", _torch.TENSOR_OF: "tensor",
    regions.recompute: "higher_order::tag_activation_checkpoint",
}  # fmt: skip

# Arguments that turn a Python function into another op.
_SUFFIXES: dict[str, dict[Any, str]] = {
    "inplace": {True: "_"},
    "return_indices": {True: "_with_indices"},
    "nonlinearity": {"tanh": "_tanh", "relu": "_relu"},
}

# Modules whose functions have the names of ATen. The private ones hold torch's builtin functions; some have no module.
_SPACES = frozenset({
    None, "torch", "torch.functional", "torch.nn.functional", "torch.nn.utils.rnn", "torch._linalg_utils", "torch._C",
    "torch._C._nn", "torch._C._special", "torch._C._linalg", "torch._C._fft",
})  # fmt: skip

# Keywords of torch's builtin functions that their schemas do not have.
_KEYWORDS = {"input": "self", "x": "self", "axis": "dim", "keepdims": "keepdim"}
_ARGUMENTS = {"getitem": ("self", "index"), "setitem": ("self", "index", "value"), "getattr": ("self", "name")}


def _by_spelling(table: dict[str, str]) -> dict[str, str]:
    """Turn name -> spellings into spelling -> name."""
    return {spelling: name for name, spellings in table.items() for spelling in spellings.split()}


SYNONYMS, OPERATORS = _by_spelling(_SYNONYMS), _by_spelling(_OPERATORS)
METHODS, ATTRIBUTES, PRIMS = _by_spelling(_METHODS), _by_spelling(_ATTRIBUTES), _by_spelling(_PRIMS)

# The key of `node.meta` for fxamp's notes on a node, a `graph.notes.Note`.
NOTE = "fxamp"


class Operand(NamedTuple):
    """One operand of a node: the argument's name, its place among the leaves of that argument, and the producer."""

    name: str
    index: int  # type: ignore[assignment]  # hides tuple.index
    node: Node

    @property
    def place(self) -> tuple[str, int]:
        """Its argument's name, and its place among the leaves of that."""
        return self.name, self.index


# Names.

_OPERATIONS = ("call_function", "call_method")


def name(node: Node) -> str:
    """Return the canonical op name of a call, `module:` and its type's name of an opaque one, "" for any other node."""
    if node.op in _OPERATIONS:
        return view_of(node).name
    return f"module:{getattr(node.meta.get(NOTE), 'leaf', '') or node.target}" if node.op == "call_module" else ""


class OpView:
    """A call as analyses read it, worked out once for a node as it is: they ask for its name a hundred times."""

    __slots__ = ("args", "inputs", "kwargs", "name", "names", "op", "operands", "row", "schema", "target", "values")

    def __init__(self, node: Node, op: str, target: Any, args: Any, kwargs: Any) -> None:
        # Whoever changes a node gives it other objects, so its view holds as long as these are the same.
        self.op, self.target, self.args, self.kwargs = op, target, args, kwargs
        self.inputs = node.all_input_nodes
        self.name = _name(node) if op in _OPERATIONS else ""
        self.row: Any = None  # what is known of the op, once `rules.row_of` has looked it up
        self.values: list[Any] | None = None  # of the nodes that it reads; on these depends what `read` finds

    def read(self, node: Node, values: list[Any]) -> None:
        """Find the overload and the operands of the call, for these values of the nodes that it reads."""
        self.schema = _schema(node, self.name)
        self.names = _names(node, self.schema)
        operands: list[Operand] = []

        def note(operand: Operand) -> Node:
            operands.append(operand)
            return operand.node

        _map(node, self.names, note)
        self.operands, self.values = tuple(operands), values


_VIEW = "_fxamp_view"  # an attribute of the node: in `meta` it would go into copies of a graph, and hold the first one


def view_of(node: Node) -> OpView:
    """Return the view of a call; schema, names and operands are those of when they were last asked for."""
    view: OpView | None = node.__dict__.get(_VIEW)
    op, target, args, kwargs = _torch.parts_of(node)
    if view is None or args is not view.args or target is not view.target or kwargs is not view.kwargs or op != view.op:
        view = node.__dict__[_VIEW] = OpView(node, op, target, args, kwargs)
    return view


def _full_view(node: Node) -> OpView:
    """Return the view of a call, with its overload and its operands."""
    view = view_of(node)
    values = [n.meta.get("val") for n in view.inputs]
    if view.values is None or not all(map(operator.is_, values, view.values)):
        view.read(node, values)
    return view


def _name(node: Node) -> str:
    if node.op == "call_method":
        return _of_method(str(node.target))
    if node.target is regions.under_autocast:
        return str(of_target(node.args[0]))  # type: ignore[arg-type]  # an operator, which hashes
    if node.target is getattr:
        return ATTRIBUTES.get(str(node.args[1]), "getattr")
    target = of_target(node.target)
    return canonical(target + _suffix(node, target)) if inspect.isfunction(node.target) else target


@functools.lru_cache(maxsize=4096)
def of_target(target: Any) -> str:
    """Return the canonical name of a call_function target."""
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target.name()}"
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        space, op = (own_schema(target).name if isinstance(target, OpOverload) else qualified_name(target)).split("::")
        if space == "prims" and (op in PRIMS or hasattr(torch.ops.aten, op)):
            return PRIMS.get(op) or canonical(op)
        return canonical(op) if space == "aten" else f"{space}::{op}"
    if target in _FUNCTIONS:
        return _FUNCTIONS[target]
    plain, module = getattr(target, "__name__", type(target).__name__), getattr(target, "__module__", None)
    if module == "_operator":
        return OPERATORS.get(plain, plain)
    if module == "torch._tensor" or getattr(target, "__objclass__", None) in torch.Tensor.__mro__:
        return _of_method(plain)
    if plain in ("from_local", "prim_from_local"):  # of sharded tensors in Dynamo
        return "from_local"
    return canonical(plain) if module in _SPACES else f"{module}.{plain}"


def canonical(op: str) -> str:
    """Return the canonical name of an ATen operator, of any of its synonyms, or of a method `__op__`."""
    if op.startswith("__") and op.endswith("__"):
        plain = op.strip("_")
        return OPERATORS.get(plain) or OPERATORS.get(plain.removeprefix("r"), plain)
    if op.endswith("_"):
        return SYNONYMS.get(op[:-1], op[:-1]) + "_"
    return SYNONYMS.get(op, op)


def _of_method(method: str) -> str:
    return METHODS.get(method) or canonical(method)


def operator_of(node: Node) -> Any:
    """Return the operator that a call runs, as an argument that the code of a graph can hold; None if there is none."""
    target = node.target
    if node.op != "call_function" or isinstance(target, (OpOverload, HigherOrderOperator)):
        return target if node.op == "call_function" else None
    if isinstance(target, OpOverloadPacket) and not qualified_name(target).startswith("aten::"):
        overloads = target.overloads()  # several only torch's own argument parser tells apart
        return getattr(target, overloads[0]) if len(overloads) == 1 else None
    schema = None if inspect.isfunction(target) else schema_of(node)
    if schema is None or not node.kwargs.keys() <= {a.name for a in schema.arguments}:
        return None
    return getattr(getattr(torch.ops.aten, schema.name.removeprefix("aten::")), schema.overload_name or "default")


def _suffix(node: Node, plain: str) -> str:
    """Return what the literal arguments of a Python function add to its name."""
    names = _python_names(node.target) or ()
    for key, suffixes in _SUFFIXES.items():
        value = _argument(node, names, key)
        suffix = suffixes.get(value, "") if isinstance(value, (bool, str)) else ""
        if suffix and not plain.endswith(suffix) and (suffix == "_" or "." not in plain):
            return suffix
    return ""


def is_projected(node: Node) -> bool:
    """Say whether a call of an LSTM projects its hidden state: each layer and direction then has one weight more."""
    at = max((i for i, a in enumerate(node.args) if isinstance(a, (list, tuple))), default=-1)
    if at < 0 or len(node.args) < at + 6:
        return False
    weights: Any = node.args[at]
    settings: Any = node.args[at + 1 :]
    bias, layers, _, _, bidirectional = settings[:5]
    return bool(len(weights) > (4 if bias else 2) * layers * (2 if bidirectional else 1))


# Arguments.


def first_schema(op: str) -> Any:
    """Return the schema of the first overload of an ATen op that takes tensors, or None."""
    return next(iter(_schemas(op)), None)


def schema_of(node: Node) -> Any:
    """Return the schema of the overload that a call fits, which marks aliases and writes; None if there is none."""
    return own_schema(node.target) if isinstance(node.target, OpOverload) else _full_view(node).schema


def _schema(node: Node, op: str) -> Any:
    if isinstance(node.target, OpOverload):
        return own_schema(node.target)
    op = op if _schemas(op) else op.removesuffix("_")
    if inspect.isfunction(node.target):  # its arguments may have another order
        return first_schema(op)
    return _fitting(op, node.op == "call_method", tuple(map(_kind, node.args)), tuple(node.kwargs))


def is_number(value: Node) -> bool:
    """Say whether a node gives Python numbers, such as a size, and no tensor: to a reader it is what a constant is."""
    given = value.meta.get("val")
    if isinstance(given, (tuple, list)):
        return bool(given) and all(isinstance(part, _torch.NUMBERS) for part in given)
    return isinstance(given, _torch.NUMBERS)


def carries_number(node: Node) -> bool:
    """Say whether a node only brings or computes a number that is no data's: in another capture it is a constant."""
    return is_number(node) and not any(map(_torch.is_of_data, _torch.pytree.tree_leaves(node.meta["val"])))


def inputs(node: Node) -> list[Node]:
    """Return the nodes that a call reads, each once, without those that give numbers."""
    return [n for n in node.all_input_nodes if not is_number(n)]


def operands(node: Node) -> Iterator[Operand]:
    """Yield every operand of a call, a Node that gives no number, with the argument that it is part of."""
    return iter(_full_view(node).operands)


def map_operands(node: Node, replace: Callable[[Operand], Node]) -> None:
    """Replace each operand of a node in place, position by position (one value may stand in several)."""
    node.args, node.kwargs = _map(node, names_of(node), replace)


def argument(node: Node, key: str, default: Any = None) -> Any:
    """Return the value of an argument of a call by its name, wherever it was passed."""
    return _argument(node, names_of(node), key, default)


def _argument(node: Node, names: tuple[str, ...], key: str, default: Any = None) -> Any:
    values = dict(zip(names, node.args, strict=False))
    values |= {k if k in names else _KEYWORDS.get(k, k): v for k, v in node.kwargs.items()}
    return values.get(key, default)


def _map(
    node: Node, names: tuple[str, ...], replace: Callable[[Operand], Node]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a node with each operand replaced, at any depth."""

    def inside(where: str, arg: Any) -> Any:
        places = itertools.count()

        def leaf(value: Any) -> Any:
            place = next(places)
            is_operand = isinstance(value, Node) and not is_number(value)
            return replace(Operand(where, place, value)) if is_operand else value

        return map_aggregate(arg, leaf)

    args = tuple(inside(names[i] if i < len(names) else f"arg{i}", a) for i, a in enumerate(node.args))
    return args, {k: inside(k if k in names else _KEYWORDS.get(k, k), a) for k, a in node.kwargs.items()}


def names_of(node: Node) -> tuple[str, ...]:
    """Return the names of the positional arguments of a call."""
    return _full_view(node).names


def _names(node: Node, schema: Any) -> tuple[str, ...]:
    if not node.op.startswith("call") or node.op == "call_module":
        return ()
    python = _python_names(node.target)
    return python if python is not None else _positional(schema, node.op == "call_method")


@functools.lru_cache(maxsize=4096)
def _python_names(target: Any) -> tuple[str, ...] | None:
    """Return the names of the positional arguments of a Python function or an operator; None for a builtin."""
    if isinstance(target, OpOverload):
        return tuple(a.name for a in own_schema(target).arguments)
    if isinstance(target, str):
        target = getattr(torch.Tensor, target, None)
    if not inspect.isfunction(target):
        return _ARGUMENTS.get(getattr(target, "__name__", ""))
    while target in boolean_dispatched:  # torch.unique is nested twice
        target = boolean_dispatched[target]["if_false"]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(target).parameters.values() if p.kind in positional)


def _positional(schema: Any, method: bool = False) -> tuple[str, ...]:
    """Return the names of the positional arguments of a builtin; a method has `self` first."""
    names = tuple(a.name for a in schema.arguments if not a.kwarg_only) if schema is not None else ()
    if not method:
        return names
    return ("self", *(n for n in names if n != "self")) if "self" in names else ("self", *names[1:])


# Overloads. Those of a builtin are told apart as torch's own argument parser does: by what each argument is.

# The types of a schema that an argument of each kind fits.
_FITS: dict[str, tuple[str, ...]] = {
    "tensor": ("Tensor", "List[Tensor]", "List[Optional[Tensor]]"),
    "tensors": ("List[Tensor]", "List[Optional[Tensor]]"),
    "bool": ("bool", "number"),
    "int": ("int", "float", "number", "List[int]", "List[float]"),
    "float": ("float", "number", "List[float]"),
    "complex": ("number",),
    "str": ("str", "Device"),
    "dtype": ("int",),  # as schemas have it
    "device": ("Device",),
    "ints": ("List[int]", "List[float]", "List[bool]"),
    "floats": ("List[float]",),
}


def _kind(arg: Any) -> str:
    if isinstance(arg, Node):
        return _kind(arg.meta["val"]) if is_number(arg) else "tensor"
    if isinstance(arg, _torch.SYMBOLS):
        return type(arg).__name__.removeprefix("Sym").lower()
    if isinstance(arg, (list, tuple)):
        inner = {_kind(a) for a in arg} - {"NoneType"}
        return next((f"{k}s" for k in ("tensor", "float") if k in inner), "ints")
    return type(arg).__name__


@functools.lru_cache(maxsize=4096)
def _schemas(op: str) -> tuple[Any, ...]:
    """Return the schemas of an ATen op, those that take tensors and write to no `out` first."""
    packet = getattr(torch.ops.aten, op, None) if op.isidentifier() else None
    if not isinstance(packet, OpOverloadPacket):
        return ()

    def last(schema: Any) -> tuple[bool, bool, str]:
        takes = any("Tensor" in str(a.type) for a in schema.arguments)
        makes = any("Tensor" in str(r.type) for r in schema.returns)
        return not (takes or makes), any(a.is_out for a in schema.arguments), schema.overload_name

    return tuple(sorted((own_schema(getattr(packet, o)) for o in packet.overloads()), key=last))


@functools.lru_cache(maxsize=16384)
def _fitting(op: str, method: bool, kinds: tuple[str, ...], keywords: tuple[str, ...]) -> Any:
    """Return the first schema of an ATen op that a call fits; the first of all when none does."""
    for schema in _schemas(op):
        arguments = {a.name: a for a in schema.arguments}
        names = _positional(schema, method)
        passed = {*names[: len(kinds)], *(k if k in arguments else _KEYWORDS.get(k, k) for k in keywords)}
        needed = {n for n, a in arguments.items() if not a.has_default_value()}
        if len(kinds) > len(names) or not needed <= passed <= set(arguments):
            continue
        if all(_takes(str(arguments[n].type), kind) for n, kind in zip(names, kinds, strict=False)):
            return schema
    return first_schema(op)


def _takes(wanted: str, kind: str) -> bool:
    if wanted.startswith("Optional["):
        return kind == "NoneType" or _takes(wanted[len("Optional[") : -1], kind)
    return wanted in _FITS.get(kind, ())
