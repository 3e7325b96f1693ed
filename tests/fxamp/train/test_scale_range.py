"""The loss scale of a `TrainStep` stays within its bounds whatever the loss does, and ends by name."""

from __future__ import annotations

import math

import fxamp
from fxamp.errors import ScaleCollapseError
from fxamp.train.step import TrainStep
from tests.support.training import X, converted, equal, loss_times, sgd, state


def test_a_loss_that_stays_nan_ends_by_name_and_never_with_a_scale_below_one() -> None:
    model = converted()
    step = TrainStep(model, loss_times, sgd(model))
    before, raised = state(model), []
    for call in range(40):
        try:
            step(X[0], math.nan)
        except ScaleCollapseError as error:
            raised.append((call, str(error)))
        assert step.scaler.get_scale() >= 1.0
    assert [call for call, _ in raised] == list(range(19, 40))
    assert all("first.weight (NaN)" in message and "look for bad data" in message for _, message in raised)
    assert equal(before, state(model))
    assert step(X[0]).stepped


def test_a_tiny_loss_lets_the_scale_grow_to_its_ceiling_and_no_further() -> None:
    model = converted()
    scaler = fxamp.LossScaler(growth_interval=1, min_scale=1.0, max_scale=2.0**24, max_skips=20)
    step = TrainStep(model, loss_times, sgd(model), scaler=scaler)
    scales = [step(X[0], 1e-30).scale for _ in range(60)]
    assert max(scales) == scales[-1] == 2.0**24
    assert all(p.isfinite().all() for p in model.parameters())
