"""The check on twins: it finds a graph that is not the model's, and leaves model, random states and inputs alone."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp._torch import TorchDispatchMode
from fxamp.capture import backend
from fxamp.observe.sketch import LARGE, distance, equal, norm, sketch
from reports.peak import peak_of
from tests.support.front_ends import FRESH, under_autocast
from tests.support.helpers import Layers, Two, assert_same, assert_untouched, example, fingerprint, in_turns

pytestmark = FRESH


# A graph that is not the model's.


def _another_op(graph: Graph) -> None:
    [node] = [n for n in graph.nodes if n.op == "call_function" and "relu" in str(n.target)]
    node.target, node.kwargs = torch.abs, {}


def _to_output(graph: Graph, change: Callable[[Any], Any]) -> None:
    output: Any = graph.output_node()
    (value, *rest), *_ = output.args
    with graph.inserting_before(output):
        output.args = ((change(value), *rest),)


def _twice_the_gradient(graph: Graph) -> None:
    def change(value: Any) -> Any:
        twice = graph.call_function(torch.mul, (value, 2.0))
        return graph.call_function(torch.sub, (twice, graph.call_function(torch.detach, (value,))))

    _to_output(graph, change)


def _no_gradient(graph: Graph) -> None:
    _to_output(graph, lambda value: graph.call_function(torch.detach, (value,)))


def _no_statistics(graph: Graph) -> None:
    for node in graph.nodes:
        if "batch_norm" in str(node.target):
            node.args = (node.args[0], None, None, *node.args[3:])


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Graph], None]], nn.Module]:
    """Return what has graphs of a model captured wrong."""

    def make(spoil: Callable[[Graph], None], width: int = 6) -> nn.Module:
        def copied(gm: Any) -> Any:
            made = original(gm)
            spoil(made.graph)
            made.recompile()
            return made

        original = backend.copied  # type: ignore[attr-defined]
        monkeypatch.setattr(backend, "copied", copied)
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())

    return make


FOUND: dict[str, tuple[Callable[[Graph], None], str, str, tuple[bool | str, ...]]] = {
    "an op": (_another_op, "O0", "output 0 differs by", (True, "forward")),
    "an op at O1": (_another_op, "O1", "output 0 differs by", (True, "forward")),
    "a gradient": (_twice_the_gradient, "O0", r"the gradient of '0\.weight' differs", (True,)),
    "no gradient": (_no_gradient, "O0", "only one of them has gradients", (True,)),
    "a buffer": (_no_statistics, "O1", r"buffer '1\.running_mean' has other values", (True, "forward")),
}


@pytest.mark.parametrize("wrong", FOUND)
@pytest.mark.parametrize("check", [True, "forward", False])
def test_a_wrong_graph_is_found_by_what_it_loses(wrong: str, check: bool | str, spoiled: Any) -> None:
    spoil, level, said, found_by = FOUND[wrong]
    model = spoiled(spoil)
    before = fingerprint(model)
    if check in found_by:
        with pytest.raises(fxamp.CaptureError, match=f"does not compute what Sequential computes: {said}.*check=False"):
            fxamp.convert(model, (example(),), policy=f"{level},dtype=bf16", check=check)
    else:
        fxamp.convert(model, (example(),), policy=f"{level},dtype=bf16", check=check)
    assert_untouched(model, before)


@pytest.mark.parametrize("wrong", FOUND)
def test_a_wrong_graph_of_large_tensors_is_found(wrong: str, spoiled: Any) -> None:
    spoil, level, said, _ = FOUND[wrong]
    model, x = spoiled(spoil, 192), torch.randn(96, 192)
    assert x.numel() > LARGE
    with pytest.raises(fxamp.CaptureError, match=f"does not compute what Sequential computes: {said}"):
        fxamp.convert(model, (x,), policy=f"{level},dtype=bf16")


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("head", [0, 4000])
def test_a_conversion_needs_the_memory_of_one_forward_and_backward(level: str, head: int) -> None:
    """With weights as large as what is kept for backward, and with logits, of which the model returns a loss too."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)]
    last = [nn.Linear(512, head)] if head else []

    def forward(self: Any, x: Tensor) -> Any:
        h = self.m(x)
        return (F.cross_entropy(h, torch.zeros(len(h), dtype=torch.long)), h) if head else h

    model = Layers(forward, m=nn.Sequential(*layers, *last))
    x = torch.randn(320, 512)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=level == "O1"):
            output = model(x)
        (output[0] if head else output.mean()).backward()
        model.zero_grad()

    step()
    converted = peak_of(lambda: fxamp.convert(model, (x,), policy=f"{level},dtype=bf16"))
    assert converted <= 1.05 * peak_of(step)


def test_a_sketch_tells_equal_tensors_from_others_and_how_far_they_are_apart() -> None:
    torch.manual_seed(0)
    a = torch.randn(700, 999)
    a[0, 0], a[1, 1] = 0.0, torch.nan
    same = a.t().contiguous().t()
    same[0, 0] = -0.0
    assert equal(sketch(a), sketch(same))
    for place in ((0, 0), (1, 1), (699, 998)):
        other = a.clone()
        other[place] = 1e-40
        assert not equal(sketch(a), sketch(other))
    assert not equal(sketch(a), sketch(a.double()))
    assert not equal(sketch(a), sketch(a.t().reshape(700, 999)))
    a, b = torch.randn(2, 700, 999)
    assert distance(sketch(a), sketch(b)) == pytest.approx(float((a - b).norm()), rel=0.1)
    assert norm(sketch(a)) == pytest.approx(float(a.norm()), rel=0.1)
    assert distance(sketch(a), sketch(b[:, :998])) == float("inf")
    row = a.clone()
    row[5, :9] += 1.0
    assert distance(sketch(a), sketch(row)) == pytest.approx(3.0)


# What cannot be checked, or torch.compile alone computes otherwise: a note and a warning.


class ByCompile(Two):
    def forward(self, x: Tensor) -> Any:
        return self.l(x) * (2.0 if torch.compiler.is_compiling() else 1.0)


class NoCopies(Two):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies of me")


class NoCopiesOfTwoGraphs(NoCopies):
    def forward(self, x: Tensor) -> Any:
        h = self.l(x)
        torch._dynamo.graph_break()
        return self.m(h)


def a_product_in_place(self: Any, x: Tensor) -> Any:
    y = x
    y @= self.m.weight  # a tensor has no such thing in place, and Dynamo writes to the input
    return self.l(y) + x


CALLS = [0]


def counted_outside(self: Any, x: Tensor) -> Any:
    CALLS[0] += 1
    return self.l(x) * CALLS[0]


@pytest.mark.parametrize(
    ("kind", "said", "complete"),
    [
        (
            lambda: Two(a_product_in_place),
            r"capture: torch\.compile of a_product_in_place alone does not compute",
            False,
        ),
        (lambda: Two(counted_outside), "not checked: counted_outside itself does not compute the same twice", True),
        (ByCompile, r"capture: torch\.compile of ByCompile alone does not compute .* output 0 differs by 1 of", False),
        (NoCopies, r"not checked: it cannot be copied \(TypeError: no copies of me\)", True),
        (NoCopiesOfTwoGraphs, "not checked, and what comes after its first graph break not captured: it cannot", False),
    ],
)
def test_what_is_not_checked_is_a_note_and_one_warning(
    kind: Callable[[], Two], said: str, complete: bool, caplog: pytest.LogCaptureFixture
) -> None:
    view = fxamp.convert(kind(), (example(),), policy="O1,dtype=bf16")
    plan = fxamp.plan_of(view)
    assert plan.complete is complete
    assert len([note for note in plan.notes if re.match(said, note)]) == 1
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and r.name.startswith("fxamp")]
    assert len(warned) == 1
    assert re.search(said.removeprefix("not "), warned[0])
    view(example())


class Rounding(torch.autograd.Function):
    """Rounds, and has a gradient all the same, which torch.compile loses inside of a transform."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def own_gradient(self: Any, x: Tensor) -> Any:
    h = self.l(x)
    return h + torch.func.grad(lambda t: (Rounding.apply(t) * t).sum())(h)  # type: ignore[no-untyped-call]


class Clamping(torch.autograd.Function):
    """Has a forward-mode derivative of its own, which torch.compile loses too."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp(-1, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * 1.0


def own_jvp(self: Any, x: Tensor) -> Any:
    apply: Any = Clamping.apply
    made: Any = torch.func.jvp(lambda t: apply(self.l(t) * 2), (x,), (torch.ones_like(x),))
    return self.m(made[0] + made[1])


def own_in_vmap(self: Any, x: Tensor) -> Any:
    """A Function beside a vmap, neither of which is in a derivative: one graph, with the gradient that it has."""
    h = Rounding.apply(self.l(x))  # type: ignore[no-untyped-call]
    return self.m(torch.vmap(lambda row: row * 2)(h))


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("forward", [own_gradient, own_jvp, own_in_vmap], ids=lambda f: f.__name__)
def test_the_derivative_of_a_function_is_not_lost(
    forward: Any, checked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Two(forward), example()
    view = fxamp.convert(model, (x,) if checked else None, policy="O1,dtype=bf16")
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x).float()
    got = view(x)
    assert torch.equal(got, expected)
    gradients = [torch.autograd.grad(y.sum(), model.l.weight)[0] for y in (got, expected)]
    assert torch.equal(*gradients)
    lost = forward is not own_in_vmap
    said = [r.getMessage() for r in caplog.records if "it loses that of" in r.getMessage()]
    assert len(said) == lost
    plan = fxamp.plan_of(view)
    assert plan.complete is not lost
    assert not any("inspect.py" in note for note in plan.notes)


@pytest.mark.parametrize("policy", ["O0", "O1,dtype=bf16"])
def test_a_capture_that_computes_something_else_is_not_used(
    policy: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxamp.view.function.refuse_lost_derivatives", lambda gm: None)
    model, x = Two(own_gradient), example()
    view = fxamp.convert(model, (x,), policy=policy)
    with torch.autocast("cpu", torch.bfloat16, enabled=policy != "O0"):
        expected = model(x).float()
    assert torch.equal(view(x), expected)
    [said] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and r.name.startswith("fxamp")]
    assert "runs as its author wrote it" in said
    assert not fxamp.plan_of(view).complete


class Recomputing(torch.autograd.Function):
    """A checkpoint written by hand: its backward runs another one, through the same parameters."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.x, ctx.parameters = run, x, parameters
        with torch.no_grad():
            out: Tensor = run(x)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x.view_as(x))
        return None, *torch.autograd.grad(out, (x, *ctx.parameters), gradient)


def recomputed(self: Any, x: Tensor) -> Any:
    run = nn.Sequential(self.l, nn.Tanh())
    h = Recomputing.apply(run, self.m(x), *self.l.parameters())  # type: ignore[no-untyped-call]
    return self.l(h)


def test_a_backward_inside_of_the_backward_is_not_what_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    view = fxamp.convert(Two(recomputed), (example(),), policy="O0")
    assert not [r for r in caplog.records if r.levelname == "WARNING" and "differs" in r.getMessage()]
    assert not any("capture:" in note for note in fxamp.plan_of(view).notes)


def test_on_the_meta_device_nothing_is_checked_and_the_plan_says_so() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), torch.empty(4, 6)
    view = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    assert [note for note in fxamp.plan_of(view).notes if "meta device" in note]
    assert (view(x).device.type, view(x).dtype) == ("meta", torch.float32)


# What is right is not refused.


def own_backward_fails(self: Any, x: Tensor) -> Any:
    y = torch.exp(self.l(x))
    z = y * 2
    y.add_(1)
    return z + y


RIGHT: dict[str, Callable[..., Any]] = {
    "not a number, and integers": lambda self, x: (self.l(x) / 0 * 0, x.argmax(1), x > 0),
    "no tensor": lambda self, x: (self.l(x), f"{x.dtype}", None, 3),
    "only a backward of its own that fails": own_backward_fails,
    "a checkpoint": lambda self, x: checkpoint(
        lambda a: self.m(self.l(a).log_softmax(-1).exp()), x, use_reentrant=False
    ),
    "a transform": lambda self, x: self.m(torch.vmap(self.l)(x)),
    "Python's random": lambda self, x: self.l(x) * random.random(),
    "NumPy's random": lambda self, x: self.l(x) * float(numpy.random.rand()),
    "torch's random": lambda self, x: self.l(x) * torch.rand(1),
    "a write to a parameter": lambda self, x: (self.l.bias.data.mul_(0.5), self.l(x))[1],
    "a write to the input": lambda self, x: self.l(x.mul_(2)),
}


@pytest.mark.parametrize(("what", "level"), in_turns(RIGHT, ["O0", "O1", "O2"]))
def test_what_is_right_is_converted_and_nothing_is_used_up(what: str, level: str) -> None:
    torch.manual_seed(0)
    model, x = Two(RIGHT[what]), example()
    random.seed(0)
    numpy.random.seed(0)
    expected = random.getstate(), str(numpy.random.get_state())
    before = fingerprint(model)
    view = fxamp.convert(model, (x,), policy=f"{level},dtype=bf16")
    assert (random.getstate(), str(numpy.random.get_state())) == expected
    assert torch.equal(x, example())
    assert_untouched(model, before)
    assert not [note for note in fxamp.plan_of(view).notes if "capture" in note or "not checked" in note]


def test_without_gradients_outputs_alone_are_compared() -> None:
    with torch.no_grad():
        fxamp.convert(Two(), (example(),), policy="O0")
    fxamp.convert(Two().requires_grad_(False), (example(),), policy="O0")


def test_a_reentrant_checkpoint_with_dropout_is_compared_as_it_recomputes() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.m(checkpoint(lambda a: self.l(nn.functional.dropout(a, 0.5)), x, use_reentrant=True))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        view = fxamp.convert(Two(forward), (example(),), policy="O0")
    [note] = fxamp.plan_of(view).notes
    assert "the gradient of 'l.weight' differs" in note  # which has none in the model, since no input has one


def test_a_sparse_gradient_is_compared_too() -> None:
    model = nn.Sequential(nn.Embedding(5, 6, sparse=True), nn.Linear(6, 2))
    assert not fxamp.plan_of(fxamp.convert(model, (torch.tensor([0, 3, 3]),), policy="O0")).notes


def test_gradients_buffers_attributes_and_renormalised_rows_are_as_before() -> None:
    class Counting(nn.Sequential):
        calls = 0

        def forward(self, at: Tensor) -> Any:
            self.calls += 1
            self.seen = super().forward(at)  # type: ignore[no-untyped-call]
            return self.seen

    table = nn.Embedding(5, 6, max_norm=0.1)
    model = Counting(table, nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout())
    model(torch.tensor([1, 2])).sum().backward()
    before, rows = fingerprint(model), torch.tensor([0, 3, 4])
    view = fxamp.convert(model, (rows,), policy="O1,dtype=bf16")
    assert_untouched(model, before)
    view(rows)
    assert model.calls == 2
    assert model.seen.dtype == torch.float32
    assert float(table.weight[3].detach().norm()) <= 0.11


class Products(TorchDispatchMode):
    """Counts the matrix products of eager code; graphs that are only compared run without modes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("check", "products"), [(True, 2), ("forward", 2), (False, 0)])
def test_the_code_of_the_model_runs_once_to_be_checked(check: bool | str, products: int) -> None:
    model, x = Two(), example()
    with torch.no_grad(), Products() as mode:
        view = fxamp.convert(model, (x,), policy="O1,dtype=bf16", check=check)
    assert mode.count == products
    with torch.no_grad():
        assert_same(view(x), under_autocast(model, (x,)).float())
