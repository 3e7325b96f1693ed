"""Low copies of many weights made by one launch: the bits of copies made one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from fxamp.measure.counts import _Counter
from fxamp.train.step import TrainStep
from passes._torch import TorchDispatchMode
from passes.contract.devices import DEVICES
from tests.support.training import BF16, WEIGHTS, X, converted, equal, loss_times, state


@pytest.fixture(autouse=True)
def one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxamp.train.weights.kept.one_launch_pays", lambda weight: True)


class Launches(TorchDispatchMode):
    """Counts the batched copies, and how many tensors each copied."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._foreach_copy_.default:
            self.sizes.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def make_step(model: nn.Module, weights: Any = "per_step", **settings: Any) -> TrainStep:
    settings = {"accumulate_steps": 2, "loss_fn": loss_times, **settings}
    return TrainStep(model, settings.pop("loss_fn"), AdamW(model.parameters(), lr=0.1), weights=weights, **settings)


def run_window(step: TrainStep) -> list[Tensor]:
    return [step(x).loss for x in X[:2]]


def test_a_launch_for_many_is_a_fact_of_the_device() -> None:
    assert {name: row.batches for name, row in DEVICES.items()} == {"cpu": False, "cuda": True, "xpu": True}


def test_from_the_second_window_on_one_launch_makes_all_copies() -> None:
    step = make_step(converted(BF16))
    with _Counter() as first:
        run_window(step)
    count = len(step.weights.casts)
    assert count > 2
    assert all(cast.place is not None and cast.place.low.numel() == 0 for cast in step.weights.casts)
    for _ in range(2):
        with Launches() as launches, _Counter() as counter:
            run_window(step)
        assert launches.sizes == [count]
        assert first.casts - counter.casts == count - 1
        assert counter.cast_bytes == first.cast_bytes


def _nothing(step: TrainStep) -> None:
    """Change nothing."""


def _assign(step: TrainStep) -> None:
    saved = {name: p.detach() * 0.5 for name, p in step.model.state_dict().items()}
    step.model.load_state_dict(saved, assign=True)


def _data(step: TrainStep) -> None:
    for p in step.model.parameters():
        p.data = p.data * 0.5


def _edit(step: TrainStep) -> None:
    with torch.no_grad():
        next(step.model.parameters()).mul_(0.5)


def _freeze(step: TrainStep) -> None:
    step.model.get_submodule("first").requires_grad_(False)


@pytest.mark.parametrize("change", [_nothing, _assign, _data, _edit, _freeze])
@pytest.mark.parametrize("at", ["between windows", "within a window"])
def test_what_becomes_of_weights_is_seen_as_by_casts_at_every_use(at: str, change: Callable[[TrainStep], None]) -> None:
    results = []
    for weights in WEIGHTS:
        model = converted(BF16)
        step = make_step(model, weights)
        losses = run_window(step)
        if at == "within a window":
            losses.append(step(X[2]).loss)
        if at == "between windows" or change is not _data:  # an edit through .data is seen between windows alone
            change(step)
        losses += [step(x).loss for x in X]
        if change is _freeze:
            model.requires_grad_(True)
        losses += [step.flush().loss, *run_window(step), *run_window(step)]
        results.append([*losses, *state(model)])
    assert equal(*[[t.nan_to_num() for t in one] for one in results])


def test_a_copy_that_a_window_does_not_read_is_not_made_for_the_next() -> None:
    model = nn.ModuleDict({"a": converted(BF16), "b": converted(BF16)})
    step = make_step(model, loss_fn=None, accumulate_steps=1)

    class Both(nn.Module):
        def forward(self, x: Tensor, which: str) -> dict[str, Tensor]:
            return {"loss": sum(loss_times(model[one](x)) for one in which)}  # type: ignore[dict-item]

    step.model = Both()
    with Launches() as launches:
        for which in ("ab", "a", "a", "ab", "ab"):
            step((X[0], which))
    count = len(step.weights.casts) // 2
    assert launches.sizes == [2 * count, count, count, 2 * count]


def test_a_backward_through_the_copies_of_an_earlier_window_is_an_error() -> None:
    outputs: list[Tensor] = []

    def loss(output: Tensor) -> Tensor:
        outputs.append(output)
        return loss_times(output)

    step = make_step(converted(BF16), loss_fn=loss)
    for first in (0, 1):
        outputs.clear()
        step(X[0])
        kept = outputs[0].sum()
        step(X[1])
        if first:
            step(X[0])
        with pytest.raises(RuntimeError):
            kept.backward()


def test_an_error_leaves_the_masters_and_the_next_window_as_they_were() -> None:
    results = []
    for weights in WEIGHTS:
        model = converted(BF16)
        step = make_step(model, weights)
        run_window(step)
        step(X[0])
        with pytest.raises(Exception, match=r"shape|size|mat1"):
            step(torch.randn(3, 5))
        assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in model.parameters())
        results.append([*run_window(step), *state(model)])
    assert equal(*results)
