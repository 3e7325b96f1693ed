"""`cast_once`: a loop of one's own casts each weight once between two updates, and trains to the same bits."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW

import fxamp
from fxamp.view.view import runner_of
from tests.support.helpers import in_turns
from tests.support.training import WeightCasts

POLICY = "O1,dtype=bf16"
STEPS = 5


class Lm(nn.Module):
    """A causal language model of one layer, whose output projection is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.layer(self.embedding(ids))))
        return logits.flatten(0, 1)


# What is read in 16 bits: weight and bias of four products, and the head.
LOW = 9


class Small(nn.Module):
    """The same without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(40, 32), nn.Linear(32, 32), nn.Linear(32, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.embedding(ids)).tanh())
        return logits.flatten(0, 1)


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    return list(torch.randint(40, (STEPS * 4, 2, 8), generator=torch.Generator().manual_seed(1)))


class ByHand:
    """SGD as a loop writes it."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def step(self) -> None:
        with torch.no_grad():
            for p in self.params:
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)


class InData(ByHand):
    """An engine that no version shows, as that of DeepSpeed."""

    def step(self) -> None:
        for p in self.params:
            if p.grad is not None:
                p.data.sub_(0.1 * p.grad)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "fused": lambda ps: AdamW(ps, lr=0.01, fused=True),
    "foreach": lambda ps: AdamW(ps, lr=0.01, foreach=True),
    "for-loop": lambda ps: AdamW(ps, lr=0.01, foreach=False),
    "fused Adam": lambda ps: Adam(ps, lr=0.01, fused=True),
    "fused SGD": lambda ps: SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "fused Adagrad": lambda ps: Adagrad(ps, lr=0.01, fused=True),
    "by hand": ByHand,
    "in .data": InData,
}


def train(
    batches: list[Tensor], optimizer: str, accumulate: int, *, once: bool,
    between: Callable[[Any, int], object] | None = None, within: Callable[[Any, int], object] | None = None,
    kind: type[nn.Module] = Small,
) -> tuple[list[Tensor], list[int], list[Tensor]]:  # fmt: skip
    """Return losses, casts of weights by step, and the weights after some steps."""
    torch.manual_seed(0)
    model = kind()
    view = fxamp.convert(model, policy=POLICY)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    losses, casts = [], []
    with view.cast_once() if once else contextlib.nullcontext():
        for index in range(STEPS):
            with WeightCasts(model) as counter:
                for ids in batches[index * accumulate : (index + 1) * accumulate]:
                    torch.manual_seed(7 + index)
                    loss = F.cross_entropy(view(ids), ids.flatten()) / accumulate
                    loss.backward()
                    losses.append(loss.detach())
                    if within is not None and len(losses) % accumulate:
                        within(view, index)
                stepper.step()
                stepper.zero_grad()
            casts.append(counter.count)
            if between is not None:
                between(view, index)
    return losses, casts, [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize(("optimizer", "accumulate"), in_turns(list(OPTIMIZERS), [4, 1]))
def test_a_loop_casts_each_weight_once_a_step_and_trains_to_the_same_bits(
    batches: list[Tensor], optimizer: str, accumulate: int
) -> None:
    expected, per_use, weights = train(batches, optimizer, accumulate, once=False, kind=Lm)
    losses, casts, found = train(batches, optimizer, accumulate, once=True, kind=Lm)
    assert same(losses, expected)
    assert same(found, weights)
    assert per_use[1:] == [accumulate * LOW] * (STEPS - 1)
    assert casts[1:] == ([LOW] * (STEPS - 1) if optimizer != "in .data" else per_use[1:])


def edit_in_place(view: Any, index: int) -> None:
    with torch.no_grad():
        view.head.weight.sub_(0.01)


def load(view: Any, index: int) -> None:
    view.load_state_dict({name: value * 0.99 for name, value in view.state_dict().items()})


def replace_data(view: Any, index: int) -> None:
    for _ in range(2):  # the second may get the memory of the first
        view.head.weight.data = view.head.weight.data * 0.99


def assign(view: Any, index: int) -> None:
    weight = view.layer.weight
    view.layer.weight = nn.Parameter(weight.detach() * 0.99)


def validate_swapped(view: Any, index: int) -> None:
    """Validate with other weights, as libraries of averaged weights do: through `.data`, which no sign shows."""
    kept = [p.detach().clone() for p in view.parameters()]
    view.eval()
    for p in view.parameters():
        p.data.copy_(torch.zeros_like(p))
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with torch.no_grad():
        assert not view(ids).any()
    assert not view(ids).any()  # nor with gradients
    for p, weight in zip(view.parameters(), kept, strict=True):
        p.data.copy_(weight)
    view.train()


EDITS = [edit_in_place, load, replace_data, assign, validate_swapped]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_a_weight_is_seen(batches: list[Tensor], edit: Callable[[Any, int], object]) -> None:
    expected = train(batches, "fused", 2, once=False, within=edit)
    found = train(batches, "fused", 2, once=True, within=edit)
    assert same(found[0], expected[0])
    assert same(found[2], expected[2])


def test_a_weight_that_is_written_within_a_window_is_cast_again(batches: list[Tensor]) -> None:
    results = []
    for once in (False, True):
        torch.manual_seed(0)
        model = Small()
        view = fxamp.convert(model, policy=POLICY)
        with fxamp.cast_once(view) if once else contextlib.nullcontext():
            torch.manual_seed(1)
            first = view(batches[0]).float().square().mean()
            with torch.no_grad():
                model.head.weight.mul_(2)
            torch.manual_seed(2)
            second = view(batches[1]).float().square().mean()
            second.backward()
            if not once:  # a backward of the first would need what was written
                del first
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    assert same(*results)


def test_gradients_of_two_forwards_before_one_backward_are_summed_in_fp32(batches: list[Tensor]) -> None:
    results = []
    for once in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
        view = fxamp.convert(model, policy=POLICY)
        x, z = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(2))
        with fxamp.cast_once(view) if once else contextlib.nullcontext():
            for _ in range(2):
                (view(x).square().mean() + view(z).square().mean()).backward()
            kept = view(x).square().mean()
            kept.backward(retain_graph=True)  # a graph that stays may send its gradient again, together with another's
            (kept + view(z).square().mean()).backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    assert same(*results)


def test_a_backward_after_a_step_has_the_weights_of_its_forward(batches: list[Tensor]) -> None:
    """Of two forwards, one goes back after the optimizer's step, as in a pipeline: copies are not overwritten."""
    results = []
    for once in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
        view, optimizer = fxamp.convert(model, policy=POLICY), None
        optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))
        with fxamp.cast_once(view) if once else contextlib.nullcontext():
            waiting = view(x).square().mean()
            for _ in range(4):
                following = view(x).square().mean()
                waiting.backward()
                optimizer.step()
                optimizer.zero_grad()
                waiting = following
            waiting.backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    assert same(*results)


def test_a_root_in_eval_mode_that_is_trained_keeps_nothing_and_says_so_once(
    batches: list[Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    model = Small().eval()
    view, optimizer = fxamp.convert(model, policy=POLICY), SGD(model.parameters(), lr=0.1)
    with view.cast_once(), caplog.at_level(logging.WARNING, "fxamp"), WeightCasts(model) as counter:
        for ids in batches[:2]:
            for _ in range(2):
                F.cross_entropy(view(ids), ids.flatten()).backward()
            optimizer.step()
    assert counter.count == 4 * 3
    assert [r.getMessage() for r in caplog.records if "eval mode" in r.getMessage()] == [
        "fxamp: cast_once: Small keeps no casts of weights, since it trains in eval mode: call train() before"
    ]


def test_an_update_that_nothing_shows_is_said_once(batches: list[Tensor], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxamp"):
        train(batches, "in .data", 2, once=True)
    (said,) = [r.getMessage() for r in caplog.records if "cast_once" in r.getMessage()]
    assert "no torch.optim.Optimizer" in said


def test_frozen_weights_are_cast_once_for_all_steps(batches: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = Lm()
    model.layer.requires_grad_(False)
    view, optimizer = fxamp.convert(model, policy=POLICY), AdamW(model.parameters(), fused=True)
    casts = []
    with view.cast_once():
        for ids in batches[:4]:
            with WeightCasts(model) as counter:
                F.cross_entropy(view(ids), ids.flatten()).backward()
                optimizer.step()
            casts.append(counter.count)
    assert casts == [LOW, 1, 1, 1]


def test_a_teacher_that_is_written_through_data_is_never_stale() -> None:
    class Byol(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.teacher(x)
            return (self.student(x) - target).square().mean()

    losses = []
    for once in (False, True):
        torch.manual_seed(0)
        model = Byol()
        view, optimizer = fxamp.convert(model, policy=POLICY), SGD(model.parameters(), lr=0.1)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
        with view.cast_once() if once else contextlib.nullcontext():
            for _ in range(3):
                loss = view(x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                for teacher, student in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                    teacher.data.mul_(0.5).add_(student.detach(), alpha=0.5)
    assert same(losses[:3], losses[3:])


def test_nothing_stays_open_after_it() -> None:
    view = fxamp.convert(Small(), policy=POLICY)
    with pytest.raises(ZeroDivisionError), view.cast_once(), fxamp.cast_once(view):
        raise ZeroDivisionError
    assert runner_of(view).opened() is None
    with pytest.raises(fxamp.NotAModuleError, match=r"fxamp\.convert"), fxamp.cast_once(Small()):
        pass
    with pytest.raises(fxamp.CaptureError, match="frozen"), fxamp.frozen(view), fxamp.cast_once(view):
        pass


def test_weights_can_be_frozen_for_validation_inside(batches: list[Tensor]) -> None:
    def validate(view: Any, index: int) -> None:
        with torch.no_grad(), fxamp.frozen(view):
            view(batches[0])

    expected = train(batches, "foreach", 2, once=False)
    found = train(batches, "foreach", 2, once=True, between=validate)
    assert same(found[0], expected[0])
    assert found[1][1:] == [3] * (STEPS - 1)


def test_a_step_of_one_micro_batch_takes_few_calls_of_python_for_each_weight() -> None:
    """Times differ by more than what is counted here; a call is about a tenth of a microsecond, a cast takes three."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(30)))
    view, optimizer, x = fxamp.convert(model, policy=POLICY), AdamW(model.parameters(), fused=True), torch.randn(4, 8)

    def calls() -> int:
        count = 0

        def event(_: Any, kind: str, __: Any) -> None:
            nonlocal count
            count += kind in ("call", "c_call")

        for _ in range(3):
            view(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        before = sys.getprofile()
        sys.setprofile(event)
        try:
            view(x).square().mean().backward()
            optimizer.step()
        finally:
            sys.setprofile(before)
        optimizer.zero_grad()
        return count

    without = calls()
    with fxamp.cast_once(view):
        assert calls() - without <= 18 * 60
