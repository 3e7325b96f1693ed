"""With measured costs a converted model is never slower than FP32 or O1: whole passes are compared at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from fxamp.measure import fastest
from fxamp.measure.timing import OpTimer
from passes.contract.errors import PolicyError
from passes.contract.plan import Plan
from passes.graph.notes import is_inserted
from tests.support.helpers import Layers, assert_untouched, fingerprint

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
POLICY = "O2,dtype=bf16,cost=measured"


class Small(nn.Module):
    """A norm with statistics, dropout, and a loss beside the prediction."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.BatchNorm1d(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.down(F.dropout(F.relu(self.up(self.norm(x))), 0.5, self.training))
        return F.mse_loss(y, x), y


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the times of ops are kept, so that each is taken once."""
    return tmp_path_factory.mktemp("costs")


@pytest.fixture(autouse=True)
def quick(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(measured))
    monkeypatch.setattr(fastest, "ROUNDS", (2, 2))


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Set what a step takes of each variant; the ops themselves cost nothing low, so that O2 is low."""
    seconds: dict[str, float] = {}

    def run(modules: Mapping[str, Any], *_: Any) -> dict[str, list[float]]:
        return {name: [seconds[name]] * 5 for name in modules}

    monkeypatch.setattr(fastest, "_race", run)
    monkeypatch.setattr(OpTimer, "__call__", lambda self, calls: {c: 1 + 10**6 * ("(float" in c.key) for c in calls})
    return seconds


def no_timer(*_: Any) -> None:
    raise AssertionError("nothing may be measured here")


def test_a_model_is_converted_with_measured_costs_and_is_as_it_was() -> None:
    model = Small()
    before = fingerprint(model)
    module = fxamp.convert(model, (X,), policy=POLICY)
    assert_untouched(model, before)
    assert all(p.grad is None for p in model.parameters())
    loss, _ = module(X)
    loss.backward()
    assert torch.isfinite(loss)
    assert str(fxamp.plan_of(module).policy).endswith("cost=measured")


def test_a_model_is_measured_as_it_stands_under_no_grad_and_autocast() -> None:
    model = Small().eval()
    before = fingerprint(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        module = fxamp.convert(model, (X,), policy=POLICY)
        assert not torch.is_grad_enabled()
    assert_untouched(model, before)
    assert not module.training


def test_a_faster_o2_is_emitted_and_so_is_one_as_fast(race: dict[str, float]) -> None:
    for other in (2.0, 1 / 1.005):
        race |= {"O2": 1.0, "O1": other, "FP32": 2.0}
        plan = fxamp.plan(Small().eval(), (X,), policy=POLICY)
        assert plan.policy.level == "O2"
        assert {d.colour for d in plan.decisions if d.op == "linear"} == {"bfloat16"}
        assert plan.notes == ()


def test_where_o2_is_slower_than_o1_that_is_emitted_and_the_plan_says_so(race: dict[str, float]) -> None:
    race |= {"O2": 1.2, "O1": 1.0, "FP32": 1.1}
    model = Small().eval()
    module = fxamp.convert(model, (X,), policy=POLICY)
    assert torch.equal(module(X)[1], fxamp.convert(model, (X,), policy="O1,dtype=bf16")(X)[1])
    plan = fxamp.plan_of(module)
    assert plan.policy == fxamp.Policy.parse("O1,dtype=bf16,device=cpu,cost=measured")
    assert plan.notes == (
        "not_worth_casts: with O2,dtype=bf16,device=cpu,cost=measured a forward and backward on the example inputs "
        "took longer than with O1, so this is the conversion at that level",
    )
    race["O2"] = 0.9
    low = {d.key: d.colour for d in fxamp.plan(model, (X,), policy=POLICY).decisions}
    explained = {d.key for d in plan.decisions if d.code == "not_worth_casts"}
    assert explained == {d.key for d in plan.decisions if low.get(d.key) != d.colour}  # none, if O2 times as O1 does


def test_where_fp32_is_the_fastest_nothing_is_rounded_and_the_plan_says_so(race: dict[str, float]) -> None:
    race |= {"O2": 1.2, "O1": 1.1, "FP32": 1.0}
    model = Small().eval()
    module = fxamp.convert(model, (X,), policy=POLICY)
    assert torch.equal(module(X)[1], model(X)[1])
    plan = fxamp.plan_of(module)
    assert plan.policy.level == "O0"
    assert plan.casts == 0
    linear = [d for d in plan.decisions if d.op == "linear"]
    assert [(d.colour, d.code) for d in linear] == [("float32", "not_worth_casts")] * 2
    assert "took longer than with FP32" in plan.notes[0]


@pytest.mark.parametrize("best", [pytest.param("O2", marks=pytest.mark.matrix), "O1", "FP32"])
def test_a_plan_is_replayed_without_measuring(
    race: dict[str, float], monkeypatch: pytest.MonkeyPatch, best: str, tmp_path: Path
) -> None:
    race |= {"O2": 1.2, "O1": 1.1, "FP32": 1.1} | {best: 1.0}
    model = Small().eval()
    module = fxamp.convert(model, (X,), policy=POLICY)
    fxamp.plan_of(module).save(tmp_path / "plan.json")
    monkeypatch.setattr(OpTimer, "__call__", no_timer)
    monkeypatch.setattr(fastest, "_race", no_timer)
    again = fxamp.convert(model, (X,), plan=tmp_path / "plan.json")
    assert fxamp.plan_of(again) == fxamp.plan_of(module) == Plan.load(tmp_path / "plan.json")
    assert [g.code for g in fxamp.graphs(again)] == [g.code for g in fxamp.graphs(module)]
    assert torch.equal(again(X)[1], module(X)[1])


def test_fp32_is_no_answer_where_the_user_pins_something_low(race: dict[str, float]) -> None:
    race |= {"O2": 1.2, "O1": 1.1, "FP32": 1.0}
    plan = fxamp.plan(Small().eval(), (X,), policy=POLICY + ",modules.up=low")
    assert plan.policy.level == "O1"


def test_an_override_of_an_op_that_only_o2_makes_is_no_error(race: dict[str, float]) -> None:
    race |= {"O2": 1.2, "O1": 1.1, "FP32": 1.0}

    class Loss(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.cross_entropy(super().forward(x), torch.zeros(4, dtype=torch.long))

    plan = fxamp.plan(Loss(8, 8).eval(), (X,), policy=POLICY + ",ops.log_softmax=fp32")
    assert plan.policy.level == "O0"
    assert fxamp.plan(Loss(8, 8).eval(), (X,), policy=POLICY + ",ops.log_softmax=low").policy.level == "O2"


def test_the_plan_keeps_what_was_measured() -> None:
    plan = fxamp.plan_of(fxamp.convert(Small().eval(), (X,), policy=POLICY))
    linears = {call.partition("[")[0]: taken for call, taken in plan.timings.items() if call.startswith("linear(")}
    assert {"linear(bfloat16", "linear(float32"} <= linears.keys()
    assert min(linears.values()) > 0
    assert fxamp.Plan.from_json(plan.to_json()).timings == plan.timings


def test_a_model_that_cannot_go_backward_is_timed_forward() -> None:
    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).exp()
            return y.mul_(2)

    module = fxamp.convert(Writes(8, 8).eval(), (X,), policy=POLICY)
    assert torch.isfinite(module(X)).all()


def test_at_o1_costs_are_measured_and_values_stay_those_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastest, "_race", no_timer)
    model = Small().eval()
    got = fxamp.convert(model, (X,), policy="O1,dtype=bf16,cost=measured")(X)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(got, model(X)[1].float())


def test_the_graph_inside_a_higher_order_op_is_compiled_once(race: dict[str, float]) -> None:
    race |= {"O2": 1.0, "O1": 1.1, "FP32": 1.1}

    def branch(self: Any, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: self.up(x).relu(), lambda x: self.up(x).neg(), (x,))

    model = Layers(branch, up=nn.Linear(8, 8)).eval()
    bodies = [
        [sum(map(is_inserted, m.graph.nodes)) for m in graph.modules() if isinstance(m, torch.fx.GraphModule)][1:]
        for policy in (POLICY, "O2,dtype=bf16")
        for graph in fxamp.graphs(fxamp.convert(model, (X,), policy=policy))
    ]
    assert bodies[0] == bodies[1]
    assert sum(bodies[0]) > 0


def test_what_cannot_be_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PolicyError, match=r"cost='measured' runs the model's ops: give example inputs"):
        fxamp.convert(Small(), policy=POLICY)
    with pytest.raises(PolicyError, match=r"cost='measured' runs the model's ops: give example inputs"):
        fxamp.convert(torch.fx.symbolic_trace(nn.Linear(8, 8)), policy=POLICY)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PolicyError, match="cost='measured' runs ops on 'cuda', which this machine does not have"):
        fxamp.convert(Small(), (X,), policy="O2,device=cuda,cost=measured")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        PolicyError, match="cost='measured' runs the model on 'cuda', and the model is on 'cpu': move model"
    ):
        fxamp.convert(Small(), (X,), policy="O2,device=cuda,cost=measured", check=False)


QUIET, BUSY = [1.0, 1.001, 1.002, 1.0, 1.001], [1.0, 1.4, 1.3, 1.6, 1.5]


@pytest.mark.parametrize(
    ("low", "fp32", "expected"),
    [
        (QUIET, [1.1, 1.101, 1.1], "O2"),
        (BUSY, [1.1, 1.5, 1.6, 1.4], "FP32"),  # the win lies within what the times of one variant spread
        (BUSY, [2.0, 2.4, 2.3], "O2"),
        (QUIET, [1.0005, 1.0005, 1.0005], "FP32"),
        (QUIET, QUIET, "FP32"),
    ],
)
def test_low_must_win_by_more_than_the_spread_of_what_was_measured(
    low: list[float], fp32: list[float], expected: str
) -> None:
    assert fastest.fastest({"O2": low, "O1": [2.0, 2.0, 2.0], "FP32": fp32}) == expected


def test_where_o2_is_not_clearly_faster_than_fp32_the_plan_says_so(race: dict[str, float]) -> None:
    race |= {"O2": 1.0, "O1": 1.1, "FP32": 1.0}
    plan = fxamp.plan(Small().eval(), (X,), policy=POLICY)
    assert plan.policy.level == "O0"
    assert "was not clearly faster than with FP32" in plan.notes[0]
