"""Numbers in a model keep their meaning: those out of the low range, masks, scales, positions, tiny eps."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from tests.support.front_ends import (
    BF16,
    FP16,
    FRESH,
    Case,
    assert_eager,
    at_levels,
    casts,
    check,
    convert,
    decided,
    each_front_end,
    legs,
    o1,
    one,
    plain,
    under_autocast,
)
from tests.support.helpers import Layers, Two, example

pytestmark = FRESH


def numbers_out_of_range(self: Any, x: Tensor) -> Any:
    y = self.l(x)
    return self.m((y + 1e5) - 1e5), torch.where(y > 0, y, -1e9).clamp(max=1e6)


def scalar_and_vector(self: Any, x: Tensor) -> Any:
    return self.m(self.l(x) * self.scalar), self.m(self.l(x) * self.one)


def scales() -> Two:
    return Two(scalar_and_vector, scalar=torch.tensor(1.1), one=torch.tensor([1.1]))


CASES = {"out of range": Case(partial(Two, numbers_out_of_range), one), "0-dim and 1-D scales": Case(scales, one)}


@pytest.mark.parametrize(("case", "front_end"), legs(CASES))
def test_numbers_are_those_of_the_model(case: str, front_end: str) -> None:
    check(CASES[case], front_end)


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_a_number_out_of_range_stays_and_its_op_runs_in_fp32(front_end: str) -> None:
    model = Two(numbers_out_of_range)
    module, got = o1(model, one(), front_end, "O1,dtype=fp16")
    assert all(t.isfinite().all() for t in got)
    exact = plain(model, one())
    assert torch.equal(got[1] == -1e9, exact[1] == -1e9)
    torch.testing.assert_close(got[0], exact[0], rtol=0.05, atol=0.05)
    codes = {d.op: d.code for d in fxamp.plan_of(module).decisions if d.colour == "float32"}
    assert codes["add"] == codes["where"] == "literal"


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_a_scale_of_no_dimension_promotes_nothing_and_one_of_one_does(front_end: str) -> None:
    module, _ = o1(scales(), one(), front_end)
    assert decided(module, "mul") == ["bfloat16", "float32"]


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_small_fp32_operands_follow_the_activation_at_o2(front_end: str) -> None:
    def chain(self: Any, x: Tensor) -> Tensor:
        return ((x @ self.l.weight + self.l.bias) * self.m.bias) @ self.m.weight

    model = Two(chain)
    x = (example(8192),)  # large enough that casting it costs more than two launches
    module = convert(model, x, front_end, "O2,output_dtype=low")
    got = module(*x)
    assert {(d.op, d.colour) for d in fxamp.plan_of(module).decisions} == {
        (op, "bfloat16") for op in ("matmul", "add", "mul")
    }
    assert all(n.args[1] == BF16 for n in casts(module))
    torch.testing.assert_close(got.float(), model(*x), rtol=0.05, atol=0.03)


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_a_weight_out_of_range_is_not_clipped(front_end: str) -> None:
    torch.manual_seed(0)
    model = Two(lambda self, x: self.l(x))
    with torch.no_grad():
        model.l.weight[0, 0] = 7e4
    x = example()
    module = convert(model, (x,), front_end, "O1,dtype=fp16")
    with torch.no_grad():
        assert torch.equal(module(x), under_autocast(model, (x,), FP16).float())
    assert model.l.weight[0, 0].item() == 7e4
    torch._dynamo.reset()
    kept = convert(model, (x,), front_end, "O1,dtype=fp16,modules.l=fp32")
    assert torch.equal(kept(x), model(x))


@pytest.mark.default_case(policy="O3", front_end="view")
@each_front_end
@pytest.mark.parametrize(
    "policy", ["O2", "O3", *(pytest.param(p, marks=pytest.mark.matrix) for p in ("O1", "O3,dtype=fp16"))]
)
def test_integers_times_frequencies_are_positions(front_end: str, policy: str) -> None:
    def rotary(self: Any, x: Tensor) -> Any:
        angles = (torch.arange(4)[:, None] + 3000) * torch.tensor([1.0, 0.5, 0.25])
        return self.l(x)[:, :3] * angles.sin()

    torch.manual_seed(0)
    model, args = Two(rotary), one()
    exact, rounded = at_levels(model, args, front_end, "O0", policy)
    assert_eager(exact(), model, args)
    with torch.no_grad():
        torch.testing.assert_close(rounded()(*args), model(*args), rtol=0.02, atol=0.02)


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_what_a_buffer_held_is_in_the_plan_where_it_decided(front_end: str) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return torch.where(x > 0, self.l(x), self.scalar), self.l(x) * self.average

    model = Two(forward, scalar=torch.tensor(torch.finfo(torch.float32).min), average=torch.zeros(6))
    ranges = {d.op: d.ranges for d in fxamp.plan_of(convert(model, one(), front_end)).decisions}
    assert [text.partition(": ")[2] for text in ranges["where"]] == ["-3.40282e+38"]
    assert "scalar" in ranges["where"][0]
    assert ranges["mul"] == ranges["linear"] == ()


# Numbers that vary: Dynamo makes an input of a float that the process sees for the second time.

LOWEST = torch.finfo(torch.float32).min
NUMBERS: dict[str, tuple[Callable[[Any, Tensor, float], Tensor], Sequence[float]]] = {
    "eps": (lambda m, h, v: h / (h.relu() + v), (1e-5, 1e-8, 2e-8, 0.0)),
    "norm": (lambda m, h, v: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + v), (1e-6, 1e-5, 1e-9)),
    "layer_norm": (lambda m, h, v: F.layer_norm(h, (6,), eps=v), (1e-5, 1e-6, 1e-12)),
    "dropout": (lambda m, h, v: F.dropout(h, v, m.training), (0.1, 0.2, 0.0)),
    "scale": (lambda m, h, v: h * v, (0.5, 3.0, 1e5, 1e-9)),
    "sum": (lambda m, h, v: h + v * 2, (0.5, 3e4, 1e5)),
    "temperature": (lambda m, h, v: (h / v).softmax(-1), (1.0, 0.7, 1e-3)),
    "inverse": (lambda m, h, v: v / (h.abs() + 1), (1.0, 0.3, 1e6)),
    "power": (lambda m, h, v: h.abs().clamp(min=0.1) ** v * h, (-0.5, 0.5, 2.0, 1.7)),
    "mask": (lambda m, h, v: m.m(h.masked_fill(h > 0, v)).softmax(-1), (0.0, -1e4, -1e9, -2e9, LOWEST)),
    "where": (lambda m, h, v: m.m(torch.where(h > 0, h, v)), (0.0, 0.3, 0.5, -1e9, LOWEST)),
    "where of a tensor": (lambda m, h, v: torch.where(h > 0, h, torch.tensor(v)), (0.1, -1e9, LOWEST)),
    "where of full": (lambda m, h, v: torch.where(h > 0, h, torch.full((), v)), (0.1, -1e9, LOWEST)),
    "clamp": (lambda m, h, v: torch.log(1 - h.sigmoid().clamp(v, 1 - v)), (0.1, 1e-3, 1e-7)),
    "logit": (lambda m, h, v: h.sigmoid().logit(eps=v), (0.1, 1e-3, 1e-7)),
    "alpha": (lambda m, h, v: torch.add(h, h, alpha=v), (0.5, 2.0, 1e5)),
    "pad": (lambda m, h, v: F.pad(h, (1, 1), value=v), (0.0, -1e9)),
    "smoothing": (lambda m, h, v: F.cross_entropy(h, m.at, label_smoothing=v), (0.0, 0.1)),
    "positions": (lambda m, h, v: h * (torch.arange(6) * v).sin() + torch.arange(6) / v, (0.1, 0.3, 8.0)),
}


def reads(form: Callable[[Any, Tensor, float], Tensor], number: Any, **parts: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.form(self, self.l(x), self.number)

    torch.manual_seed(0)
    layers = {"l": nn.Linear(6, 6), "m": nn.Linear(6, 6), "at": torch.tensor([0, 1, 2, 3])}
    return Layers(forward, form=form, number=number, **layers, **parts)


def plan(form: Callable[[Any, Tensor, float], Tensor], number: Any, policy: str) -> fxamp.Plan:
    return fxamp.plan_of(fxamp.convert(reads(form, number), (example(),), policy=policy, check=False))


def fresh(form: Callable[[Any, Tensor, float], Tensor], number: Any, policy: str) -> fxamp.Plan:
    torch._dynamo.reset()
    return plan(form, number, policy)


POLICIES = ("O1,dtype=bf16", "O2,dtype=fp16", "O1,dtype=fp16", "O2,dtype=bf16")


def in_turn() -> list[Any]:
    """Return each number with each policy: one of them every day, the others in the matrix."""
    return [
        pytest.param(name, policy, marks=() if j == i % 2 + 1 else pytest.mark.matrix)
        for i, name in enumerate(NUMBERS) for j, policy in enumerate(POLICIES)
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "policy"), in_turn())
def test_a_plan_is_that_of_a_fresh_process_whatever_numbers_were_seen_before(name: str, policy: str) -> None:
    form, values = NUMBERS[name]
    alone = {value: fresh(form, value, policy) for value in values}
    torch._dynamo.reset()
    plan(form, 0.123, policy)  # what follows are inputs of their graphs
    for value in reversed(values):
        assert plan(form, value, policy) == alone[value], value


@pytest.mark.default_case(policy="O2,dtype=bf16")
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_plans_are_equal_in_all_orders_of_numbers(policy: str) -> None:
    form, values = NUMBERS["mask"]
    alone = {value: fresh(form, value, policy) for value in values[1:]}
    for order in itertools.permutations(alone):
        torch._dynamo.reset()
        assert {value: plan(form, value, policy) for value in order} == alone


@pytest.mark.slow
def test_twenty_conversions_in_any_order_give_the_plans_of_fresh_processes() -> None:
    cases = [(name, value) for name, (_, values) in NUMBERS.items() for value in values]
    draw = random.Random(0)
    for policy in POLICIES[:2]:
        chosen = draw.sample(cases, 20)
        alone = [fresh(NUMBERS[name][0], value, policy) for name, value in chosen]
        torch._dynamo.reset()
        order = draw.sample(range(20), 20)
        for i in order:
            assert plan(NUMBERS[chosen[i][0]][0], chosen[i][1], policy) == alone[i], chosen[i]


def captures(caplog: pytest.LogCaptureFixture) -> int:
    """Return how many graphs a view has: the first of `convert`, and one for each line that says why it is another."""
    return 1 + sum("was captured again" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("policy", ["O1,dtype=bf16", pytest.param("O2,dtype=bf16", marks=pytest.mark.matrix)])
def test_a_temperature_that_changes_at_each_step_makes_few_graphs_and_autocasts_bits(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fxamp")
    model, x = reads(NUMBERS["temperature"][0], 1.0), example()
    view = fxamp.convert(model, (x,), policy=policy)
    for step in range(1000):
        model.number = 0.998**step
        got, expected = view(x), under_autocast(model, (x,)).float()
        assert torch.equal(got, expected) or policy.startswith("O2")
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.01)
    assert captures(caplog) <= 4
    assert len({d.key for d in fxamp.plan_of(view).decisions}) == len(fxamp.plan_of(view).decisions)


def test_a_graph_is_captured_where_an_answer_changes_and_each_is_right(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fxamp")
    model, x = reads(lambda m, h, v: (h.relu() + v).reciprocal(), 1.0), example()
    view = fxamp.convert(model, (x,), policy="O2,dtype=fp16")
    for value in (1.0, 0.9, 0.8, 1e-3, 1e-8, 1e-9, 1e-3, 0.5, 1e5, 2e5, 0.1, 1e-10):
        model.number = value
        torch.testing.assert_close(view(x), model(x), rtol=2e-2, atol=1e-5)
    assert captures(caplog) == 4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_fill_of_a_mask_may_change_and_leave_the_range(backend: str) -> None:
    def form(m: Any, h: Tensor, v: float) -> Tensor:
        return h.masked_fill(h > h.mean(), v).softmax(-1)

    x = example()
    model = reads(form, -1e9)
    view = fxamp.convert(model, (x,), policy="O1,dtype=fp16", backend=backend)
    other = fxamp.convert(reads(form, -3e9), (x,), policy="O1,dtype=fp16", backend=backend)
    for value in (-1e9, -2e9, LOWEST, -1e4, float("-inf"), float("nan"), float("inf"), -1.0, 1e38, LOWEST):
        model.number = value
        torch.testing.assert_close(view(x), model(x), rtol=2e-2, atol=1e-2, equal_nan=True)
    assert other(x).isfinite().all()


def test_a_number_that_data_decides_rounds_nothing_and_leaves_autocasts_bits_where_it_is_read_between_graphs() -> None:
    def scaled(self: Any, x: Tensor) -> Tensor:
        h = self.l(x)
        return h / h.abs().amax().float().item() + 1

    torch.manual_seed(0)
    model, x = Two(scaled), example()
    view = fxamp.convert(model, policy="O1,dtype=bf16")  # Dynamo breaks there: what follows is given a float
    for rows in (4, 5, 6):
        x = example(rows)
        assert torch.equal(view(x), under_autocast(model, (x,)).float())
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        whole = fxamp.convert(model, (x,), policy="O2,dtype=fp16", fullgraph=True)
    decided = {d.op: (d.colour, d.code) for d in fxamp.plan_of(whole).decisions}
    assert decided["div"] == ("float32", "literal")
    torch.testing.assert_close(whole(x), model(x), rtol=2e-2, atol=2e-3)


def test_a_number_made_of_a_size_is_asked_as_a_constant_is() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.l(x) / (x.shape[0] * 1e4) * math.sqrt(x.shape[0])

    model = Two(forward)
    small, large = example(4), example(9)
    both = [fresh_of(model, x) for x in (small, large)]
    assert [d.colour for d in both[0].decisions] == ["float16", "float16", "float16"]
    assert [d.colour for d in both[1].decisions] == ["float16", "float32", "float32"]
    torch._dynamo.reset()
    view = fxamp.convert(model, (small,), policy="O1,dtype=fp16", dynamic=True)
    assert fxamp.plan_of(view) == both[0]
    for x in (small, large, example(5), example(12)):
        torch.testing.assert_close(view(x), model(x), rtol=2e-2, atol=1e-6)


def fresh_of(model: nn.Module, x: Tensor) -> fxamp.Plan:
    torch._dynamo.reset()
    return fxamp.plan_of(fxamp.convert(model, (x,), policy="O1,dtype=fp16", dynamic=False))


def test_in_an_exported_graph_what_nothing_guards_rounds_nothing() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.l(x) * (x.shape[0] * 1e4)

    model, x = Two(forward), example(4)
    rows = torch.export.Dim("rows", max=1000)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: rows},))
    colours = {d.op: d.colour for d in fxamp.plan_of(fxamp.convert(program, policy="O1,dtype=fp16")).decisions}
    assert colours == {"linear": "float16", "mul": "float32"}
    colours = {d.op: d.colour for d in fxamp.plan_of(fxamp.convert(program, policy="O1,dtype=bf16")).decisions}
    assert colours == {"linear": "bfloat16", "mul": "bfloat16"}  # the sizes that it takes are all in BF16's range


@pytest.mark.parametrize(
    "values",
    [(True, False, True), (2, 3, 4), (0.5, 2, True), (0.5, Fraction(1, 3), Fraction(1, 7)),
     (np.float64(0.5), np.float64(0.25)), (np.float32(0.5), np.float32(0.25), 0.1), (0.5, float("nan"), 0.25)],
    ids=str,
)  # fmt: skip
def test_other_kinds_of_numbers_compute_what_autocast_computes(values: Sequence[Any]) -> None:
    def form(m: Any, h: Tensor, v: Any) -> Tensor:
        return h * (float(v) if isinstance(v, Fraction) else v)

    model, x = reads(form, values[0]), example()
    view = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    for value in (*values, *values):
        model.number = value
        torch.testing.assert_close(view(x), under_autocast(model, (x,)).float(), rtol=0, atol=0, equal_nan=True)
        assert len(fxamp.graphs(view)) >= 1


@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_an_eps_of_numpy_of_which_nothing_can_be_asked_is_not_rounded_away(kind: Any) -> None:
    model, x = reads(lambda m, h, v: m.m(h / (h.relu() + v) * 1e-8), kind(1e-8)), example()
    view = fxamp.convert(model, (x,), policy="O2,dtype=fp16")
    for eps in (1e-8, 3e-8):
        model.number = kind(eps)
        torch.testing.assert_close(view(x), model(x), rtol=2e-2, atol=2e-2)


def test_a_number_of_a_call_or_of_a_module_is_an_input_of_graphs_that_can_be_called() -> None:
    def forward(self: Any, x: Tensor, temperature: float = 1.0) -> Tensor:
        return self.l(x) / temperature * self.number

    torch.manual_seed(0)
    model: Any = Two(forward, number=0.5)
    x = example()
    fxamp.convert(model, (x, 1.0), policy="O1,dtype=bf16")
    model.number = 0.25
    view = fxamp.convert(model, (x, 0.7), policy="O1,dtype=bf16")
    expected = view(x, 0.3)
    (graph,) = fxamp.graphs(view)
    assert torch.equal(graph(x, 0.3)[0], expected)
    assert str(fxamp.report(view))
    assert str(fxamp.diff(view))
    assert {d.op for d in fxamp.plan_of(view).decisions} == {"linear", "div", "mul"}


@pytest.mark.parametrize("part", [lambda: nn.Dropout(0.1), lambda: nn.BatchNorm1d(6)], ids=["p", "momentum"])
def test_a_number_of_which_torch_makes_a_constant_is_named_at_its_eighth_graph(
    part: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), part()), example()
    name = "p" if hasattr(model[1], "p") else "momentum"
    view = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    for step in range(10):
        setattr(model[1], name, 0.1 + 0.01 * step)
        view(x)
        said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert len(said) == (step >= 7)
    assert f"1.{name}" in said[0]
    assert len(fxamp.graphs(view)) == 1


def test_a_model_of_one_class_is_not_decided_on_by_another() -> None:
    def one_number(self: Any, x: Tensor) -> Tensor:
        return self.l(x) * self.number

    def other_number(self: Any, x: Tensor) -> Tensor:
        return (self.m(x) + self.number).relu()

    def decided_on(forward: Callable[..., Any], number: float) -> fxamp.Plan:
        return fxamp.plan(Two(forward, number=number), (example(),), policy="O1,dtype=bf16")

    alone = decided_on(other_number, 0.25)
    torch._dynamo.reset()
    decided_on(one_number, 0.5)
    decided_on(other_number, 0.5)
    assert decided_on(other_number, 0.25) == alone
