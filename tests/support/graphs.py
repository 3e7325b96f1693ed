"""Graphs for the tests: written as typed text, or drawn at random from a seed.

The text has one line a node, with the type of its value; an op is one of ATen's, `default` where no overload is named:

    x: f32[2, 4]
    w: f32[3, 4] = param
    linear: f32[2, 3] = linear(x, w)
    cast: bf16[2, 3] = cast(linear, bf16)
    return cast

`cast` is a cast that fxamp made, `to.dtype` one in the user's code. Reading takes the types of inputs only;
the others are computed, and writing computes them anew.
"""

from __future__ import annotations

import copy
import functools
import operator
import random
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fxamp.capture.graph import attribute_of
from passes import compile_graph
from passes._torch import FakeTensorMode, pytree
from passes.contract.plan import Plan
from passes.contract.policy import Policy, Target
from passes.form import Assignment, Unit
from passes.graph.bodies import origins_of
from passes.graph.notes import CAST_OPERAND, is_inserted, note
from passes.graph.values import Inference, original_dtypes
from passes.runtime.casts import CAST
from passes.runtime.regions import grad_mode

aten = torch.ops.aten
DTYPES = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64, "i64": torch.int64,
    "bool": torch.bool, "c64": torch.complex64,
}  # fmt: skip
_SHORT = {dtype: name for name, dtype in DTYPES.items()}
_PLAIN = {"getitem": operator.getitem, "grad_enabled": grad_mode, "set_grad": torch._C._set_grad_enabled}


class Builder:
    """Builds a graph node by node, with the fake value of each."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.root = nn.Module()
        self.mode = FakeTensorMode()

    def input(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Node:
        """Add an input."""
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def attribute(self, name: str, value: Tensor) -> Node:
        """Add a parameter or buffer, and read it."""
        if isinstance(value, nn.Parameter):
            self.root.register_parameter(name, value)
        else:
            self.root.register_buffer(name, value)
        node = self.graph.get_attr(name)
        node.meta["val"] = self.mode.from_tensor(value)
        return node

    def call(self, target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> Node:
        """Add a call of a function; `name` names its node."""
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        self.infer(node)
        return node

    def infer(self, node: Node) -> None:
        """Compute the fake value of a call."""
        target: Any = node.target
        if target in (grad_mode, torch._C._set_grad_enabled):
            return
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*args, **kwargs)

    def finish(self, *outputs: Any) -> GraphModule:
        """Add the output, and return the module."""
        self.graph.output(tuple(outputs))
        return GraphModule(self.root, self.graph)


def parse(text: str) -> GraphModule:
    """Read a graph."""
    builder = Builder()
    known: dict[str, Any] = dict(DTYPES)
    for line in textwrap.dedent(text).strip().splitlines():
        if line.startswith("return"):
            return builder.finish(*(known[n] for n in line.removeprefix("return").replace(",", " ").split()))
        found = re.fullmatch(r"(\w+)(?:: (\w+)\[([\d, ]*)\])?(?: = (.*))?", line.strip())
        assert found is not None, line
        name, dtype, sizes, right = found.groups()
        shape = tuple(int(s) for s in (sizes or "").split(",") if s.strip())
        if right is None:
            known[name] = builder.input(name, shape, DTYPES[dtype])
        elif right in ("param", "buffer"):
            value = torch.randn(shape).to(DTYPES[dtype])
            known[name] = builder.attribute(name, nn.Parameter(value) if right == "param" else value)
        else:
            known[name] = _made(builder, name, right, known)
    raise AssertionError("a graph ends with `return`")


def _made(builder: Builder, name: str, text: str, known: dict[str, Any]) -> Node:
    """Add the call that the right of a line says, over the values before it."""
    found = re.fullmatch(r"([\w.]+)\((.*)\)", text)
    assert found is not None, text
    op, arguments = found.groups()
    args, kwargs = eval(f"_({arguments})", {"_": lambda *a, **k: (a, k)}, known)
    if op == "cast":
        node = builder.call(CAST, *args, name=name)
        note(node, made_by=CAST_OPERAND)
        return node
    target = _PLAIN[op] if op in _PLAIN else operator.attrgetter(op)(aten)
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = target.default
    return builder.call(target, *args, name=name, **kwargs)


LAYER = """
    x: f32[2, 4]
    w: f32[4, 4] = param
    linear: f32[2, 4] = linear(x, w)
    relu: f32[2, 4] = relu(linear)
    return relu
"""


def compile_plain(gm: GraphModule, policy: Policy, **options: Any) -> Plan:
    """Compile the graph of a module in place, of which its front end knows nothing but what is noted on it."""
    attribute = functools.partial(attribute_of, gm)
    return compile_graph(gm.graph, policy, attribute, origins_of(gm.graph, attribute), **options)


def render(graph: Graph) -> str:
    """Write a graph, with types computed anew."""
    builder = Builder()
    values = [v for n in graph.nodes for v in pytree.tree_leaves(n.meta.get("val")) if hasattr(v, "fake_mode")]
    builder.mode = values[0].fake_mode
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(" ".join(["return", ", ".join(str(v) for v in node.args[0])]))
            continue
        if node.op == "call_function":
            builder.infer(node)
        right = f" = {_call(node)}" if node.op == "call_function" else " = attribute" if node.op == "get_attr" else ""
        lines.append(f"{node.name}{_type(node.meta.get('val'))}{right}")
    return "\n".join(lines)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f": {_SHORT[value.dtype]}[{', '.join(map(str, value.shape))}]"
    return ""


def _call(node: Node) -> str:
    plain = {v: k for k, v in _PLAIN.items()}
    if is_inserted(node):
        name = "cast"
    elif isinstance(node.target, torch._ops.OpOverload):
        name = str(node.target).removeprefix("aten.").removesuffix(".default")
    else:
        target: Any = node.target
        name = plain.get(target) or target.__name__
    words = [_word(a) for a in node.args] + [f"{k}={_word(v)}" for k, v in node.kwargs.items()]
    return f"{name}({', '.join(words)})"


def _word(arg: Any) -> str:
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(map(_word, arg))}]"
    return _SHORT[arg] if isinstance(arg, torch.dtype) else str(arg)


def normal(text: str) -> str:
    """Return text as `render` writes it."""
    return re.sub(r"= (param|buffer)$", "= attribute", textwrap.dedent(text).strip(), flags=re.M)


def as_it_stands(gm: GraphModule) -> Assignment:
    """Return the assignment of a graph whose types are as they should be."""
    dtypes = original_dtypes(gm.graph, gm.get_parameter)
    returned = {n: dtypes[n] for n in gm.graph.output_node().all_input_nodes}
    return Assignment({}, dtypes, dtypes, returned, Inference())


def unit_of(graph: Graph, assignment: Assignment) -> Unit:
    """Return a graph with what was decided on it, as a pass takes it."""
    return Unit(graph, lambda path: None, Target("cpu", torch.bfloat16), assignment=assignment)


def random_inputs(gm: GraphModule, seed: int = 0) -> list[Tensor]:
    """Return random tensors for the inputs of a graph."""
    generator = torch.Generator().manual_seed(seed)
    vals = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    return [torch.randn(tuple(v.shape), generator=generator).to(v.dtype) for v in vals]


def assert_rewrites(rewrite: Callable[[GraphModule], Any], before: str, after: str, *, edits: Any = 1) -> GraphModule:
    """Check a rewrite of a graph, text in, text out; return the new graph.

    Checked besides the text: the number of edits, that the result is well-formed, that it gives the same values bit for
    bit, and that a second run finds nothing to do.
    """
    gm = parse(before)
    original = copy.deepcopy(gm)
    assert rewrite(gm) == edits
    assert render(gm.graph) == normal(after)
    gm.graph.lint()
    gm.recompile()
    for a, b in zip(original(*random_inputs(gm)), gm(*random_inputs(gm)), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    again = rewrite(gm)
    assert not (sum(again.values()) if isinstance(again, dict) else again)
    assert render(gm.graph) == normal(after)
    return gm


def assert_unchanged(rewrite: Callable[[GraphModule], Any], text: str) -> None:
    """Check that a rewrite leaves a graph alone, and says so."""
    gm = parse(text)
    found = rewrite(gm)
    assert not (sum(found.values()) if isinstance(found, dict) else found)
    assert render(gm.graph) == normal(text)


def random_graph(seed: int) -> GraphModule:
    """Draw a graph: layers, elementwise ops, views, splits, in-place writes to all of them and to inputs, statistics.

    Its first two inputs may be written to. A draw that autograd refuses, because of what is overwritten, is drawn
    again.
    """
    for attempt in range(50):
        gm = _Draw(random.Random(1000 * seed + attempt)).module()
        try:
            run(gm)
        except RuntimeError as e:
            if not re.search("in-?place", str(e)):
                raise
            continue
        return gm
    raise AssertionError("autograd refuses every draw of this seed")


def run(gm: nn.Module, seed: int = 0) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
    """Run forward and backward on random inputs; return outputs, inputs afterwards, and gradients of parameters."""
    assert isinstance(gm, GraphModule)
    inputs = random_inputs(gm, seed)
    torch.manual_seed(seed)
    outputs = list(gm(*inputs))
    loss = sum(((i + 1) * o.float().square().mean() for i, o in enumerate(outputs)), torch.zeros(()))
    parameters = list(gm.parameters())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True) if loss.requires_grad else ()
    return [o.detach() for o in outputs], inputs, list(gradients)


class _Draw:
    """One random graph over matrices of 4 rows, and views of them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.builder = rng, Builder()
        torch.manual_seed(rng.randrange(2**31))
        self.values = [self.builder.input(f"x{i}", (4, 8)) for i in range(3)]
        moves = [getattr(self, name) for name in dir(type(self)) if name.startswith("draw_")]
        for _ in range(24):
            rng.choice(moves)()

    def module(self) -> GraphModule:
        """Return the graph, with a few of its values as outputs, an input and a shared one among them."""
        last = self.values[-3:]
        return self.builder.finish(*last, last[-1], self.rng.choice(self.values))

    def call(self, target: Any, *args: Any) -> Node:
        return self.builder.call(target, *args)

    def keep(self, node: Node) -> None:
        self.values.append(node)

    def matrix(self, columns: int | None = None) -> Node:
        """Return a value of 4 rows; an input always fits."""
        fits = [v for v in self.values if _size(v) == (4, columns or 8)]
        return self.rng.choice(fits or self.values[:1])

    def any(self) -> Node:
        return self.rng.choice(self.values)

    def alike(self, node: Node) -> Node:
        return self.rng.choice([v for v in self.values if _size(v) == _size(node)])

    def parameter(self, *shape: int) -> Node:
        value = nn.Parameter(torch.randn(shape) * 0.5)
        return self.builder.attribute(f"w{len(list(self.builder.root.parameters()))}", value)

    def frozen(self, *shape: int) -> Node:
        return self.builder.attribute(f"f{len(list(self.builder.root.buffers()))}", torch.randn(shape) * 0.5)

    def draw_linear(self) -> None:
        bias = self.parameter(8) if self.rng.random() < 0.5 else None
        self.keep(self.call(aten.linear.default, self.matrix(), self.parameter(8, 8), bias))

    def draw_twice_read_weight(self) -> None:
        weight = self.parameter(8, 8)
        once = self.call(aten.linear.default, self.matrix(), weight)
        self.keep(self.call(aten.linear.default, once, weight))

    def draw_matmul(self) -> None:
        turned = self.call(aten.transpose.int, self.matrix(), 0, 1)
        square = self.call(aten.matmul.default, self.matrix(), turned)
        self.keep(self.call(aten.matmul.default, square, self.matrix()))

    def draw_elementwise(self) -> None:
        self.keep(
            self.call(self.rng.choice([aten.relu, aten.tanh, aten.sigmoid, aten.neg, aten.gelu]).default, self.any())
        )

    def draw_sum_of_two(self) -> None:
        value = self.any()
        self.keep(self.call(self.rng.choice([aten.add, aten.mul, aten.sub]).Tensor, value, self.alike(value)))

    def draw_scaled(self) -> None:
        self.keep(self.call(aten.mul.Tensor, self.any(), 0.5))

    def draw_normalised(self) -> None:
        weight, bias = self.parameter(8), self.parameter(8)
        self.keep(self.call(aten.layer_norm.default, self.matrix(), [8], weight, bias))

    def draw_statistics(self) -> None:
        count = len(list(self.builder.root.buffers()))
        mean = self.builder.attribute(f"mean{count}", torch.zeros(8))
        var = self.builder.attribute(f"var{count}", torch.ones(8))
        weight, bias = self.parameter(8), self.parameter(8)
        self.keep(self.call(aten.batch_norm.default, self.matrix(), weight, bias, mean, var, True, 0.1, 1e-5, False))

    def draw_softmax(self) -> None:
        self.keep(self.call(aten.softmax.int, self.any(), -1))

    def draw_dropout(self) -> None:
        self.keep(self.call(aten.dropout.default, self.any(), 0.5, True))

    def draw_view(self) -> None:
        self.keep(self.call(aten.view.default, self.call(aten.contiguous.default, self.matrix()), [4, 2, 4]))

    def draw_view_back(self) -> None:
        cubes = [v for v in self.values if _size(v) == (4, 2, 4)]
        if cubes:
            self.keep(self.call(aten.reshape.default, self.rng.choice(cubes), [4, 8]))

    def draw_slice(self) -> None:
        self.keep(self.call(aten.slice.Tensor, self.matrix(), 1, 0, 4))

    def draw_halves(self) -> None:
        halves = self.call(self.rng.choice([aten.chunk.default, aten.unsafe_chunk.default]), self.matrix(), 2, 1)
        first, second = (self.call(operator.getitem, halves, i) for i in range(2))
        self.keep(first)
        self.keep(second)
        self.keep(self.call(aten.cat.default, [second, first], 1))

    def draw_split(self) -> None:
        parts = self.call(aten.split.Tensor, self.matrix(), 4, 1)
        self.keep(self.call(operator.getitem, parts, self.rng.randrange(2)))

    def draw_several_outputs(self) -> None:
        best = self.call(aten.topk.default, self.matrix(), 4, 1)
        self.keep(self.call(operator.getitem, best, 0))

    def draw_in_place(self) -> None:
        target = self.writable()
        op = self.rng.choice(["add", "scale", "relu", "copy"])
        if op == "add":
            self.keep(self.call(aten.add_.Tensor, target, self.alike(target)))
        elif op == "scale":
            self.keep(self.call(aten.mul_.Tensor, target, 1.5))
        elif op == "relu":
            self.keep(self.call(aten.relu_.default, target))
        else:
            self.keep(self.call(aten.copy_.default, target, self.alike(target)))

    def draw_written_slice(self) -> None:
        part = self.call(aten.select.int, self.writable(), 0, self.rng.randrange(4))
        self.call(aten.mul_.Tensor, part, 2.0)

    def draw_written_between_two_reads(self) -> None:
        value = self.writable(8)
        self.keep(self.call(aten.linear.default, value, self.frozen(8, 8)))
        self.call(aten.mul_.Tensor, value, 1.5)
        self.keep(self.call(aten.linear.default, value, self.frozen(8, 8)))

    def draw_view_read_after_its_base_is_written(self) -> None:
        value = self.writable(8)
        base = self.call(aten.add.Tensor, value, self.matrix()) if self.rng.random() < 0.5 else value
        view = self.call(aten.transpose.int, self.call(aten.slice.Tensor, base, 0, 0, 4), 0, 1)
        self.call(aten.add_.Tensor, base, self.alike(base))
        self.keep(self.call(aten.matmul.default, self.frozen(4, 8), view))
        self.keep(base)

    def draw_halves_of_which_one_is_written(self) -> None:
        value = self.call(aten.add.Tensor, self.matrix(), self.matrix())
        halves = self.call(aten.unsafe_chunk.default, value, 2, 1)
        first, second = (self.call(operator.getitem, halves, i) for i in range(2))
        before = self.call(aten.linear.default, value, self.frozen(8, 8))
        self.call(aten.mul_.Tensor, first, 2.0)
        after = self.call(aten.linear.default, value, self.frozen(8, 8))
        self.values += [before, after, second]

    def writable(self, columns: int | None = None) -> Node:
        """Return a value that autograd lets one write to; the third input stays as it is."""
        halves = {aten.chunk.default, aten.unsafe_chunk.default, aten.split.Tensor}
        values = [v for v in self.values if v.name != "x2" and not _from(v, halves)]
        return self.rng.choice([v for v in values if columns is None or _size(v) == (4, columns)])


def _size(node: Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _from(node: Node, targets: set[Any]) -> bool:
    """Say whether a value is an output of several of one op, or a view of one, which autograd guards."""
    seen, front = set(), [node]
    while front:
        n = front.pop()
        if n.target in targets:
            return True
        front += [m for m in n.all_input_nodes[:1] if m not in seen]
        seen.update(front)
    return False


def residual_chain(nodes: int) -> GraphModule:
    """Return a chain of residual MLP blocks of about this many nodes."""
    builder = Builder()
    x = builder.input("x", (4, 8))
    while len(builder.graph.nodes) < nodes:
        names = iter(f"p{len(builder.graph.nodes)}_{i}" for i in range(6))
        shapes = [(8,), (8,), (16, 8), (16,), (8, 16), (8,)]
        w = [builder.attribute(n, nn.Parameter(torch.ones(s))) for n, s in zip(names, shapes, strict=True)]
        h = builder.call(aten.layer_norm.default, x, [8], w[0], w[1])
        h = builder.call(aten.gelu.default, builder.call(aten.linear.default, h, w[2], w[3]))
        h = builder.call(aten.dropout.default, builder.call(aten.linear.default, h, w[4], w[5]), 0.1, True)
        x = builder.call(aten.add.Tensor, x, h)
    return builder.finish(x)


def storages(tensors: list[Tensor]) -> Iterator[int]:
    """Number the storages behind tensors, in order of appearance: equal numbers are one storage."""
    seen: dict[int, int] = {}
    for t in tensors:
        yield seen.setdefault(t.untyped_storage().data_ptr(), len(seen))
