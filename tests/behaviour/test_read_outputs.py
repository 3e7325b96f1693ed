"""An output from which another output is computed is the tensor that is read; outputs share storage as in the model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from tests.support.baseline import UnderAutocast
from tests.support.front_ends import BF16, F32, FRESH, casts, convert, each_front_end, tensors
from tests.support.helpers import Layers, Two, example

pytestmark = FRESH
LEVELS = ("O0", "O1", "O2", "O1,output_dtype=autocast", "O2,output_dtype=autocast")


def class_activation(self: Any, x: Tensor) -> Any:
    h = self.conv(x).relu()
    return h, self.head(h.mean((2, 3)))


def latents(self: Any, z: Tensor) -> Any:
    w = F.leaky_relu(self.l(z) + self.bias)
    return w, self.m(w)


def features(self: Any, x: Tensor) -> Any:
    h = self.l(x)
    return {"hidden": h, "logits": self.m(h)}


def features_in_place(self: Any, x: Tensor) -> Any:
    h = self.l(x).mul(1.5)
    h.relu_()
    return h, self.m(h)


def views(self: Any, x: Tensor) -> Any:
    h = self.l(x)
    a, b = h.split(3, -1)
    return h, h.view(-1), b, self.m(torch.cat([b, a], -1))


def deep(self: Any, x: Tensor) -> Any:
    h = self.l(x)
    k = self.m(h)
    with torch.no_grad():
        scale = h.abs().mean()
    return h, k, self.m(k * scale + h)


def rescaled(self: Any, x: Tensor) -> Any:
    h = self.l(x)
    h.unsqueeze(0).mul_(0.5)
    with torch.no_grad():
        h /= 2
    return h, self.m(h)


def convolution() -> Layers:
    return Layers(class_activation, conv=nn.Conv2d(3, 8, 3, padding=1), head=nn.Linear(8, 4))


def mapping() -> Any:
    model = Two(latents)
    model.bias = nn.Parameter(torch.zeros(6))
    return model


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Tensor]]] = {
    "class activation": (convolution, lambda: torch.randn(2, 3, 8, 8)),
    "latents": (mapping, example),
    "features": (partial(Two, features), example),
    "in place": (partial(Two, features_in_place), example),
    "views": (partial(Two, views), example),
    "deep": (partial(Two, deep), example),
    "rescaled": (partial(Two, rescaled), example),
}


def gradients(called: Any, x: Tensor) -> list[Tensor | None]:
    """Return the gradients of the last output by the others."""
    *outputs, last = tensors(called(x))
    return list(torch.autograd.grad(last.float().square().sum(), outputs, allow_unused=True))


@pytest.mark.default_case(front_end="graph")
@each_front_end
@pytest.mark.parametrize("name", MODELS)
def test_gradients_by_an_output_are_those_of_the_model(name: str, front_end: str) -> None:
    make, inputs = MODELS[name]
    model, x = make(), inputs()
    exact = gradients(model, x)
    expected = gradients(UnderAutocast(model, BF16), x)
    assert any(g is not None for g in exact)
    for level in LEVELS:
        found = gradients(convert(model, (x,), front_end, f"{level},dtype=bf16" if level != "O0" else level), x)
        for ours, theirs in zip(found, exact if level == "O0" else expected, strict=True):
            assert (ours is None) is (theirs is None)
            if ours is None or theirs is None:
                continue
            if level.startswith("O2"):
                torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.05, atol=0.05)
            else:
                assert torch.equal(ours.float(), theirs.float())


@pytest.mark.default_case(front_end="view")
@each_front_end
@pytest.mark.parametrize("name", MODELS)
def test_parameters_have_autocasts_gradients_where_only_the_model_reads_an_output(name: str, front_end: str) -> None:
    make, inputs = MODELS[name]
    model, x, found = make(), inputs(), []
    for called in (convert(model, (x,), front_end, "O1,dtype=bf16"), UnderAutocast(model, BF16)):
        model.zero_grad()
        tensors(called(x))[-1].float().square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.default_case(policy="O1,dtype=bf16")
@pytest.mark.parametrize("policy", ["O1,dtype=bf16", "O2,dtype=bf16"])
def test_hooks_on_an_output_and_retain_grad_act(policy: str) -> None:
    model, x = Two(features), example()
    outputs = fxamp.convert(model, (x,), policy=policy)(x)
    outputs["hidden"].retain_grad()
    outputs["logits"].sum().backward(retain_graph=True)
    assert outputs["hidden"].grad is not None
    model.zero_grad(set_to_none=True)
    outputs["hidden"].register_hook(torch.zeros_like)
    outputs["logits"].sum().backward()
    weights: Any = model.l.weight, model.m.weight
    assert [bool(w.grad.any()) for w in weights] == [False, True]


def test_an_output_that_a_caller_trains_by_too_is_named_and_nearer_to_the_exact_gradient() -> None:
    torch.manual_seed(0)
    model, x = Two(features), torch.randn(512, 6)

    def trained(called: Any, dtype: torch.dtype = F32) -> Tensor:
        model.zero_grad(set_to_none=True)
        outputs = called(x.to(dtype))
        (outputs["logits"].to(dtype).square().sum() + outputs["hidden"].to(dtype).exp().sum()).backward()
        weight: Any = model.l.weight
        return torch.as_tensor(weight.grad).double()

    view = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    assert [d.code for d in fxamp.plan_of(view).deviations] == ["output"]
    assert "handed out in FP32 as the tensor that is read" in str(fxamp.plan_of(view).deviations[0])
    ours, theirs = trained(view), trained(UnderAutocast(model, BF16))
    exact = trained(model.double(), torch.float64)
    assert not torch.equal(ours, theirs)
    assert (ours - exact).norm() < (theirs - exact).norm()


def with_loss(self: Any, x: Tensor) -> Any:
    logits = self.m(self.l(x))
    return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)), logits


def with_the_authors_cast(self: Any, x: Tensor) -> Any:
    logits = self.m(self.l(x))
    return logits.float().logsumexp(-1).mean(), logits


@pytest.mark.parametrize(
    ("forward", "count"),
    [(with_loss, 6), (with_the_authors_cast, 5), (features, 8), (lambda self, x: (self.m(self.l(x)), x), 6)],
)
def test_an_output_costs_a_cast_more_only_where_ops_in_16_bits_read_it(forward: Any, count: int) -> None:
    """Five casts are of the input, weights and biases; of those of outputs one, where it stands, is its reader's."""
    model, x = Two(forward), example()
    view = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    assert len(casts(view)) == count
    with torch.no_grad():
        view = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    reads = [n for n in casts(view) if n.meta["val"].dtype == BF16 and n.all_input_nodes[0].meta["val"].dtype == F32]
    assert len(reads) == 5  # none goes up and down again where nothing has a gradient


def several(self: Any, x: Tensor) -> Any:
    h = self.l(x)
    a, b = self.m(h).chunk(2, -1)
    return h, h, h.view(-1), h[0], a, b


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_outputs_share_storage_as_in_the_model(front_end: str) -> None:
    model, x = Two(several), example()
    expected = model(x)
    for policy in ("O1,dtype=bf16", "O2,dtype=bf16", "O1,dtype=bf16,output_dtype=autocast"):
        got = convert(model, (x,), front_end, policy)(x)
        assert got[0] is got[1]
        for outputs in (got, expected):
            first = [t.untyped_storage().data_ptr() for t in outputs]
            assert [p == first[0] for p in first] == [True] * 4 + [False] * 2
            assert first[4] == first[5]
        assert [t.dtype for t in got] == [BF16 if "autocast" in policy else F32] * 6


def test_an_input_and_a_buffer_that_are_returned_beside_what_reads_them_are_themselves() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return x, self.table, self.l(x + self.table)

    model, x = Two(forward), example().requires_grad_()
    model.register_buffer("table", torch.ones(6))
    got = fxamp.convert(model, (x,), policy="O1,dtype=bf16")(x)
    assert got[0] is x
    assert got[1] is model.table
    assert torch.autograd.grad(got[2].sum(), got[0])[0].any()


@dataclass(frozen=True)
class Output:
    loss: Tensor
    hidden: list[Tensor]
    name: str = "outputs"


def in_a_dataclass(self: Any, x: Tensor) -> Output:
    h = self.l(x)
    logits = self.m(h)
    return Output(logits.float().square().mean(), [h, logits])


def behind_a_break(self: Any, x: Tensor) -> Output:
    h = self.l(x)
    logits = self.m(h)
    torch._dynamo.graph_break()
    return Output(logits.float().square().mean(), [h, logits])


def test_the_fields_of_a_dataclass_are_outputs() -> None:
    model, x = Two(in_a_dataclass), example()
    got, expected = (
        call(x) for call in (fxamp.convert(model, (x,), policy="O1,dtype=bf16"), UnderAutocast(model, BF16))
    )
    assert (type(got), got.name, [t.dtype for t in tensors(vars(got))]) == (Output, "outputs", [F32] * 3)
    ours, theirs = (torch.autograd.grad(o.loss, o.hidden[:1])[0] for o in (got, expected))
    assert torch.equal(ours, theirs.float())


def test_what_crosses_a_graph_break_and_is_read_behind_it_is_handed_out_as_it_was_read() -> None:
    model, x = Two(behind_a_break), example()
    view = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    got, expected = view(x), UnderAutocast(model, BF16)(x)
    assert [t.dtype for t in got.hidden] == [BF16, BF16]
    assert all(map(torch.equal, *(torch.autograd.grad(o.loss, o.hidden) for o in (got, expected))))
    assert any(note.startswith("output: ") for note in fxamp.plan_of(view).notes)
    with torch.no_grad():
        assert [t.dtype for t in view(x).hidden] == [F32, F32]


# ------------------------------------------------------------------------------------- random programs

OPS = ("linear", "relu", "add", "mul", "view", "split", "norm", "float", "softmax", "in place", "select", "slice",
       "detached", "no_grad", "cat", "gelu")  # fmt: skip


class Program(nn.Module):
    """A random program whose last output is a loss of the last value, and the others some of the values before it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        self.layers, self.norm = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.LayerNorm(8)
        self.steps = [
            (draw.choice(OPS), draw.randint(1, 3), draw.randint(0, 99), draw.random() < 0.5, draw.randint(-200, 99))
            for _ in range(draw.randint(2, 7))
        ]
        self.loss = draw.choice(("cross_entropy", "float", "square"))

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        values, outputs = [self.layers[0](x)], []
        for op, back, other, returned, again in self.steps:
            h = values[-min(back, len(values))]
            alike = [v for v in values if v.shape == h.shape]
            values.append(self.apply_op(op, h, alike[other % len(alike)]))
            outputs += [values[-1]] * returned
            outputs += [values[again % len(values)]] * (again >= 0)
        last = values[-1].flatten(1) if values[-1].dim() > 1 else values[-1][None]
        if self.loss == "cross_entropy":
            return [*outputs, values[-1], F.cross_entropy(last, y[: len(last)] % last.shape[1])]
        return [*outputs, (last.float() if self.loss == "float" else last).square().mean()]

    def apply_op(self, op: str, h: Tensor, other: Tensor) -> Tensor:
        whole = h.dim() == 2 and h.shape[-1] == 8
        if op == "linear" and whole:
            return self.layers[1](h)
        if op == "norm" and whole:
            return self.norm(h)
        if op == "split" and whole:
            return h.split(4, -1)[1]
        if op == "view" and whole and h.is_contiguous():
            return h.view(-1, 2, 4)
        if op == "select" and whole:
            return h[:, 0]
        if op == "no_grad":
            with torch.no_grad():
                size = h.abs()
            return h + size
        plain: dict[str, Callable[[], Tensor]] = {
            "add": lambda: h + other, "mul": lambda: h * other, "float": h.float, "softmax": lambda: h.softmax(-1),
            "in place": lambda: h.mul(1.5).relu_(), "slice": lambda: h[0:2], "detached": lambda: h.detach() + h,
            "cat": lambda: torch.cat([h, h], -1), "gelu": lambda: F.gelu(h),
        }  # fmt: skip
        return plain.get(op, h.relu)()


def shared(outputs: list[Tensor]) -> list[list[bool]]:
    places = [t.untyped_storage().data_ptr() for t in outputs]
    return [[a == b for a in places] for b in places]


def traced(model: nn.Module) -> UnderAutocast:
    compiled: Any = torch.compile(model, backend="eager")
    return UnderAutocast(compiled, BF16)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(i, marks=pytest.mark.slow) for i in range(8, 60))])
def test_random_programs_have_the_gradients_by_their_outputs_that_autocast_has(seed: int) -> None:
    """`torch.compile` too may connect what a model does not: a view that does nothing is the same tensor to it."""
    model, x, y = Program(seed), torch.randn(6, 8), torch.arange(6) % 4
    views = [fxamp.convert(model, (x, y), policy=f"{level},dtype=bf16") for level in ("O1", "O2")]
    runs = list[tuple[list[Any], list[Any], list[Any]]]()
    for called in (*views, UnderAutocast(model, BF16), traced(model)):
        model.zero_grad(set_to_none=True)
        *outputs, loss = called(x, y)
        by = [t for t in outputs if t.requires_grad]
        found = torch.autograd.grad(loss.float(), by, allow_unused=True, retain_graph=True) if by else ()
        loss.float().backward()
        runs.append((outputs, list(found), [p.grad for p in model.parameters()]))
    exact, eager, compiled = model(x, y)[:-1], *runs[2:]
    named = {d.code for d in fxamp.plan_of(views[0]).deviations}
    for level, (outputs, by_outputs, by_parameters) in zip(("O1", "O2"), runs[:2], strict=True):
        assert [t.dtype for t in outputs] == [t.dtype for t in exact]
        assert shared(outputs) in (shared(exact), shared(eager[0]))
        for ours, *theirs in zip(by_outputs, eager[1], compiled[1], strict=True):
            assert ours is not None or None in theirs
            if level == "O1" and ours is not None and None not in theirs and "output" not in named:
                assert any(torch.equal(ours.float(), g.float()) for g in theirs)
        for ours, *theirs in zip(by_parameters, eager[2], compiled[2], strict=True):
            assert level == "O2" or any(ours is g or torch.equal(ours, g) for g in theirs)
