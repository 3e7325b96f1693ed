"""Accelerate prepares a view: its own `bf16` step for step, checkpoints, and the plan ran."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxamp
from fxamp.demo import LeNet5
from tests.support.training import WeightCasts

accelerate: Any = pytest.importorskip("accelerate")
pytestmark = [pytest.mark.filterwarnings("ignore")]  # Accelerate's own
O1 = "O1,dtype=bf16"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    accelerate.state.AcceleratorState._reset_state(True)


def data() -> Any:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 1, 8, 8, generator=generator), torch.randint(10, (24,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)


class Run:
    """A model, an optimizer and batches that Accelerate has prepared, and the losses of its steps."""

    def __init__(self, policy: str | None, scaler: Any = None, **settings: Any) -> None:
        accelerate.state.AcceleratorState._reset_state(True)
        torch.manual_seed(0)
        model = LeNet5()
        self.losses: list[float] = []
        self.accelerator = accelerate.Accelerator(cpu=True, **settings)
        if scaler is not None:
            self.accelerator.scaler = scaler
        self.view = model if policy is None else fxamp.convert(model, policy=policy)
        self.model, self.optimizer, self.batches = self.accelerator.prepare(
            self.view, torch.optim.SGD(model.parameters(), 0.1, 0.9), data()
        )

    def train(self, first: int = 0, last: int = 6, clip: float | None = 0.5) -> list[float]:
        for x, y in list(self.batches)[first:last]:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x).float(), y)
            self.accelerator.backward(loss)
            if clip is not None:
                self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            self.losses.append(loss.item())
        return self.losses


def test_a_view_trains_as_accelerates_own_bf16_and_the_plan_ran() -> None:
    ours, theirs = Run(O1), Run(None, mixed_precision="bf16")
    assert ours.train() == theirs.train()
    trained = theirs.model.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in ours.model.state_dict().items())
    assert fxamp.census(ours.view, *next(iter(data())), loss=nn.functional.cross_entropy)
    assert Run(None).train() != ours.losses
    assert Run(f"{O1},modules.fc3=fp32").train() != ours.losses


def test_one_line_casts_each_weight_once_between_two_updates() -> None:
    runs = [Run(O1, gradient_accumulation_steps=2) for _ in range(2)]
    theirs = Run(None, mixed_precision="bf16", gradient_accumulation_steps=2)
    counts = []
    for run, once in ((theirs, False), (runs[0], False), (runs[1], True)):
        with WeightCasts(run.model) as casts, fxamp.cast_once(run.view) if once else contextlib.nullcontext():
            for x, y in run.batches:
                with run.accelerator.accumulate(run.model):
                    loss = nn.functional.cross_entropy(run.model(x).float(), y)
                    run.accelerator.backward(loss)
                    run.optimizer.step()
                    run.optimizer.zero_grad()
                    run.losses.append(loss.item())
        counts.append(casts.by_step[1:])
    assert theirs.losses == runs[0].losses == runs[1].losses
    assert counts[1:] == [[20, 20], [10, 10]]


def test_a_run_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    whole, first = Run(O1), Run(O1)
    whole.train()
    first.train(0, 3)
    first.accelerator.save_state(tmp_path)
    again = Run(O1)
    again.accelerator.load_state(tmp_path)
    assert first.losses + again.train(3, 6) == whole.losses


def test_its_scale_falls_with_each_step_that_is_skipped() -> None:
    """On a CPU Accelerate makes no scaler, so it is given one."""
    scaler = fxamp.LossScaler(init_scale=2.0**20)
    run = Run("O1,dtype=fp16", scaler)
    skipped = 0
    for at in range(6):
        before = scaler.get_scale()
        run.train(at, at + 1, clip=None)
        assert run.optimizer.step_was_skipped is (scaler.get_scale() < before)
        skipped += run.optimizer.step_was_skipped
    assert 0 < skipped < 6
