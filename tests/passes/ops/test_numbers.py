"""Numbers that the low dtype cannot hold, in every spelling of a mask, and those too small for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from passes.ops import numbers, ops
from passes.ops.rules import row_named
from tests.support.exported import graph_of, plan_of, program_of
from tests.support.front_ends import FRONT_ENDS, convert
from tests.support.graphs import parse
from tests.support.helpers import Layers, in_turns

pytestmark = [pytest.mark.filterwarnings("ignore:FP16 gradients"), pytest.mark.usefixtures("fresh")]
LOWEST = torch.finfo(torch.float32).min
X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
MASK = torch.ones(8, 8).triu(1).bool()
MASK[5] = True  # a row of which nothing is left
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def attention(scores: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = F.scaled_dot_product_attention(scores[None], scores[None], scores[None], attn_mask=mask)[0]
    return found


def written(scores: Tensor, mask: Tensor, fill: float) -> Tensor:
    scores = scores * 1
    scores[mask] = fill
    return scores


SPELLINGS: dict[str, Callable[[Any, Tensor, Tensor, float], Tensor]] = {
    "masked_fill": lambda m, s, mask, v: s.masked_fill(mask, v),
    "masked_fill_": lambda m, s, mask, v: (s * 1).masked_fill_(mask, v),
    "masked_fill by a buffer": lambda m, s, mask, v: s.masked_fill(mask, m.fill),
    "masked_fill by a constant": lambda m, s, mask, v: s.masked_fill(mask, torch.tensor(v)),
    "where": lambda m, s, mask, v: torch.where(mask, v, s),
    "where of a buffer": lambda m, s, mask, v: torch.where(mask, m.fill, s),
    "where of a constant": lambda m, s, mask, v: torch.where(mask, torch.tensor(v), s),
    "where of a typed constant": lambda m, s, mask, v: torch.where(mask, torch.tensor(v, dtype=s.dtype), s),
    "where of full": lambda m, s, mask, v: torch.where(mask, torch.full([], v, dtype=s.dtype), s),
    "where of full_like": lambda m, s, mask, v: torch.where(mask, torch.full_like(s, v), s),
    "where of new_full": lambda m, s, mask, v: torch.where(mask, s.new_full((8, 8), v), s),
    "setitem": lambda m, s, mask, v: written(s, mask, v),
    "added full": lambda m, s, mask, v: s + torch.full((8, 8), v).triu(1),
    "added masked_fill": lambda m, s, mask, v: s + torch.zeros(8, 8).masked_fill(mask, v),
    "added masked_fill of zeros_like": lambda m, s, mask, v: s + torch.zeros_like(s).masked_fill(mask, v),
    "added product": lambda m, s, mask, v: s + (1.0 - (~mask).to(s.dtype)) * v,
    "pad": lambda m, s, mask, v: F.pad(s, (1, 0), value=v),
    "clamp": lambda m, s, mask, v: s.clamp(min=v),
    "sum": lambda m, s, mask, v: torch.where(mask, s + v, s),
}
MASKS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "masked_fill": lambda mask, v: torch.zeros(8, 8).masked_fill(mask, v),
    "where of full": lambda mask, v: torch.where(mask, torch.full((8, 8), v), 0.0),
    "expanded": lambda mask, v: torch.zeros(8, 8).masked_fill(mask, v)[None, None].expand(1, 1, 8, 8)[0],
}


class Masked(nn.Module):
    """A layer, a mask, a softmax, a layer."""

    mask: Tensor
    fill: Tensor

    def __init__(self, masked: Callable[[Any, Tensor, Tensor, float], Tensor], fill: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masked, self.value = masked, fill
        self.first = nn.Linear(8, 8)
        self.register_buffer("mask", MASK.clone())
        self.register_buffer("fill", torch.tensor(fill))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.masked(self, self.first(x), self.mask, self.value), -1)


class Several(nn.Module):
    """The same with several numbers, side by side: captured together they take a third of the time."""

    def __init__(self, spelling: str, fills: tuple[float, ...]) -> None:
        super().__init__()
        self.each = nn.ModuleList(Masked(SPELLINGS[spelling], fill) for fill in fills)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [masked(x) for masked in self.each]


@functools.cache
def captured(spelling: str, fills: tuple[float, ...], front_end: str) -> tuple[Several, Any]:
    model = Several(spelling, fills)
    return model, program_of(model, X) if front_end == "graph" else model


def converted(spelling: str, fills: tuple[float, ...], front_end: str, policy: str) -> tuple[Several, Any]:
    model, given = captured(spelling, fills, front_end)
    return model, fxamp.convert(given, None if given is not model else (X,), policy=policy)


def leg(front_end: str, policy: str, at: int, spelling: str) -> Any:
    """Return what a mask is tried with: every second one every day in FP16, and the others in BF16."""
    turns = ("fp16" in policy) == (at % 2 == 0)
    return pytest.param(front_end, policy, spelling, marks=() if turns else pytest.mark.matrix)


LEGS = [(f, policy) for f in FRONT_ENDS for policy in ("O1,dtype=fp16", "O2,dtype=fp16", "O1", "O2")]


@pytest.mark.default_case(front_end="graph", policy="O1,dtype=fp16")
@pytest.mark.default_case(front_end="view", policy="O2")
@pytest.mark.parametrize(
    ("front_end", "policy", "spelling"), [leg(*way, at, s) for way in LEGS for at, s in enumerate(SPELLINGS)]
)
def test_a_mask_gives_what_it_gives_in_fp32(front_end: str, policy: str, spelling: str) -> None:
    fills = (LOWEST, -1e9, float("-inf"))
    model, module = converted(spelling, fills, front_end, policy)
    model.zero_grad()
    for fill, masked, expected, got in zip(fills, model.each, model(X), module(X), strict=True):
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.01, equal_nan=True)
        got.square().sum().backward()
        if torch.isfinite(expected).all():
            assert all(torch.isfinite(p.grad).all() for p in masked.parameters() if p.grad is not None), fill


@pytest.mark.default_case(policy="O1")
@pytest.mark.parametrize("policy", ["O1", "O1,dtype=fp16"])
@pytest.mark.parametrize("spelling", ["masked_fill", "added product"])
def test_a_mask_of_a_number_that_fits_is_as_under_autocast(spelling: str, policy: str) -> None:
    model, module = converted(spelling, (-1e4,), "view", policy)
    with torch.autocast("cpu", fxamp.plan_of(module).policy.dtype):
        assert torch.equal(module(X)[0], model(X)[0].float())
    assert "literal" not in {d.code for d in fxamp.plan_of(module).decisions}


@pytest.mark.default_case(low="bf16")
@pytest.mark.parametrize("low", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_a_lowest_number_is_the_low_dtypes_own_in_the_mask_of_an_attention(mask: str, low: str) -> None:
    def masked(self: Any, x: Tensor) -> Tensor:
        return attention(self.first(x), MASKS[mask](MASK, self.lowest))

    model: Any = Layers(masked, first=nn.Linear(8, 8), lowest=LOWEST)
    module = graph_of(model, X, f"O1,dtype={low}")
    model.lowest = torch.finfo(DTYPES[low]).min
    with torch.no_grad(), torch.autocast("cpu", DTYPES[low]):
        expected = model(X)
    assert torch.equal(module(X), expected.float())
    assert [d.code for d in fxamp.plan_of(module).decisions if d.op == "scaled_dot_product_attention"] == ["literal"]


def test_a_mask_of_other_numbers_is_as_under_autocast() -> None:
    def masked(self: Any, x: Tensor) -> Tensor:
        return attention(self.first(x), torch.zeros(8, 8).masked_fill(MASK, float("-inf")))

    model = Layers(masked, first=nn.Linear(8, 8))
    module = graph_of(model, X, "O1,dtype=fp16")
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(module(X), model(X).float())


@pytest.mark.parametrize(
    ("spelling", "fill", "policy", "colour"),
    [
        ("masked_fill", LOWEST, "O1", "bfloat16"),
        ("masked_fill", LOWEST, "O1,dtype=fp16", "float16"),
        ("masked_fill by a constant", LOWEST, "O1,dtype=fp16", "float16"),
        ("masked_fill by a buffer", LOWEST, "O1,dtype=fp16", "float16"),
        ("masked_fill", -1e9, "O1,dtype=fp16", "float32"),
        ("masked_fill_", -1e9, "O1,dtype=fp16", "float32"),
        ("masked_fill by a buffer", -1e9, "O1,dtype=fp16", "float32"),
    ],
)
def test_what_has_a_counterpart_stays_low_and_anything_else_is_fp32(
    spelling: str, fill: float, policy: str, colour: str
) -> None:
    _, module = converted(spelling, (fill,), "graph", policy)
    decisions = [d for d in fxamp.plan_of(module).decisions if d.op.startswith("masked_fill")]
    assert [d.colour for d in decisions] == [colour]


def test_a_buffer_is_read_when_the_graph_runs() -> None:
    model, module = converted("where of a buffer", (LOWEST,), "graph", "O1")
    (masked,) = model.each
    assert isinstance(masked, Masked)
    try:
        masked.fill.fill_(0.0)
        torch.testing.assert_close(module(X), model(X), rtol=0.02, atol=0.01)
    finally:
        masked.fill.fill_(LOWEST)


# Numbers too small.


@pytest.mark.parametrize(
    ("number", "low", "expected"),
    [
        (1e-8, torch.float16, True),
        (-1e-8, torch.float16, True),
        (2.0**-24, torch.float16, False),  # the smallest subnormal
        (1e-7, torch.float16, False),
        (0.0, torch.float16, False),
        (1e-12, torch.bfloat16, False),
        (1e-45, torch.bfloat16, True),
    ],
)
def test_a_number_is_tiny_when_nothing_in_the_low_dtype_is_as_small(
    number: float, low: torch.dtype, expected: bool
) -> None:
    assert numbers.has_tiny(row_named("add"), [number], low) is expected


# Numbers that Dynamo makes an input of its graph.


def asked(question: Callable[[Any], bool], *values: float) -> tuple[list[bool], int]:
    """Return what the graph that runs for each value of a number has been answered about it, and how many there are."""
    answers: list[bool] = []
    graphs = []

    def backend(gm: Any, _: object) -> Any:
        graphs.append(gm)
        for node in gm.graph.nodes:
            node.meta["val"] = node.meta.get("example_value")
        (product,) = (n for n in gm.graph.nodes if ops.name(n) == "mul")
        (answer,) = (question(number) for number in numbers.numbers(product))

        def run(*args: Any) -> Any:
            answers.append(answer)
            return gm.forward(*args)

        return run

    run = torch.compile(lambda x, number: x * number, backend=backend, dynamic=True)
    for value in values:
        run(X, value)
    return answers, len(graphs)


BF16, FP16 = torch.bfloat16, torch.float16
LEAST = -LOWEST
QUESTIONS: dict[str, tuple[Callable[[Any], bool], dict[float, bool], int]] = {
    "out of range": (
        lambda n: numbers.is_extreme(n, FP16), {0.5: False, 65504.0: False, 1e5: True, -1e9: True, -1.0: False}, 2,
    ),
    "lowest": (numbers.is_lowest, {LOWEST: True, LEAST: True, 0.5: False, -1e9: False}, 3),
    "negative": (numbers.is_negative, {-0.5: True, -1e9: True, 0.5: False, -2.0: True}, 2),
    "equal": (lambda n: numbers.equals(n, 2), {2.0: True, 0.5: False, 0.7: False}, 2),
    "tiny": (
        lambda n: numbers.has_tiny(row_named("add"), [n], FP16), {1e-8: True, -2e-8: True, 1e-5: False, 9.0: False}, 2,
    ),
    "zero is not tiny": (lambda n: numbers.has_tiny(row_named("add"), [n], FP16), {0.0: False, 1e-9: True}, 2),
    "a bound that rounds to one": (
        lambda n: numbers.has_tiny(row_named("clamp"), [n], BF16),
        {0.999: True, 0.5: False, 1e-7 - 1: True, 2.0: False}, 3,
    ),
    "a distance from one": (lambda n: numbers.has_tiny(row_named("logit"), [n], FP16), {0.1: False, 1e-6: True}, 2),
    "exact": (
        lambda n: numbers.is_exact(n, BF16),
        {3.0: True, 256.0: True, -7.0: True, 0.5: True, 257.0: False, 0.1: False}, 3,
    ),
    "within": (lambda n: numbers.within([n, 4.0], 8.0), {0.5: True, -8.0: True, 9.0: False}, 2),
    "within an inverse": (lambda n: numbers.within([4.0], n, inverse=True), {0.2: True, -0.1: True, 0.5: False}, 2),
    "open": (numbers.is_open, {0.5: False, 1e9: False}, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_answer_is_that_of_a_constant_and_a_guard(name: str) -> None:
    question, expected, graphs = QUESTIONS[name]
    assert {value: question(value) for value in expected} == expected
    assert asked(question, *expected) == ([*expected.values()], graphs)


def test_of_what_data_decides_the_answer_is_the_one_that_rounds_nothing() -> None:
    answers = {}

    def backend(gm: Any, _: object) -> Any:
        for node in gm.graph.nodes:
            node.meta["val"] = node.meta.get("example_value")
        (product,) = (n for n in gm.graph.nodes if ops.name(n) == "mul")
        (number,) = numbers.numbers(product)
        answers.update({name: question(number) for name, (question, _, _) in QUESTIONS.items()})
        return gm.forward

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch.compile(lambda x: x * x.sum().item(), backend=backend)(X)
    rounds_nothing = {"out of range", "negative", "tiny", "zero is not tiny", "a bound that rounds to one", "open"}
    assert {name for name, answer in answers.items() if answer} == {*rounds_nothing, "a distance from one"}


EPSILONS: dict[str, Callable[[Tensor], Tensor]] = {
    "rsqrt": lambda x: torch.rsqrt(x.relu() + 1e-8),
    "log": lambda x: torch.log(x.relu() + 1e-8),
    "log of clamp": lambda x: torch.log(x.clamp(min=1e-9)),
    "quotient": lambda x: 1 / (x.relu() + 1e-10),
    "quotient of a view": lambda x: torch.ones(8, 1) / (x.relu() + 1e-10).t().contiguous(),
    "maximum": lambda x: x.abs() / x.abs().amax(-1, keepdim=True).clamp_min(1e-12),
}


def behind(function: Callable[[Tensor], Tensor], value: float) -> nn.Module:
    """Return a layer that gives one value, and a function of that."""
    layer = nn.Linear(8, 8)
    nn.init.zeros_(layer.weight)
    nn.init.constant_(layer.bias, value)
    return Layers(lambda self, x: self.function(self.first(x)), first=layer, function=function)


@pytest.mark.default_case(level="O2")
@pytest.mark.parametrize(("name", "level"), [*((name, "O2") for name in EPSILONS), ("log", "O3"), ("rsqrt", "O3")])
def test_a_tiny_eps_keeps_its_node_fp32_and_what_it_protects_finite(name: str, level: str) -> None:
    model = behind(EPSILONS[name], 0.0)
    for front_end in FRONT_ENDS:
        module = convert(model, (X,), front_end, f"{level},dtype=fp16")
        torch.testing.assert_close(module(X), model(X), rtol=2e-3, atol=0)


def test_a_tiny_eps_that_bf16_holds_changes_nothing() -> None:
    plan = plan_of(behind(EPSILONS["log"], 0.0), X, "O2")
    colours = {d.op: d.colour for d in plan.decisions if d.op != "log"}  # which leaves the graph
    assert colours == {"linear": "bfloat16", "relu": "bfloat16", "add": "bfloat16"}


def test_at_o1_a_tiny_eps_is_rounded_as_under_autocast() -> None:
    module = graph_of(behind(EPSILONS["log"], 0.0), X, "O1,dtype=fp16")
    assert {d.op: d.colour for d in fxamp.plan_of(module).decisions}["add"] == "float16"


def test_the_eps_of_a_norm_is_held_in_fp32_by_its_kernel() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=1e-12), nn.Linear(8, 8))
    module = graph_of(model, X, "O2,dtype=fp16")
    assert {d.op: d.colour for d in fxamp.plan_of(module).decisions}["layer_norm"] == "float16"


def test_integers_given_as_scalars_count_and_shapes_do_not() -> None:
    gm = parse(
        """
        x: f32[2, 3]
        big: f32[2, 3] = add.Tensor(x, 100000)
        seen: f32[1, 6] = view(x, [1, 6])
        last: f32[2, 3] = div.Tensor(big, 1e-9)
        return seen, last
        """
    )
    assert [list(numbers.numbers(n)) for n in gm.graph.nodes if n.op == "call_function"] == [[100000], [], [1e-9]]


# What squeezes a large value, and what a bound keeps from the end of that range.
BOUNDS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda h: torch.log(1 - h.sigmoid().clamp(1e-7, 1 - 1e-7)),
    "clamp_max": lambda h: torch.log1p(-h.sigmoid().clamp_max(1 - 1e-6)),
    "clamp in place": lambda h: torch.log1p(-(h.sigmoid() * 1).clamp_(1e-6, 1 - 1e-6)),
    "hardtanh": lambda h: F.hardtanh(h, -1 + 1e-6, 1 - 1e-6).atanh(),
    "logit": lambda h: h.sigmoid().logit(eps=1e-6),
    "atanh": lambda h: torch.atanh(h.tanh().clamp(-1 + 1e-6, 1 - 1e-6)),
}


@pytest.mark.parametrize(("name", "dtype"), in_turns(BOUNDS, DTYPES))
def test_at_o2_a_bound_that_would_round_to_one_keeps_its_node_fp32(name: str, dtype: str) -> None:
    model = behind(BOUNDS[name], 20.0)
    for front_end in FRONT_ENDS:
        module = convert(model, (X,), front_end, f"O2,dtype={dtype}")
        torch.testing.assert_close(module(X), model(X), rtol=0.02, atol=0)


def test_bounds_that_the_low_dtype_holds_change_nothing() -> None:
    model = behind(lambda h: h.clamp(-1, 1).sigmoid().clamp(0.25, 0.5) * h.logit(eps=0.125), 20.0)
    plan = plan_of(model, X, "O2,dtype=bf16,ops.logit=low")
    assert {d.colour for d in plan.decisions} == {"bfloat16"}
