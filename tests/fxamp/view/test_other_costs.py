"""A graph that was captured once is decided on again under other costs; nothing is captured for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import nn

import fxamp
from fxamp.capture import graph
from fxamp.capture.graph import Graph
from fxamp.measure.costs import Penalties
from fxamp.view.graphs import plan_of
from fxamp.view.view import runner_of
from passes import ByteCosts, compile_graph
from passes.contract.costs import CostModel
from passes.contract.plan import Plan

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
DEAR = Penalties(ByteCosts("cpu"), {"2/gelu#0": 1e9}, {})


def net(layers: int = 1) -> nn.Module:
    return nn.Sequential(
        *(m for _ in range(layers) for m in (nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))
    )


def view_of(model: nn.Module, costs: CostModel | None = None) -> nn.Module:
    view: nn.Module = fxamp.convert(model, policy="O2,dtype=bf16")
    runner_of(view).graphs.costs = costs
    view(X)
    return view


def under(costs: CostModel) -> Callable[[Graph], Plan]:
    return lambda graph: graph.decided(None, costs)[1]


def test_a_view_is_decided_on_again_as_if_it_had_been_captured_under_these_costs() -> None:
    view = view_of(net())
    before = plan_of(runner_of(view))
    with mock.patch.object(torch._dynamo.convert_frame, "convert_frame", side_effect=AssertionError("captured")):
        again, other = (plan_of(runner_of(view), under(costs)) for costs in (ByteCosts("cpu"), DEAR))
    assert again == before == plan_of(runner_of(view))
    assert other != before
    assert {d.key: d.colour for d in other.decisions}["2/gelu#0"] == "float32"
    assert other == plan_of(runner_of(view_of(net(), DEAR)))


def test_what_was_decided_again_is_carried_out_as_a_plan() -> None:
    model = net()
    plan = plan_of(runner_of(view_of(model)), under(DEAR))
    replayed = fxamp.convert(model, plan=plan)
    replayed(X)
    assert fxamp.plan_of(replayed).decisions == plan.decisions


def test_deciding_again_takes_the_time_of_the_passes() -> None:
    view, seconds = view_of(net(30)), list[float]()

    def timed(*args: object, **kwargs: object) -> object:
        start = time.process_time()
        try:
            return compile_graph(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            seconds.append(time.process_time() - start)

    with mock.patch.object(graph, "compile_graph", timed):
        start = time.process_time()
        plan_of(runner_of(view), under(DEAR))
        whole = time.process_time() - start
    assert len(seconds) == 1
    assert whole < 1.5 * seconds[0]
