"""One name for every spelling of an op, and the right name for every argument."""

from __future__ import annotations

import copy
import inspect
import operator
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import library as operators
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import Graph, Node, symbolic_trace
from torch.nn.utils import rnn as rnn_utils

from fxamp.capture import user_graph
from passes.graph.notes import note
from passes.ops import ops
from passes.ops.rules import RULES
from passes.runtime import rnn
from tests.support.helpers import OTHER_RELEASES


def call(target: Any, *args: Any, **kwargs: Any) -> Node:
    """Return a node that calls a function, or a method when the target is a string."""
    graph = Graph()
    if isinstance(target, str):
        return graph.call_method(target, args or (graph.placeholder("x"),), kwargs)
    return graph.call_function(target, args, kwargs)


def inputs(*names: str) -> list[Node]:
    graph = Graph()
    return [graph.placeholder(name) for name in names]


# Names.

# Where torch has functions of ATen, and the prefix that ATen gives them.
NAMESPACES: tuple[tuple[Any, str], ...] = (
    (torch, ""),
    (F, ""),
    (torch._C._nn, ""),
    (torch._VF, ""),
    (rnn_utils, ""),
    (torch.special, "special_"),
    (torch.linalg, "linalg_"),
    (torch.fft, "fft_"),
)

OPERATORS: dict[str, list[Any]] = {
    "abs": [operator.abs, abs, "__abs__"],
    "add": [operator.add, "__add__", "__radd__"],
    "add_": [operator.iadd, "__iadd__"],
    "sub": [operator.sub, "__sub__"],
    "sub_": [operator.isub, "__isub__"],
    "rsub": ["__rsub__"],
    "mul": [operator.mul, "__mul__", "__rmul__"],
    "mul_": [operator.imul, "__imul__"],
    "div": [operator.truediv, "__truediv__", "__rtruediv__", "__div__", "__rdiv__"],
    "div_": [operator.itruediv, "__itruediv__", "__idiv__"],
    "floor_divide": [operator.floordiv, "__floordiv__", "__rfloordiv__"],
    "floor_divide_": [operator.ifloordiv, "__ifloordiv__"],
    "remainder": [operator.mod, "__mod__", "__rmod__"],
    "remainder_": [operator.imod, "__imod__"],
    "pow": [operator.pow, pow, "__pow__", "__rpow__"],
    "pow_": [operator.ipow, "__ipow__"],
    "matmul": [operator.matmul, operator.imatmul, "__matmul__", "__rmatmul__"],
    "neg": [operator.neg, "__neg__"],
    "positive": [operator.pos, "__pos__"],
    "round": [round],
    "bitwise_not": [operator.invert, operator.inv, "__invert__"],
    "bitwise_and": [operator.and_, "__and__", "__rand__"],
    "bitwise_and_": [operator.iand, "__iand__"],
    "bitwise_or": [operator.or_, "__or__", "__ror__"],
    "bitwise_or_": [operator.ior, "__ior__"],
    "bitwise_xor": [operator.xor, "__xor__", "__rxor__"],
    "bitwise_xor_": [operator.ixor, "__ixor__"],
    "bitwise_left_shift": [operator.lshift, "__lshift__", "__rlshift__"],
    "bitwise_left_shift_": [operator.ilshift, "__ilshift__"],
    "bitwise_right_shift": [operator.rshift, "__rshift__", "__rrshift__"],
    "bitwise_right_shift_": [operator.irshift, "__irshift__"],
    "eq": [operator.eq, "__eq__"],
    "ne": [operator.ne, "__ne__"],
    "lt": [operator.lt, "__lt__"],
    "le": [operator.le, "__le__"],
    "gt": [operator.gt, "__gt__"],
    "ge": [operator.ge, "__ge__"],
    "getitem": [operator.getitem, "__getitem__"],
    "setitem": [operator.setitem, "__setitem__"],
    "getattr": [],
    # Of tensors in shards.
    "from_local": [DTensor.from_local],
    "to_local": ["to_local"],
    "redistribute": ["redistribute"],
}  # fmt: skip

# Spellings of one op that are the name of another: F.unfold is not x.unfold.
ANOTHER: dict[Any, str] = {F.unfold: "im2col", F.logsigmoid: "log_sigmoid", "chalf": "to", torch.Tensor.chalf: "to"}


def spellings(op: str) -> Iterator[Node]:
    """Yield a call of an op in every spelling that this torch has."""
    for space, prefix in NAMESPACES:
        plain = op.removeprefix(prefix) if op.startswith(prefix) else ""
        function = getattr(space, plain, None)
        if callable(function) and not isinstance(function, (type, ModuleType)):
            yield call(function)
    if callable(getattr(torch.Tensor, op, None)):
        yield call(op)
        yield call(getattr(torch.Tensor, op))
    packet = getattr(torch.ops.aten, op, None)
    if packet is not None:
        yield call(packet)
        yield from (call(getattr(packet, overload)) for overload in packet.overloads())
    yield from (call(target) for target in OPERATORS.get(op, ()))


def test_every_spelling_of_a_row_has_its_name() -> None:
    for expected in (name for op in RULES for name in (op, f"{op}_")):
        found = {node.target: ops.name(node) for node in spellings(expected)}
        required = expected in RULES.keys() - OTHER_RELEASES
        assert found or not required, f"no spelling of the row {expected}: its name is not torch's"
        assert found == {target: ANOTHER.get(target, expected) for target in found}


@pytest.mark.parametrize("op", OPERATORS)
def test_every_operator_has_the_name_of_the_op_that_it_calls(op: str) -> None:
    assert {ops.name(call(target)) for target in OPERATORS[op]} <= {op}
    assert op.removesuffix("_") in RULES or op in ("getitem", "setitem", "getattr")


def test_the_operators_are_complete() -> None:
    """Every overload of an operator that Tensor defines is in the table above."""
    plain = {n for n in dir(operator) if not n.startswith("_")}
    defined = {n for n in vars(torch._C.TensorBase) | vars(torch.Tensor) if re.fullmatch(r"__i?r?\w+__", n)}
    arithmetic = {n for n in defined if n.strip("_") in plain | {f"i{p}" for p in plain} | {f"r{p}" for p in plain}}
    known = {t for targets in OPERATORS.values() for t in targets if isinstance(t, str)}
    assert arithmetic - known == {"__contains__", "__delitem__", "__index__"}


def test_no_alias_hides_a_row() -> None:
    assert {op: ops.canonical(op) for op in RULES if ops.canonical(op) != op} == {}


def inplace_functions() -> list[Callable[..., Any]]:
    functions = {f for f in vars(F).values() if inspect.isfunction(f) and f.__module__ == F.__name__}
    return sorted((f for f in functions if "inplace" in inspect.signature(f).parameters), key=lambda f: f.__name__)


@pytest.mark.parametrize("function", inplace_functions())
def test_inplace_by_keyword_and_by_position_is_the_in_place_op(function: Callable[..., Any]) -> None:
    base = ops.name(call(function))
    parameters = list(inspect.signature(function).parameters)
    before = [None] * parameters.index("inplace")
    assert base in RULES
    assert ops.name(call(function, inplace=True)) == ops.name(call(function, *before, True)) == f"{base}_"
    assert ops.name(call(function, inplace=False)) == ops.name(call(function, *before, False)) == base


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_pooling_that_returns_indices_is_the_op_that_does(dims: int) -> None:
    pool = getattr(F, f"max_pool{dims}d")
    assert ops.name(call(pool)) == ops.name(call(pool, return_indices=False)) == f"max_pool{dims}d"
    for node in (call(pool, return_indices=True), call(pool, None, 2, None, 0, 1, False, True)):
        assert ops.name(node) == f"max_pool{dims}d_with_indices"
    with_indices = getattr(F, f"max_pool{dims}d_with_indices")
    assert ops.name(call(with_indices, return_indices=True)) == f"max_pool{dims}d_with_indices"
    # ATen's adaptive pooling always returns both.
    adaptive = getattr(F, f"adaptive_max_pool{dims}d")
    assert ops.name(call(adaptive)) == ops.name(call(adaptive, return_indices=True)) == f"adaptive_max_pool{dims}d"


PYTHON_NAMES: dict[Any, str] = {
    F.cross_entropy: "cross_entropy_loss", F.grid_sample: "grid_sampler", F.affine_grid: "affine_grid_generator",
    F.unfold: "im2col", F.fold: "col2im", F.threshold: "threshold", F.nll_loss: "nll_loss",
    torch._C._nn.nll_loss_nd: "nll_loss_nd", F.logsigmoid: "log_sigmoid", F.softmin: "softmin",
    F.interpolate: "interpolate", F.normalize: "normalize", F.local_response_norm: "local_response_norm",
    F.adaptive_avg_pool2d: "adaptive_avg_pool2d", F.adaptive_max_pool2d_with_indices: "adaptive_max_pool2d",
    F.fractional_max_pool3d_with_indices: "fractional_max_pool3d",
    F.multi_head_attention_forward: "multi_head_attention_forward", torch.unique: "unique", torch.split: "split",
    torch.stft: "stft", torch.dsmm: "mm", torch.linalg.norm: "linalg_norm", torch.special.expit: "sigmoid",
    rnn_utils.pad_sequence: "pad_sequence",
}  # fmt: skip


@pytest.mark.parametrize("target", PYTHON_NAMES)
def test_a_function_whose_name_differs_from_atens_has_the_name_of_its_row(target: Any) -> None:
    assert ops.name(call(target)) == PYTHON_NAMES[target]
    assert PYTHON_NAMES[target] in RULES


def documented_aliases() -> Iterator[tuple[str, Node, Node]]:
    for space, prefix in (
        (torch, ""),
        (torch.special, "special."),
        (torch.linalg, "linalg."),
        (torch.Tensor, "Tensor."),
    ):
        for plain in dir(space):
            function = getattr(space, plain)
            said = re.search(r"[Aa]lias (?:for|of) :\w+:`~?torch\.([\w.]+)`", str(getattr(function, "__doc__", "")))
            if said and callable(function):
                of = operator.attrgetter(said[1])(torch)
                yield prefix + plain, call(plain if space is torch.Tensor else function), call(of)


def test_a_documented_alias_has_the_same_name_or_a_row_of_its_own() -> None:
    found = {spelled: (ops.name(node), ops.name(of)) for spelled, node, of in documented_aliases()}
    assert len(found) > 50
    assert {s: names for s, names in found.items() if names[0] != names[1] and not {*names} <= RULES.keys()} == {}
    assert found["absolute"] == ("abs", "abs")


@pytest.mark.parametrize("method", [*ops.CAST_METHODS, "type", "to", "cpu", "cuda"])
def test_a_cast_by_method_is_to(method: str) -> None:
    assert ops.name(call(method)) == ops.name(call(getattr(torch.Tensor, method))) == "to"


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("method", ops.CAST_METHODS)
def test_a_cast_method_gives_the_dtype_that_is_listed(method: str) -> None:
    assert getattr(torch.ones(1), method)().dtype == ops.CAST_METHODS[method]


def softmax(x: Any) -> Any:
    """Have the name of an op of ATen, in a module of one's own."""
    return x


NAMED: list[tuple[Node, str]] = [
    # An attribute that computes has the name of its op; one that only asks is getattr.
    *((call(getattr, *inputs("x"), attribute), op) for attribute, op in {
        "T": "numpy_T", "mT": "mT", "H": "matrix_H", "mH": "mH", "real": "real", "imag": "imag", "data": "detach",
        "dtype": "getattr", "shape": "getattr", "device": "getattr", "requires_grad": "getattr",
    }.items()),
    # A function of another module keeps its module.
    (call(softmax), f"{__name__}.softmax"), (call(float), "builtins.float"), (call(sum), "builtins.sum"),
    # What the exporter writes has the name of what was written.
    (call(torch.ops.aten._to_copy.default), "to"), (call(torch.ops.aten._unsafe_view.default), "view"),
    (call(torch.ops.aten.lift_fresh_copy.default), "clone"),
    # The recurrent functions have the names of the kernels.
    (call(rnn.lstm), "lstm"), (call(rnn.rnn, *[None] * 9, "tanh"), "rnn_tanh"),
    (call(rnn.rnn, *[None] * 9, "relu"), "rnn_relu"),
    # A primitive has the name of the op of ATen that it is.
    *((call(target), op) for prim, op in {
        "convert_element_type": "to", "transpose": "permute", "add": "add", "rev": "flip",
        "broadcast_in_dim": "expand", "copy_to": "copy_", "bessel_j0": "prims::bessel_j0",
    }.items() for target in (getattr(torch.ops.prims, prim), getattr(torch.ops.prims, prim).default)),
    # What is no call has no name.
    (Graph().placeholder("x"), ""), (Graph().get_attr("w", nn.Module), ""), (Graph().output(()), ""),
]  # fmt: skip


def test_a_node_has_the_name_of_its_op() -> None:
    assert [ops.name(node) for node, _ in NAMED] == [name for _, name in NAMED]
    assert {name for _, name in NAMED if re.fullmatch(r"\w+[^_\W]", name)} <= {*RULES, "getattr"}


# Dialects beside ATen.


@pytest.mark.parametrize("prim", sorted(ops.PRIMS))
def test_the_table_of_primitives_names_what_exists(prim: str) -> None:
    assert hasattr(torch.ops.prims, prim)
    assert hasattr(torch.ops.aten, ops.PRIMS[prim])


def test_an_op_of_another_library_keeps_its_namespace() -> None:
    @operators.custom_op("fxamp_test_ops::relu", mutates_args=())
    def relu(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    for target in (torch.ops.fxamp_test_ops.relu, torch.ops.fxamp_test_ops.relu.default):
        assert ops.name(call(target)) == "fxamp_test_ops::relu"
    assert [o.name for o in ops.operands(call(torch.ops.fxamp_test_ops.relu.default, *inputs("x")))] == ["x"]


def test_a_higher_order_op_and_a_leaf_module_say_what_they_are() -> None:
    assert ops.name(call(torch.ops.higher_order.cond)) == "higher_order::cond"
    node = Graph().call_module("encoder.attention")
    assert ops.name(node) == "module:encoder.attention"
    note(node, leaf="MultiheadAttention")
    assert ops.name(node) == "module:MultiheadAttention"


# Modules of torch.nn in a graph that the user brings.

MODULES: list[tuple[nn.Module, str]] = [
    (nn.Linear(4, 4), "linear"), (nn.Conv1d(4, 4, 1), "conv1d"), (nn.Conv2d(4, 4, 1), "conv2d"),
    (nn.Conv3d(4, 4, 1), "conv3d"), (nn.ConvTranspose2d(4, 4, 1), "conv_transpose2d"),
    (nn.Embedding(4, 4), "embedding"), (nn.BatchNorm1d(4), "batch_norm"), (nn.BatchNorm2d(4), "batch_norm"),
    (nn.LayerNorm(4), "layer_norm"), (nn.GroupNorm(2, 4), "group_norm"), (nn.RMSNorm(4), "rms_norm"),
    (nn.LocalResponseNorm(2), "local_response_norm"), (nn.Dropout(), "dropout"), (nn.Dropout2d(), "dropout2d"),
    (nn.AlphaDropout(), "alpha_dropout"), (nn.ReLU(), "relu"), (nn.ReLU(inplace=True), "relu_"),
    (nn.ReLU6(), "hardtanh"), (nn.GELU(), "gelu"), (nn.SiLU(), "silu"), (nn.SiLU(inplace=True), "silu_"),
    (nn.Mish(), "mish"), (nn.ELU(), "elu"), (nn.CELU(), "celu"), (nn.SELU(), "selu"), (nn.GLU(), "glu"),
    (nn.Sigmoid(), "sigmoid"), (nn.Tanh(), "tanh"), (nn.Softplus(), "softplus"), (nn.Softsign(), "softsign"),
    (nn.Softmax(-1), "softmax"), (nn.LogSoftmax(-1), "log_softmax"), (nn.Softmin(-1), "softmin"),
    (nn.LeakyReLU(), "leaky_relu"), (nn.PReLU(), "prelu"), (nn.Hardswish(), "hardswish"),
    (nn.Hardsigmoid(), "hardsigmoid"), (nn.Hardtanh(), "hardtanh"), (nn.LogSigmoid(), "log_sigmoid"),
    (nn.Threshold(0.0, 1.0), "threshold"), (nn.Threshold(0.0, 1.0, inplace=True), "threshold_"),
    (nn.Tanhshrink(), "tanhshrink"), (nn.Hardshrink(), "hardshrink"), (nn.Softshrink(), "softshrink"),
    (nn.MaxPool1d(2), "max_pool1d"), (nn.MaxPool2d(2), "max_pool2d"), (nn.MaxPool3d(2), "max_pool3d"),
    (nn.MaxPool2d(2, return_indices=True), "max_pool2d_with_indices"), (nn.AvgPool1d(2), "avg_pool1d"),
    (nn.AvgPool2d(2), "avg_pool2d"), (nn.AdaptiveAvgPool1d(1), "adaptive_avg_pool1d"),
    (nn.AdaptiveAvgPool2d(1), "adaptive_avg_pool2d"), (nn.AdaptiveMaxPool2d(1), "adaptive_max_pool2d"),
    (nn.Flatten(), "flatten"), (nn.Unflatten(1, (2, 2)), "unflatten"), (nn.PixelShuffle(2), "pixel_shuffle"),
    (nn.ZeroPad2d(1), "pad"), (nn.ReflectionPad2d(1), "pad"), (nn.Unfold(2), "im2col"), (nn.Fold((4, 4), 2), "col2im"),
]  # fmt: skip

LOSSES: list[tuple[nn.Module, str]] = [
    (nn.CrossEntropyLoss(), "cross_entropy_loss"), (nn.NLLLoss(), "nll_loss"), (nn.MSELoss(), "mse_loss"),
    (nn.L1Loss(), "l1_loss"), (nn.SmoothL1Loss(), "smooth_l1_loss"), (nn.HuberLoss(), "huber_loss"),
    (nn.BCELoss(), "binary_cross_entropy"), (nn.BCEWithLogitsLoss(), "binary_cross_entropy_with_logits"),
    (nn.KLDivLoss(reduction="sum"), "kl_div"), (nn.CosineSimilarity(), "cosine_similarity"),
    (nn.Bilinear(4, 4, 4), "bilinear"),
]  # fmt: skip


class Around(nn.Module):
    """A model of one module, which is itself no module of torch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


class AroundTwo(Around):
    def forward(self, x: Any, y: Any) -> Any:  # type: ignore[override]
        return self.inner(x, y)


def inlined(model: nn.Module) -> Graph:
    """Trace a model, which leaves its module whole, and put what the module calls in its place."""
    gm = symbolic_trace(model)
    assert [n.target for n in gm.graph.find_nodes(op="call_module")] == ["inner"]
    user_graph._inline_modules(gm)
    return gm.graph


@pytest.mark.parametrize(
    ("model", "op"), [(Around(m), op) for m, op in MODULES] + [(AroundTwo(m), op) for m, op in LOSSES],
    ids=lambda v: type(v.inner).__name__ if isinstance(v, nn.Module) else v,
)  # fmt: skip
def test_a_module_of_torch_nn_is_the_op_that_it_calls(model: nn.Module, op: str) -> None:
    names = [ops.name(n) for n in inlined(model).nodes if n.op.startswith("call")]
    assert op in names
    assert all(n.removesuffix("_") in RULES for n in names if n not in ("getitem", "getattr"))


@pytest.mark.parametrize("module", [nn.LSTM(4, 4), nn.RNN(4, 4), nn.GRU(4, 4)], ids=lambda m: type(m).__name__)
def test_a_recurrent_module_of_torch_nn_stays_whole(module: nn.Module) -> None:
    assert [n.op for n in inlined(Around(module)).nodes] == ["placeholder", "call_module", "output"]


# Arguments.


@pytest.mark.parametrize("op", [name for name, row in RULES.items() if row.uncast])
def test_every_spelling_has_the_arguments_that_its_row_names(op: str) -> None:
    """The names in `uncast` and `casts` are those of every builtin, overload and Python function of the op."""
    row = RULES[op]
    checked = 0
    for node in spellings(op):
        if isinstance(node.target, (str, torch._ops.OpOverloadPacket)) or getattr(node.target, "__objclass__", None):
            continue
        names = ops.names_of(node)
        schema = ops.first_schema(op)
        wanted = {a.name for a in schema.arguments} & set(row.uncast)
        if isinstance(node.target, torch._ops.OpOverload):
            wanted &= {a.name for a in node.target._schema.arguments}
        assert wanted <= set(names), (node.target, names)
        checked += 1
    assert checked
    assert {a.name for a in ops.first_schema(op).arguments} & set(row.uncast), "the row names no argument"


AFFINE = {"x": "input", "w": "weight", "b": "bias", "m": "running_mean", "v": "running_var"}


@pytest.mark.parametrize(
    ("target", "order", "more"),
    [
        (F.batch_norm, "x m v w b", ()),
        (torch.batch_norm, "x w b m v", (True, 0.1, 1e-5, False)),
        (torch.ops.aten.batch_norm.default, "x w b m v", (True, 0.1, 1e-5, False)),
        (F.instance_norm, "x m v w b", ()),
        (torch.instance_norm, "x w b m v", (True, 0.1, 1e-5, False)),
        (torch.native_batch_norm, "x w b m v", (True, 0.1, 1e-5)),
        (torch.ops.aten._native_batch_norm_legit_no_training.default, "x w b m v", (0.1, 1e-5)),
        (F.layer_norm, "x [4] w b", ()),
        (torch.layer_norm, "x [4] w b", ()),
        (torch.native_layer_norm, "x [4] w b", (1e-5,)),
        (F.group_norm, "x 2 w b", ()),
        (torch.group_norm, "x 2 w b", ()),
        (F.rms_norm, "x [4] w", ()),
        (torch.rms_norm, "x [4] w", ()),
        (F.linear, "x w b", ()),
        (F.conv2d, "x w b", ()),
        (torch.ops.aten.conv2d.default, "x w b", ()),
        (F.embedding, "x w", ()),
        (F.embedding_bag, "x w", ()),
    ],
)
def test_statistics_and_parameters_have_their_names_in_every_order(target: Any, order: str, more: Any) -> None:
    graph = Graph()
    made = {v: graph.placeholder(v) for v in order.split() if v in AFFINE}
    args = [made.get(v, [4] if v == "[4]" else 2) for v in order.split()]
    node = graph.call_function(target, (*args, *more))
    assert {o.node.name: o.name for o in ops.operands(node)} == {v: AFFINE[v] for v in made}


def test_the_table_of_an_embedding_is_its_weight_in_either_order() -> None:
    weight, indices = inputs("weight", "indices")
    for node in (call(F.embedding, indices, weight), call(torch.embedding, weight, indices)):
        assert {o.name for o in ops.operands(node) if o.node is weight} == {"weight"}
        assert {o.name for o in ops.operands(node) if o.node is indices} & {"weight"} == set()


X, Y, Z = inputs("x", "y", "z")


@pytest.mark.parametrize(
    ("node", "names"),
    [
        (call("add", X, Y), "self other"),
        # aten.where has self second, the method first.
        (call("where", X, Y, Z), "self condition other"),
        (call(torch.where, X, Y, Z), "condition self other"),
        (call(operator.add, X, Y), "self other"),
        (call(operator.pow, 2.0, Y), "exponent"),
        (call(operator.getitem, X, Y), "self index"),
        (call(operator.setitem, X, 0, Y), "self value"),
        (call(getattr, X, "T"), "self"),
        # By keyword as by position.
        (call(F.linear, X, weight=Y), "input weight"),
        (call(torch.add, input=X, other=Y), "self other"),
        (call(F.relu, input=X), "input"),
        # Of these nothing is known.
        (call(print, X, Y), "arg0 arg1"),
        (call(torch.einsum, "ij,jk", X, Y), "arg1 arg2"),
        (X.graph.call_module("leaf", (X, Y)), "arg0 arg1"),
    ],
)
def test_operands_have_the_names_of_the_arguments(node: Node, names: str) -> None:
    assert [o.name for o in ops.operands(node)] == names.split()
    assert ops.names_of(call(print)) == ()


def test_an_operand_in_a_list_has_its_place() -> None:
    x, y = inputs("x", "y")
    assert list(ops.operands(call(torch.cat, [x, y, x], 1))) == [
        ("tensors", 0, x),
        ("tensors", 1, y),
        ("tensors", 2, x),
    ]
    node = call(torch.ops.aten.index_put_.default, x, [None, y], x)
    assert list(ops.operands(node)) == [("self", 0, x), ("indices", 1, y), ("values", 0, x)]


def test_an_operand_deep_inside_an_argument_is_found() -> None:
    x, start, mask = inputs("x", "start", "mask")
    node = call(operator.getitem, x, (slice(None, start), None, [mask]))
    assert {o.node for o in ops.operands(node)} == {x, start, mask}
    assert len({(o.name, o.index) for o in ops.operands(node)}) == 3


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "replaced", "new_args", "new_kwargs"),
    [
        (torch.cat, ([X, Y, X],), {"dim": 1}, ("tensors", 2), ([X, Y, Z],), {"dim": 1}),
        (torch.sum, (), {"input": X, "axis": 0}, ("self", 0), (), {"input": Z, "axis": 0}),
        (torch.ops.aten.to.dtype, (X, torch.half), {"copy": True}, None, (X, torch.half), {"copy": True}),
    ],
)
def test_map_operands_replaces_a_position_and_leaves_the_rest_as_it_was_written(
    target: Any, args: Any, kwargs: Any, replaced: Any, new_args: Any, new_kwargs: Any
) -> None:
    node = X.graph.call_function(target, args, kwargs)
    ops.map_operands(node, lambda o: Z if (o.name, o.index) == replaced else o.node)
    assert (node.args, node.kwargs) == (new_args, new_kwargs)
    assert (node in Z.users) == (replaced is not None)


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "key", "value"),
    [
        (torch.ops.aten.softmax.int, (-1, torch.float32), {}, "dtype", torch.float32),
        (F.softmax, (-1,), {"dtype": torch.float32}, "dtype", torch.float32),
        (F.softmax, (-1, 3, torch.float32), {}, "dtype", torch.float32),
        (torch.softmax, (-1, torch.float32), {}, "dtype", torch.float32),
        ("softmax", (-1, torch.float32), {}, "dtype", torch.float32),
        ("softmax", (-1,), {}, "dtype", None),
        # One name, several overloads: the call says which.
        ("mean", (1,), {}, "dim", 1),
        ("mean", (1,), {}, "dtype", None),
        ("mean", ([0, 1], True), {}, "keepdim", True),
        (torch.sum, (), {"dtype": torch.float32}, "dtype", torch.float32),
        (torch.sum, (), {"axis": 1, "keepdims": True}, "dim", 1),
        (torch.sum, (), {"axis": 1, "keepdims": True}, "keepdim", True),
        (torch.std, (1,), {}, "dim", 1),
        (torch.std, (True,), {}, "unbiased", True),
        (torch.max, (1, True), {}, "keepdim", True),
        ("to", (torch.float16,), {}, "dtype", torch.float16),
        ("to", ("cuda", torch.float16), {}, "dtype", torch.float16),
        ("to", (torch.device("cpu"),), {}, "dtype", None),
        ("norm", (2, -1), {}, "dim", -1),
        (F.max_pool2d, (2, None, 1), {}, "padding", 1),
        (torch.unique, (False, True), {}, "return_inverse", True),
        (F.gelu, (), {"approximate": "tanh"}, "approximate", "tanh"),
        ("split", (2, -1), {}, "dim", -1),  # written in Python
    ],
)
def test_an_argument_is_found_by_its_name_wherever_it_was_passed(
    target: Any, args: Any, kwargs: dict[str, Any], key: str, value: Any
) -> None:
    assert ops.argument(call(target, *inputs("x"), *args, **kwargs), key) == value


def test_an_argument_that_was_not_passed_has_the_default_that_is_given() -> None:
    assert ops.argument(call(F.softmax, *inputs("x")), "dim", 7) == 7
    assert ops.argument(call(F.softmax, *inputs("x"), dim=None), "dim", 7) is None


def test_the_schema_is_that_of_the_overload_which_the_call_fits() -> None:
    x, y = inputs("x", "y")
    fitting = [
        (call(torch.max, x), ""), (call(torch.max, x, 1), "dim"), (call(torch.max, x, y), "other"),
        (call("pow", x, 2), "Tensor_Scalar"), (call("pow", x, y), "Tensor_Tensor"), (call("sum", x), ""),
        (call("sum", x, -1), "dim_IntList"), (call(operator.mul, x, y), "Tensor"),
        (call(operator.mul, x, 2.0), "Scalar"), (call("clamp", x, 0, None), ""), (call("clamp", x, y), "Tensor"),
        (call(torch.add, x, y, out=x), "out"),
    ]  # fmt: skip
    assert [ops.schema_of(node).overload_name for node, _ in fitting] == [overload for _, overload in fitting]


def test_a_node_that_holds_a_size_stands_for_an_int() -> None:
    x, size = inputs("x", "size")
    size.meta["val"] = 3
    assert ops.schema_of(call(torch.max, x, size)).overload_name == "dim"


def _changed_target(node: Node, x: Node, y: Node) -> None:
    node.target = torch.mul


def _becomes_a_number(node: Node, x: Node, y: Node) -> None:
    y.meta["val"] = 3


CHANGES: dict[str, Callable[[Node, Node, Node], Any]] = {
    "target": _changed_target,
    "args": lambda node, x, y: setattr(node, "args", (y, 1)),
    "kwargs": lambda node, x, y: setattr(node, "kwargs", {"dim": 1}),
    "one argument": lambda node, x, y: node.update_arg(0, y),
    "one keyword": lambda node, x, y: node.update_kwarg("keepdim", True),
    "an argument more": lambda node, x, y: node.insert_arg(1, y),
    "an operand": lambda node, x, y: node.replace_input_with(x, y),
    "all readers": lambda node, x, y: x.replace_all_uses_with(y),
    "a value": _becomes_a_number,
    "an operand mapped": lambda node, x, y: ops.map_operands(node, lambda o: y if o.node is x else x),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("target", [torch.max, "max", torch.ops.aten.add.Tensor, F.softmax])
def test_what_is_read_of_a_call_follows_every_change_of_it(target: Any, change: Any) -> None:
    def read(node: Node) -> tuple[Any, ...]:
        operands = [(o.name, o.index, o.node.name) for o in ops.operands(node)]
        arguments = [str(ops.argument(node, key)) for key in ("dim", "keepdim")]
        return ops.name(node), operands, str(ops.schema_of(node)), ops.names_of(node), arguments

    def build() -> tuple[Node, Node, Node]:
        x, y = inputs("x", "y")
        at = x.graph.call_method if isinstance(target, str) else x.graph.call_function
        return at(target, (x, y), {}), x, y

    seen, fresh = build(), build()
    before = read(seen[0])
    change(*seen)
    change(*fresh)
    assert read(seen[0]) == read(fresh[0])
    assert read(seen[0]) != before


def test_what_is_read_of_a_call_does_not_go_into_copies_of_its_graph() -> None:
    x, y = inputs("x", "y")
    x.graph.output(x.graph.call_function(torch.add, (x, y)))
    assert [list(ops.operands(n)) for n in x.graph.nodes if n.op == "call_function"] == [
        [("self", 0, x), ("other", 0, y)]
    ]
    copied = copy.deepcopy(x.graph)
    (call_of_copy,) = copied.find_nodes(op="call_function", target=torch.add)
    assert {o.node.graph for o in ops.operands(call_of_copy)} == {copied}
    assert not any(value is x for value in vars(call_of_copy).values())


def test_the_schema_of_an_op_without_one_is_none() -> None:
    assert ops.schema_of(call(F.interpolate, *inputs("x"))) is None
    assert ops.schema_of(call(softmax, *inputs("x"))) is None
    assert ops.first_schema("no_such_op") is None
    assert ops.first_schema("my_lib::my_op") is None


def test_the_schema_of_an_in_place_function_says_that_it_writes() -> None:
    (x,) = inputs("x")
    for node in (call(F.relu, x, inplace=True), call("relu_", x), call(operator.iadd, x, 1), call("__iadd__", x, 1)):
        schema = ops.schema_of(node)
        assert [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write] == ["self"]
