"""From O2 on, a norm or softmax written by hand is one FP32 island with low ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from passes.graph.islands import islands
from passes.ops import ops
from tests.support.exported import graph_of, traced_of
from tests.support.front_ends import FRONT_ENDS, convert
from tests.support.graphs import parse
from tests.support.helpers import Layers, Two, example

EPS = 1e-6


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def rms_by_root(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def rms_by_power(x: Tensor) -> Tensor:
    return (x.square().sum(-1, keepdim=True) / x.shape[-1] + EPS) ** -0.5 * x


def rms_by_reciprocal(x: Tensor) -> Tensor:
    return x * (1 / (x.square().mean(-1, keepdim=True).sqrt() + EPS))


def centred(x: Tensor) -> Tensor:
    d = x - x.mean(-1, keepdim=True)
    return d / torch.sqrt(d.pow(2).mean(-1, keepdim=True) + EPS)


def centred_twice(x: Tensor) -> Tensor:
    variance = (x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + EPS)


def centred_by_std(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + EPS)


def moments(x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt((x * x).mean(-1, keepdim=True) - mean * mean + 1e-3)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)


def softmax(x: Tensor) -> Tensor:
    e = torch.exp(x - x.max(-1, keepdim=True).values)
    return e / e.sum(-1, keepdim=True)


def log_softmax(x: Tensor) -> Tensor:
    d = x - x.amax(-1, keepdim=True)
    return d - torch.log(torch.exp(d).sum(-1, keepdim=True))


NORMS = [
    rms, rms_by_root, rms_by_power, rms_by_reciprocal, centred, centred_twice, centred_by_std, moments, unit,
    softmax, log_softmax, F.normalize,
]  # fmt: skip
both_dtypes = pytest.mark.parametrize("low", ["bf16", "fp16"])


def every_norm(also: tuple[str, ...], argument: str, *others: str) -> pytest.MarkDecorator:
    """Parametrize by every second norm with the first value of an argument, and by three with the others.

    The rest is matrix.
    """
    every = [(norm, value) for norm in NORMS for value in (*also, *others)]
    some = (rms, centred, softmax)
    return pytest.mark.parametrize(
        ("norm", argument),
        [
            pytest.param(
                n,
                v,
                id=f"{n.__name__}-{v}",
                marks=() if (v in also and NORMS.index(n) % 2 == 0) or n in some else pytest.mark.matrix,
            )
            for n, v in every
        ],
    )


class Block(nn.Module):
    """A norm with an affine part between two layers."""

    def __init__(self, norm: Callable[[Tensor], Tensor], width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = norm
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.weight, self.bias = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.weight * self.norm(self.first(x)) + self.bias)
        return out


def inputs(rows: int = 512) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(0))


def colours(module: Any, start: int = 1, stop: int = -3) -> dict[str, set[str]]:
    """Return the colours of each reason among the decisions, by default those between first layer and affine part."""
    found: dict[str, set[str]] = {}
    for d in fxamp.plan_of(module).decisions[start:stop]:
        found.setdefault(d.code, set()).add(d.colour)
    return found


def activation_casts(module: Any) -> list[torch.dtype]:
    """Return the dtypes that values other than parameters are cast to, by fxamp or the user, in order."""
    to = [n for n in module.graph.nodes if n.op.startswith("call") and ops.name(n) in ("to", "type_as")]
    made = [(n.args[0], n.meta["val"].dtype) for n in to if n.args[0].op != "get_attr"]
    return [dtype for value, dtype in made if value.meta["val"].dtype != dtype]


@pytest.mark.default_case(low="bf16")
@every_norm(("bf16",), "low", "fp16")
def test_a_norm_written_by_hand_is_one_fp32_island_with_one_cast_in_and_one_out(
    norm: Callable[[Tensor], Tensor], low: str
) -> None:
    module = graph_of(Block(norm), inputs(), f"O2,dtype={low}")
    dtype = fxamp.plan_of(module).policy.dtype
    assert colours(module) == {"island": {"float32"}}
    affine = [d.colour for d in fxamp.plan_of(module).decisions[-3:-1]]
    assert affine == [str(dtype).removeprefix("torch.")] * 2
    assert activation_casts(module) == [dtype, torch.float32, dtype, torch.float32]  # input, in, out, output


@pytest.mark.default_case(policy="O1")
@pytest.mark.parametrize("policy", ["O1,dtype=fp16", "O1"])
def test_at_o1_there_are_no_islands(policy: str) -> None:
    assert "island" not in colours(graph_of(Block(rms), inputs(), policy))


@pytest.mark.default_case(policy="O2,dtype=fp16")
@every_norm(("O2,dtype=fp16",), "policy", "O3,dtype=fp16")
def test_a_norm_of_large_values_matches_fp32(norm: Callable[[Tensor], Tensor], policy: str) -> None:
    if norm is moments:
        pytest.skip("it takes the square of the mean from the mean of squares")

    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return norm(x @ torch.eye(64) + 300)  # 300 squared is out of FP16's range

    x = inputs(8)
    module = graph_of(Large(), x, policy)
    expected = norm((x.half() + 300).float())
    assert torch.isfinite(module(x)).all()
    bound = 2 * torch.finfo(torch.float16).eps * (1 + expected.abs().max())
    assert (module(x) - expected).abs().max() <= bound


@pytest.mark.default_case(low="bf16")
@both_dtypes
def test_the_norm_of_a_zero_row_is_zero(low: str) -> None:
    x = torch.cat([torch.zeros(1, 64), inputs(3)])
    for norm in (F.normalize, unit):
        for front_end in FRONT_ENDS:
            model = Layers(lambda self, x: self.function(self.l(x)), l=nn.Linear(64, 64, bias=False), function=norm)
            module = convert(model, (x,), front_end, f"O2,dtype={low}")
            assert torch.equal(module(x)[0], torch.zeros(64))
            assert torch.isfinite(module(x)).all()


class LlamaNorm(nn.Module):
    """The norm of Llama: upcast by the user, restored before the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def forward(self, hidden: Tensor) -> Tensor:
        input_dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + EPS)
        return self.weight * hidden.to(input_dtype)


class T5Norm(LlamaNorm):
    """The norm of T5: the variance alone is upcast by the user."""

    def forward(self, hidden: Tensor) -> Tensor:
        variance = hidden.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden * torch.rsqrt(variance + EPS))


@pytest.mark.default_case(low="bf16")
@both_dtypes
@pytest.mark.parametrize("norm", [LlamaNorm, T5Norm])
def test_a_stack_of_the_norms_of_transformers_has_one_cast_in_and_one_out_each(norm: type[nn.Module], low: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), norm(), nn.Linear(64, 64), norm(), nn.Linear(64, 64))
    module = fxamp.convert(model, (inputs(),), policy=f"O2,dtype={low}")  # Dynamo records what the author cast
    dtype = fxamp.plan_of(module).policy.dtype
    decisions = fxamp.plan_of(module).decisions
    internal = [d.colour for d in decisions if d.op in ("pow", "mean", "add", "rsqrt")]
    assert internal == ["float32"] * 8
    products = [d.colour for d in decisions if d.op == "mul"]
    assert products == ["float32", str(dtype).removeprefix("torch.")] * 2
    assert activation_casts(*fxamp.graphs(module)) == [dtype, *[torch.float32, dtype] * 2, torch.float32]


@pytest.mark.default_case(low="bf16")
@both_dtypes
def test_a_norm_between_a_product_and_fp32_is_not_brought_down_in_between(low: str) -> None:
    """Autocast casts down for the author's cast, and up for the weight: from O2 on FP32 stays what it is."""
    torch.manual_seed(0)
    model = Layers(lambda self, x: torch.softmax(self.norm(self.l(x)), -1), l=nn.Linear(64, 64), norm=LlamaNorm())
    of = {level: fxamp.convert(model, (inputs(),), policy=f"{level},dtype={low}") for level in ("O1", "O2")}
    o1, o2 = (activation_casts(*fxamp.graphs(view)) for view in of.values())
    dtype = fxamp.plan_of(of["O2"]).policy.dtype
    assert o1 == [dtype, torch.float32, dtype]  # the weight, which is FP32, promotes
    assert o2 == [dtype, torch.float32]
    fp32 = model(inputs())
    errors = {level: (view(inputs()) - fp32).norm().item() for level, view in of.items()}
    assert errors["O2"] < errors["O1"]


class Reading(nn.Module):
    """Casts a norm to a dtype that it reads off a product, with gradients or without."""

    def __init__(self, grad: bool) -> None:
        super().__init__()
        self.grad, self.first, self.norm, self.weight = (
            grad,
            nn.Linear(64, 64),
            LlamaNorm(),
            nn.Parameter(torch.ones(64)),
        )

    def forward(self, x: Tensor) -> Tensor:
        product = self.first(x)
        normed = self.norm(product)
        with torch.set_grad_enabled(self.grad):
            cast = normed.to(product.dtype)
        return torch.softmax(cast * self.weight, -1)


@pytest.mark.parametrize("grad", [True, False])
def test_a_cast_without_gradients_ends_them_as_under_autocast(grad: bool) -> None:
    torch.manual_seed(0)
    model, x = Reading(grad), inputs()
    for policy in ("O1", "O2", "O3"):
        view = fxamp.convert(model, (x,), policy=policy)
        view(x).square().sum().backward()
        assert (model.first.weight.grad is not None) == grad
        model.zero_grad()


def test_a_diff_shows_where_a_cast_comes_out_fp32() -> None:
    model, x = Reading(grad=True), inputs()
    for policy, mark in (("O1", " "), ("O2", "!")):
        text = str(fxamp.diff(fxamp.convert(model, (x,), policy=policy)))
        (line,) = (line for line in text.splitlines() if "cast = normed.to(torch.bfloat16)" in line)
        assert line.startswith(mark)
        assert line.endswith("runs in float32") == (mark == "!")


@pytest.mark.default_case(low="fp16")
@both_dtypes
def test_biases_gammas_and_scales_follow_the_activation(low: str) -> None:
    def chain(self: Any, x: Tensor) -> Tensor:
        return ((x @ self.first + self.bias) * self.gamma * self.scale) @ self.second

    shapes = {"first": (64, 64), "second": (64, 64), "bias": (64,), "gamma": (64,), "scale": (1,)}
    model = Layers(chain, **{name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()})
    module = graph_of(model, inputs(), f"O2,dtype={low}")
    dtype = fxamp.plan_of(module).policy.dtype
    assert {d.colour for d in fxamp.plan_of(module).decisions} == {str(dtype).removeprefix("torch.")}
    assert activation_casts(module) == [dtype, torch.float32]  # input and output


# What is an island, and what is none.


def found(text: str) -> list[str]:
    gm = parse(text)
    kept = islands(gm.graph)
    return [n.name for n in gm.graph.nodes if n in kept]


def test_an_island_begins_where_numerator_and_denominator_meet() -> None:
    assert found(
        """
        x: f32[4, 8]
        y: f32[4, 8]
        h: f32[4, 8] = add.Tensor(x, y)
        square: f32[4, 8] = mul.Tensor(h, h)
        mean: f32[4, 1] = mean.dim(square, [1], True)
        root: f32[4, 1] = rsqrt(mean)
        product: f32[4, 8] = mul.Tensor(h, root)
        after: f32[4, 8] = mul.Tensor(product, y)
        return after
        """
    ) == ["square", "mean", "root", "product"]


@pytest.mark.parametrize(
    "body",
    [
        # The mean of chosen rows: what is divided is no longer what was summed.
        """
        chosen: f32[4, 8] = mul.Tensor(x, m)
        total: f32[8] = sum.dim_IntList(chosen, [0])
        count: f32[8] = sum.dim_IntList(m, [0])
        quotient: f32[8] = div.Tensor(total, count)
        """,
        # A ratio of two values that have nothing in common.
        """
        count: f32[4, 1] = sum.dim_IntList(m, [1], True)
        quotient: f32[4, 8] = div.Tensor(x, count)
        """,
        # No statistic.
        """
        root: f32[4, 8] = sqrt(x)
        quotient: f32[4, 8] = div.Tensor(x, root)
        """,
        # Scaled by a statistic, not divided.
        """
        mean: f32[4, 1] = mean.dim(x, [1], True)
        quotient: f32[4, 8] = mul.Tensor(x, mean)
        """,
        # Centred alone.
        """
        mean: f32[4, 1] = mean.dim(x, [1], True)
        quotient: f32[4, 8] = sub.Tensor(x, mean)
        """,
        # A layer stands between.
        """
        score: f32[4, 4] = matmul(x, t)
        mean: f32[4, 1] = mean.dim(score, [1], True)
        quotient: f32[4, 8] = div.Tensor(x, mean)
        """,
    ],
    ids=["masked mean", "nothing in common", "no statistic", "product", "centred", "through a layer"],
)
def test_another_quotient_is_no_island(body: str) -> None:
    lines = "\n".join(line.strip() for line in body.strip().splitlines())
    assert found(f"x: f32[4, 8]\nm: f32[4, 8]\nt: f32[8, 4]\n{lines}\nreturn quotient") == []


def test_an_override_beats_an_island() -> None:
    policy = fxamp.Policy("O2", ops={"pow": "low"})
    module = graph_of(Block(rms), inputs(), policy)
    assert {d.op: d.colour for d in fxamp.plan_of(module).decisions}["pow"] == "bfloat16"


@pytest.mark.filterwarnings("ignore:FP16 gradients")
@every_norm((), "policy", "O2,dtype=fp16")
def test_gradients_through_an_island_are_near_float64(norm: Callable[[Tensor], Tensor], policy: str) -> None:
    x = inputs(64)
    model = Block(norm)

    def gradients(module: nn.Module, of: nn.Module, x: Tensor) -> Tensor:
        of.zero_grad()
        module(x).square().mean().backward()
        return torch.cat([p.grad.double().flatten() for p in of.parameters() if p.grad is not None])

    truth = gradients(double := Block(norm).double(), double, x.double())
    got = gradients(graph_of(model, x, policy), model, x)
    assert (got - truth).norm() <= 0.004 * truth.norm()


def test_a_number_may_come_first_in_a_product() -> None:
    model = Two(lambda self, x: 0.5 * self.l(x) * x * (2 * torch.rsqrt(x.square().mean(-1, keepdim=True))))
    x = example()
    converted = traced_of(model, x, "O2,dtype=bf16")
    assert torch.allclose(converted(x), model(x), rtol=0.05, atol=0.05)
