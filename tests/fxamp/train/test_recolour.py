"""A run whose steps are skipped goes on by one line, with what overflowed in FP32, and the history says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.errors import ScaleCollapseError
from tests.support.helpers import matrix

FP16 = "O1,dtype=fp16"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


class Net(nn.Module):
    """A net with a value that grows beyond FP16 once `factor`, a buffer, is large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.factor = nn.Buffer(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        grown = (self.first(x).tanh() + 2) * self.factor  # grows
        out: Tensor = self.last(grown / self.factor)
        return out


def batch(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(16, 8, generator=generator)
    return x, x[:, :4].sin()


def step_of(model: nn.Module, policy: str = FP16, **more: Any) -> fxamp.TrainStep:
    settings: dict[str, Any] = {"max_skips": 4, **more}
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return fxamp.TrainStep(fxamp.convert(model, policy=policy), nn.functional.mse_loss, optimizer, **settings)


def scaler(**more: Any) -> fxamp.LossScaler:
    return fxamp.LossScaler(**{"init_scale": 2.0**10, "min_scale": 1.0, "max_skips": 4, **more})


def healing(step: fxamp.TrainStep, i: int) -> str:
    """Run a step; where many were skipped, let what overflowed run in FP32 from then on."""
    try:
        return step(*batch(i)).reason
    except ScaleCollapseError as e:
        step.switch(e.overflow.policy)
        return "overflow"


def run(step: fxamp.TrainStep, count: int) -> list[str]:
    return [healing(step, i) for i in range(count)]


def grow(model: Net) -> None:
    with torch.no_grad():
        model.factor.fill_(5e4)


@pytest.mark.parametrize("how", ["scaler", "compiled", *matrix("step", "static", "accumulates")])
def test_a_run_with_an_overflow_goes_on(how: str) -> None:
    model = Net()
    more: Any = {
        "scaler": {"scaler": scaler()}, "step": {"scaler": scaler(max_skips=None)}, "static": {"scaler": 64.0},
        "accumulates": {"scaler": scaler(), "accumulate_steps": 2},
        "compiled": {"scaler": scaler(), "compile": "aot_eager"},
    }[how]  # fmt: skip
    step = step_of(model, **more)
    for i in range(6):
        assert step(*batch(i)).reason in ("stepped", "accumulating")
    grow(model)
    windows = step.windows
    ended = [reason for reason in run(step, 12) if reason != "accumulating"]
    assert ended == ["overflow"] * 4 + ["stepped"] * (len(ended) - 4)
    assert step.windows == windows + len(ended)
    assert step.skipped == 4
    ((at, policy),) = step.switches
    assert at == windows + 4
    assert "ops./mul#0=fp32" in policy
    assert step.scaler.get_scale() == (64.0 if how == "static" else 2.0**6)


def test_the_healed_run_ends_as_one_in_fp32_within_its_spread_over_seeds() -> None:
    def trained(policy: str, order: int, planted: bool) -> float:
        torch._dynamo.reset()
        model = Net()
        step = step_of(model, policy, scaler=None if policy == "O0" else scaler())
        for i in range(150):
            if i == 50 and planted:
                grow(model)
            healing(step, 1000 * order + i)
        with torch.no_grad():
            return float(nn.functional.mse_loss(model(batch(-1 + 10**6)[0]), batch(-1 + 10**6)[1]))

    plain = torch.tensor([trained("O0", order, planted=False) for order in range(4)])
    healed = trained(FP16, 0, planted=True)
    assert abs(healed - plain.mean()) <= 3 * plain.std()


def test_the_cure_is_in_the_state_and_loads() -> None:
    model = Net()
    step = step_of(model, scaler=scaler())
    grow(model)
    run(step, 5)
    assert len(step.switches) == 1
    again = step_of(Net(), scaler=scaler())
    again.load_state_dict(step.state_dict())
    assert again.switches == step.switches
    assert again(*batch(9)).stepped


def test_what_no_colouring_cures_is_raised() -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(super().forward(x) * 0)

    step = step_of(Broken(), scaler=scaler())
    for i in range(3):
        step(*batch(i))
    with pytest.raises(ScaleCollapseError, match="4 steps in a row") as raised:
        step(*batch(3))
    assert step.windows == 4
    assert raised.value.overflow is None or raised.value.overflow.policy is None


def test_the_error_names_the_node_and_the_largest_loss_scale_that_fits() -> None:
    step = step_of(Net(), scaler=scaler(init_scale=2.0**40, max_scale=None))
    for i in range(3):
        step(*batch(i))
    with pytest.raises(ScaleCollapseError) as raised:
        step(*batch(3))
    assert raised.value.overflow is not None
    assert 1 < raised.value.overflow.largest_scale < 2.0**36
    model = Net()
    step = step_of(model, scaler=scaler())
    grow(model)
    for i in range(3):
        step(*batch(i))
    with pytest.raises(
        ScaleCollapseError, match=r"The first overflow is /mul#0 \(.*# grows\): mul makes inf in float16"
    ):
        step(*batch(3))
