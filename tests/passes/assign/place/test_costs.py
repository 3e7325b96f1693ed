"""What the cut is told that things cost: bytes, one for each cast, or what a timer found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Node

from fxamp.measure.costs import PARTS, ROUND_TRIPS, Call, Filler, MeasuredCosts, Penalties, round_trips
from passes import ByteCosts
from passes.contract.costs import Candidate, CostModel, Net, Prices, Read, Run
from passes.contract.devices import DEVICES
from passes.contract.errors import PolicyError
from passes.contract.plan import Plan
from passes.contract.policy import Policy
from passes.graph.grad import requires_grad
from passes.graph.notes import note
from tests.support.graphs import compile_plain, parse
from tests.support.helpers import named

LOW = torch.bfloat16
TEXT = """
    x: f32[2, 4]
    w: f32[4, 4] = param
    linear: f32[2, 4] = linear(x, w)
    relu: f32[2, 4] = relu(linear)
    view: f32[8] = view(relu, [8])
    return view
"""
MEASURED = Policy("O2", dtype=LOW, device="cpu", cost="measured")


def nodes(text: str = TEXT) -> dict[str, Node]:
    graph = parse(text).graph
    return {n.name: n for n in graph.nodes}


def choice(node: Node, *, returned: bool = False) -> Candidate:
    """Return an op in low and in FP32, its operands alike."""
    places = [(a.name, 0) for a in node.target._schema.arguments]  # type: ignore[union-attr]
    low, fp32 = (Run(node, dtype, dict.fromkeys(places, dtype)) for dtype in (LOW, torch.float32))
    return Candidate(low, fp32, requires_grad(node.graph), True, returned)


def net(node: Node) -> Net:
    """Return the net of a value that its first reader alone reads."""
    grad = node in requires_grad(node.graph)
    return Net(node, {next(iter(node.users)): Read(1, None)}, (1, int(grad)), LOW, grad)


def casts(prices: Prices) -> list[int]:
    """Return the prices of nets, which are the same up and down."""
    assert all(net.up == net.down for net in prices.nets)
    return [net.up for net in prices.nets]


COST = DEVICES["cpu"].launch + 8 * 6  # of a cast of 8 elements


def test_a_cast_costs_a_launch_and_its_bytes_and_the_same_again_where_gradients_flow() -> None:
    found = nodes()
    assert casts(ByteCosts("cpu").price([], [net(found["x"]), net(found["relu"])])) == [COST, 2 * COST]


def test_an_op_costs_the_bytes_that_it_reads_and_writes_and_a_view_nothing() -> None:
    found = nodes()
    prices = ByteCosts("cpu").price([choice(found["relu"]), choice(found["view"])], [])
    assert prices.nodes == [(3 * 16 * 2, 3 * 16 * 4), (0, 0)]


def test_an_op_whose_result_leaves_the_graph_in_fp32_costs_the_same_on_both_sides() -> None:
    prices = ByteCosts("cpu").price([choice(nodes()["relu"], returned=True)], [])
    assert prices.nodes == [(3 * 16 * 4, 3 * 16 * 4)]


def test_gradients_flow_from_parameters_and_from_what_nothing_is_known_of() -> None:
    found = nodes()
    assert {n.name for n in requires_grad(found["x"].graph)} == {"w", "linear", "relu", "view"}
    del found["w"].meta["val"]
    assert found["w"] in requires_grad(found["x"].graph)
    note(found["w"], role="buffer")
    assert requires_grad(found["x"].graph) == frozenset()
    note(found["w"], role="")
    found["w"].meta["val"] = torch.zeros(4, 4)
    assert requires_grad(found["x"].graph) == frozenset()


class Times:
    """A timer that knows the nanoseconds of ops by the beginning of their keys, and remembers what it was asked."""

    def __init__(self, **by_name: int) -> None:
        self.by_name = by_name
        self.asked: list[str] = []

    def __call__(self, calls: Sequence[Call]) -> dict[Call, int]:
        self.asked += [call.key for call in calls]
        found = {c: next((t for n, t in self.by_name.items() if c.key.startswith(n)), None) for c in calls}
        return {call: taken for call, taken in found.items() if taken is not None}


def price(times: Times, text: str = TEXT, name: str = "relu", of: Sequence[str] = ()) -> Prices:
    found = nodes(text)
    return MeasuredCosts("cpu", times).price([choice(found[name])], [net(found[c]) for c in of])


def test_an_op_is_timed_in_both_dtypes_with_all_that_its_time_depends_on() -> None:
    times = Times(**{"aten.linear.default(bfloat16": 500, "aten.linear.default(float32": 700})
    assert price(times, name="linear").nodes == [(525, 700)]  # low must win by more than 5 %
    assert times.asked == [
        "aten.linear.default(bfloat16[2, 4]/[4, 1], bfloat16[4, 4]/[4, 1]')",  # gradients flow to the weight alone
        "aten.linear.default(float32[2, 4]/[4, 1], float32[4, 4]/[4, 1]')",
    ]


def test_a_cast_costs_its_share_of_several_round_trips() -> None:
    times = Times(round_trips=2 * ROUND_TRIPS * 30)
    assert casts(price(times, of=["x", "linear"])) == [30, 30]
    assert [key for key in times.asked if key.startswith("round")] == [
        "round_trips(float32[2, 4]/[4, 1], torch.bfloat16)",
        "round_trips(float32[2, 4]/[4, 1]', torch.bfloat16)",
    ]
    assert round_trips(torch.ones(2) / 3, LOW).tolist() == [0.333984375] * 2


def test_equal_calls_are_timed_once() -> None:
    times = Times(round_trips=80)
    price(times, of=["linear", "relu"])
    assert len(times.asked) == len(set(times.asked)) == 3


def test_what_runs_in_one_dtype_only_is_estimated_in_both() -> None:
    found = nodes()
    ((low, fp32),) = ByteCosts("cpu").price([choice(found["relu"])], []).nodes
    assert price(Times(**{"aten.relu.default(bfloat16": 100_000})).nodes == [(low // 10, fp32 // 10)]


def test_a_view_is_not_timed() -> None:
    times = Times(aten=9)
    assert price(times, name="view").nodes == [(0, 0)]
    assert times.asked == []


def test_a_filler_says_what_it_is() -> None:
    assert str(Filler((2,), (1,), torch.float16, True)) == "float16[2]/[1]'"


def compiled(times: Times | None, policy: Policy = MEASURED, text: str = TEXT, plan: Plan | None = None) -> Plan:
    gm = parse(text)
    costs = None if times is None else MeasuredCosts("cpu", times)
    return compile_plain(gm, policy, plan=plan, costs=costs)


SLOW = {"aten.linear.default(bfloat16": 1000, "aten.linear.default(float32": 1500, "aten.relu": 10}


def test_a_matrix_product_that_does_not_pay_for_its_casts_stays_fp32() -> None:
    cheap, dear = compiled(Times(**SLOW, round_trips=8)), compiled(Times(**SLOW, round_trips=80_000))
    assert [d.colour for d in cheap.decisions] == ["bfloat16"] * 3
    assert [d.colour for d in dear.decisions] == ["float32"] * 3
    assert [d.code for d in dear.decisions] == ["not_worth_casts", "cut", "cut"]
    assert dear.casts == 0
    assert "which takes the least time" in dear.decisions[1].reason


def test_a_weights_cast_has_its_price_too() -> None:
    weight = {"round_trips(float32[4, 4]": 80_000}
    assert compiled(Times(**SLOW, **weight, round_trips=8)).decisions[0].colour == "float32"


@pytest.mark.parametrize(
    "policy", [Policy("O1", dtype=LOW, device="cpu", cost="measured"), Policy("O2", dtype=LOW, device="cpu")], ids=named
)
def test_a_matrix_product_is_low_at_o1_and_without_measured_costs(policy: Policy) -> None:
    assert compiled(Times(**SLOW, round_trips=80_000), policy).decisions[0].colour == "bfloat16"


def test_a_matrix_product_that_the_user_pins_is_never_free() -> None:
    pinned = Policy("O2", dtype=LOW, device="cpu", cost="measured", ops={"linear": "low"})
    assert compiled(Times(**SLOW, round_trips=80_000), pinned).decisions[0].colour == "bfloat16"


@pytest.mark.parametrize("trip", [8, 80_000])
def test_a_plan_is_replayed_without_a_timer(trip: int) -> None:
    plan = compiled(Times(**SLOW, round_trips=trip))
    assert compiled(None, plan.policy, plan=Plan.from_json(plan.to_json())) == plan


@pytest.mark.parametrize("cost", ["bytes", "measured"])
def test_o0_lists_every_node_as_it_is(cost: str) -> None:
    policy = Policy("O0", dtype=LOW, device="cpu", cost=cost)
    plan = compiled(None, policy)
    assert [(d.op, d.colour, d.code) for d in plan.decisions] == [
        (op, "float32", "as_written") for op in ("linear", "relu", "view")
    ]
    assert compiled(None, policy, plan=plan) == plan


def test_costs_cannot_be_measured_without_a_timer() -> None:
    with pytest.raises(PolicyError, match="cost='measured' needs shapes to measure: give convert example inputs"):
        compiled(None)


# Costs that change others.

CHAIN = """
    x: f32[512, 4]
    w: f32[4, 4] = param
    gain: f32[4] = param
    linear: f32[512, 4] = linear(x, w)
    tanh: f32[512, 4] = tanh(linear)
    scaled: f32[512, 4] = mul.Tensor(tanh, gain)
    last: f32[512, 4] = linear(scaled, w)
    return last
"""
O2 = Policy("O2", dtype=LOW, device="cpu")


def colours(costs: CostModel | None) -> dict[str, str]:
    gm = parse(CHAIN)
    plan = compile_plain(gm, O2, costs=costs)
    return {d.op: d.colour for d in plan.decisions}


def test_a_penalty_smaller_than_a_unit_counts() -> None:
    found = nodes()
    penalties = Penalties(ByteCosts("cpu"), {"/relu#0": 0.25}, {("/view#0", "/relu#0"): 0.5})
    plain, prices = ((c.price([choice(found["relu"])], [net(found["relu"])])) for c in (ByteCosts("cpu"), penalties))
    (low, fp32), (cast,) = plain.nodes[0], casts(plain)
    assert prices.nodes == [(low * PARTS + PARTS // 4, fp32 * PARTS)]
    assert [(n.readers, n.up, n.down) for n in prices.nets] == [
        ((found["view"],), cast * PARTS, cast * PARTS),
        ((found["view"],), 0, PARTS // 2),
    ]


def test_costs_are_put_together() -> None:
    dear = {"/tanh#0": 1e9}
    assert colours(None) == colours(ByteCosts("cpu")) == dict.fromkeys(("linear", "tanh", "mul"), "bfloat16")
    assert colours(Penalties(ByteCosts("cpu"), dear, {}))["tanh"] == "float32"
    assert colours(Penalties(Penalties(ByteCosts("cpu"), dear, {}), {}, {}))["tanh"] == "float32"


class Answers:
    """A cost model that gives what it is told."""

    objective = "does what it is told"

    def __init__(self, prices: Callable[[Sequence[Candidate], Sequence[Net]], Prices]) -> None:
        self.price = prices


@pytest.mark.parametrize(
    ("prices", "words"),
    [
        (lambda nodes, nets: Prices([(0, -1)] * len(nodes), []), "prices tanh at -1: a price is an integer"),
        (lambda nodes, nets: Prices([(0.5, 0)] * len(nodes), []), "prices tanh at 0.5: a price is an integer"),  # type: ignore[list-item]
        (lambda nodes, nets: Prices([(True, 0)] * len(nodes), []), "prices tanh at True: a price is an integer"),
        (lambda nodes, nets: Prices([(0, 0)] * len(nodes), [n.at(-2, 0) for n in nets]), "prices .* at -2: a price"),
        (lambda nodes, nets: Prices([], []), "prices 0 of 2 nodes: each has a pair"),
        (
            lambda nodes, nets: Prices([(0, 0)] * len(nodes), [replace(n.at(1, 1), readers=(n.value,)) for n in nets]),
            "prices a read of .*, which it was not asked for",
        ),
    ],
)
@pytest.mark.parametrize(
    "around",
    [lambda c: c, lambda c: Penalties(c, {}, {})],
    ids=["alone", "with penalties"],
)
def test_prices_that_are_none_are_refused_by_the_name_of_the_model(prices: Any, words: str, around: Any) -> None:
    with pytest.raises(PolicyError, match=f"^Answers {words}"):
        colours(around(Answers(prices)))
