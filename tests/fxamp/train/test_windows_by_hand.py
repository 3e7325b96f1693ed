"""Windows with forwards of one's own: two phases, weights of micro-batches, gradients before the step, outputs."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.profiler import ProfilerActivity, profile

import fxamp
from fxamp.measure.counts import _Counter
from fxamp.train.step import TrainStep
from fxamp.view.view import runner_of
from passes.contract.errors import PolicyError
from tests.support.helpers import in_turns
from tests.support.training import BF16, FP16, Net, X, converted, equal, loss_times, sgd, state

TOKENS = (1, 7, 3, 5)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_plan_ran(model: Any) -> None:
    """Say that a graph was captured, and that the policy decides what it computes."""
    assert runner_of(model).graphs
    other = fxamp.convert(runner_of(model).model, policy="O1,dtype=bf16,modules.first=fp32")
    with torch.no_grad():
        assert not torch.equal(model(X[0]), other(X[0]))


# ------------------------------------------------------------------------------------- two phases


@pytest.mark.default_case(policy="O1,dtype=fp16")
@pytest.mark.parametrize("policy", [FP16, BF16])
@pytest.mark.parametrize("weights", ["per_use", "per_step"])
def test_two_phases_are_the_call(policy: str, weights: Any) -> None:
    results = []
    for by_hand in (False, True):
        model = converted(policy)
        step = TrainStep(model, loss_times, AdamW(model.parameters()), accumulate_steps=2, weights=weights)
        for i, x in enumerate(X):
            if by_hand:
                with step.window():
                    step.backward(loss_times(model(x)))
                result = step.update() if i % 2 else None
            else:
                result = step(x)
        assert result is not None
        assert result.reason == "stepped"
        results.append([*state(model), result.loss])
        assert (step.windows, step.steps, step.skipped) == (2, 2, 0)
    assert equal(*results)
    assert_plan_ran(model)


def test_a_window_casts_each_weight_once_for_forwards_of_ones_own() -> None:
    counts = []
    for weights in ("per_use", "per_step"):
        model = converted(BF16)
        step = TrainStep(model, loss_times, sgd(model), accumulate_steps=2, weights=weights)
        for window in range(2):
            with _Counter() as counter:
                for x in X[:2]:
                    with step.window():
                        step.backward(loss_times(model(x)) + loss_times(model(x * 2)))
                step.update()
            counts.append(counter.cast_bytes) if window else None
    assert counts[1] < counts[0]


def test_a_forward_outside_of_a_window_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = converted(BF16)
    step = TrainStep(model, loss_times, sgd(model))
    for x in X:
        step.backward(loss_times(model(x)))
        assert step.update().stepped
    assert caplog.text.count("a forward outside of `with step.window():` casts weights at each use") == 1


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = nn.Linear(6, 6), nn.Linear(6, 1)


def test_the_two_steps_of_a_gan_are_those_of_a_loop_by_hand() -> None:
    found = []
    for by_hand in (False, True):
        torch.manual_seed(0)
        pair = Pair()
        maker, critic = (fxamp.convert(m, policy=BF16) for m in (pair.maker, pair.critic))
        optimizers = SGD(pair.critic.parameters(), lr=0.1), SGD(pair.maker.parameters(), lr=0.1)
        steps = [TrainStep(m, None, o) for m, o in zip((critic, maker), optimizers, strict=True)]
        for x in X:
            if by_hand:
                (critic(maker(x).detach()).mean() - critic(x).mean()).backward()
                optimizers[0].step()
                pair.zero_grad()
                (-critic(maker(x)).mean()).backward()
                optimizers[1].step()
                pair.zero_grad()
                continue
            with steps[0].window():
                steps[0].backward(critic(maker(x).detach()).mean() - critic(x).mean())
            steps[0].update()
            with steps[1].window():
                steps[1].backward(-critic(maker(x)).mean())
            steps[1].update()
        found.append(state(pair))
    assert equal(*found)


def test_gradients_are_true_where_they_are_looked_at() -> None:
    seen: list[list[Tensor]] = []

    def look(parameters: list[Tensor]) -> None:
        seen.append([p.grad.clone() for p in parameters if p.grad is not None])
        for p in parameters:
            assert p.grad is not None
            p.grad.mul_(0.5)

    for policy in (FP16, BF16):
        model, plain = converted(policy), converted(policy)
        step = TrainStep(model, loss_times, sgd(model), max_grad_norm=0.1, on_gradients=look)
        result = step(X[0])
        loss_times(plain(X[0])).backward() if policy == BF16 else None
        if policy == BF16:
            assert equal(seen[-1], gradients(plain))
        assert result.grad_norm is not None
        torch.testing.assert_close(result.grad_norm, torch.cat([g.flatten() for g in seen[-1]]).norm() * 0.5)
    assert len(seen) == 2


# ------------------------------------------------------------------------------------- weights of micro-batches


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def ragged() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 6, generator=generator), torch.randint(2, (n,), generator=generator)) for n in TOKENS]


@pytest.mark.parametrize(("policy", "as_tensor"), in_turns(["O0", BF16], [False, True]))
def test_the_gradient_of_unequal_micro_batches_is_that_of_all_together(policy: str, as_tensor: bool) -> None:
    model, whole = converted(policy), converted(policy)
    seen: list[Tensor] = []
    step = TrainStep(
        model, token_loss, sgd(model), accumulate_steps=len(TOKENS), weights="per_use",
        on_gradients=lambda ps: seen.extend(p.grad.clone() for p in ps if p.grad is not None),
    )  # fmt: skip
    for (x, y), n in zip(ragged(), TOKENS, strict=True):
        result = step(x, y, weight=torch.tensor(float(n)) if as_tensor else n)
    xs, ys = (torch.cat(parts) for parts in zip(*ragged(), strict=True))
    loss = token_loss(whole(xs), ys)
    loss.backward()
    ours, theirs = (torch.cat([g.flatten() for g in found]) for found in (seen, gradients(whole)))
    bound = 1e-6 if policy == "O0" else 1e-2  # in BF16 gradients of activations are rounded batch by batch
    assert (ours - theirs).norm() / theirs.norm() < bound
    torch.testing.assert_close(result.mean_loss, loss.detach(), rtol=1e-6 if policy == "O0" else 1e-2, atol=0)


@pytest.mark.default_case(policy="O2,dtype=bf16")
@pytest.mark.parametrize("policy", [FP16, BF16])
@pytest.mark.parametrize("weight", [0.1, 7, torch.tensor(3.0)])
def test_with_equal_weights_it_is_what_it_is_without(policy: str, weight: Any) -> None:
    found = []
    for given in ({}, {"weight": weight}):
        model = converted(policy)
        step = TrainStep(model, loss_times, sgd(model), accumulate_steps=3, max_grad_norm=0.1)
        for x in X:
            step(x, **given)
        step.flush()
        found.append(state(model))
    assert equal(*found)


def test_a_weight_of_zero_first_leaves_a_micro_batch_out() -> None:
    found = []
    for with_it in (True, False):
        model = converted(BF16)
        step = TrainStep(model, loss_times, sgd(model), accumulate_steps=2)
        if with_it:
            step(X[3], weight=0)
        step(X[0], weight=1)
        step.flush()
        found.append(state(model))
    assert equal(*found)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "2", True, torch.ones(2)])
def test_a_weight_that_is_none_is_refused(weight: Any) -> None:
    model = converted(BF16)
    step = TrainStep(model, loss_times, sgd(model))
    with pytest.raises(PolicyError, match="weight must be a"):
        step(X[0], weight=weight)
    assert step(X[0]).stepped


def test_a_window_whose_weights_are_all_zero_is_refused_and_leaves_nothing() -> None:
    model = converted(BF16)
    step = TrainStep(model, loss_times, sgd(model), accumulate_steps=2)
    before = state(model)
    step(X[0], weight=0)
    with pytest.raises(PolicyError, match="every weight of this window is 0"):
        step(X[1], weight=0)
    assert equal(state(model), before)
    assert not gradients(model)
    step(X[0])
    assert step(X[1]).stepped


# ------------------------------------------------------------------------------------- outputs, metrics, ranges


def test_the_output_is_what_the_model_returned() -> None:
    model, plain = converted(BF16), converted(BF16)
    step = TrainStep(model, loss_times, sgd(model))
    expected = plain(X[0])
    result = step(X[0])
    assert torch.equal(result.output, expected)
    assert result.output.dtype == torch.float32


def test_metrics_are_plain_numbers_of_one_read() -> None:
    model = converted(FP16)
    groups = [{"params": model.first.parameters(), "lr": 0.1}, {"params": model.second.parameters(), "lr": 0.2}]
    step = TrainStep(model, loss_times, SGD(groups), accumulate_steps=2, max_grad_norm=1.0)
    first, second = step(X[0]), step(X[1])
    metrics = second.metrics()
    assert all(type(value) is float for value in metrics.values())
    assert metrics["mean_loss"] == pytest.approx((first.loss.item() + second.loss.item()) / 2)
    assert (metrics["lr/0"], metrics["lr/1"], metrics["kept"], metrics["skipped"]) == (0.1, 0.2, 2.0, 0.0)
    assert (metrics["scale"], metrics["loss"]) == (2.0**16, pytest.approx(second.loss.item()))  # type: ignore[comparison-overlap]
    assert metrics["grad_norm"] == pytest.approx(float(second.grad_norm or 0))
    assert "grad_norm" not in first.metrics()
    assert step(X[0], math.inf).metrics()["skipped"] == 0.0
    assert step(X[0]).metrics()["skipped"] == 1.0
    assert (step.windows, step.steps, step.skipped) == (2, 1, 1)


def test_stepped_is_always_a_bool() -> None:
    model = converted(FP16)
    optimizers = [sgd(model.first), sgd(model.second)]
    step = TrainStep(model, loss_times, optimizers, max_grad_norm=1.0)
    assert step(X[0], math.inf).stepped is False
    result = step(X[0])
    assert (result.stepped, result.stepped_each) == (True, (True, True))
    assert len(repr(result).splitlines()) == 1


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_a_profile_shows_the_parts_of_a_step() -> None:
    model = converted(BF16)
    step = TrainStep(model, loss_times, sgd(model))
    step(X[0])
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step(X[1])
    names = {event.key for event in found.key_averages()}
    assert {"fxamp.forward", "fxamp.backward", "fxamp.update"} <= names


# ------------------------------------------------------------------------------------- bad input


def test_update_needs_a_backward_and_is_not_called_twice() -> None:
    model = converted(BF16)
    step = TrainStep(model, loss_times, sgd(model))
    with pytest.raises(PolicyError, match=r"there is no window to end: call step\.backward\(loss\) first"):
        step.update()
    with step.window():
        step.backward(loss_times(model(X[0])))
    step.update()
    with pytest.raises(PolicyError, match="there is no window to end"):
        step.update()
    with step.window():
        model(X[0])
    with pytest.raises(PolicyError, match="there is no window to end"):
        step.update()
    assert step(X[0]).stepped


def test_a_loss_of_another_model_is_refused() -> None:
    model, other = converted(BF16), Net()
    step = TrainStep(model, loss_times, sgd(model))
    with (
        pytest.raises(PolicyError, match="gives no gradient to any parameter that the optimizers train"),
        step.window(),
    ):
        step.backward(loss_times(other(X[0])))
    with pytest.raises(PolicyError, match="the loss does not depend on any trainable"), step.window():
        step.backward(torch.ones(()))
    with pytest.raises(PolicyError, match="the loss must be a tensor of one element"), step.window():
        step.backward(model(X[0]))
    assert step(X[0]).stepped


def test_a_window_that_an_exception_left_is_as_if_it_had_not_been_opened() -> None:
    model, expected = converted(FP16), converted(FP16)
    step, plain = (TrainStep(m, loss_times, sgd(m), accumulate_steps=2) for m in (model, expected))
    with pytest.raises(ZeroDivisionError), step.window():  # noqa: PT012
        step.backward(loss_times(model(X[0])))
        raise ZeroDivisionError
    assert not gradients(model)
    assert step.position == 0
    for x in X:
        step(x)
        plain(x)
    assert equal(state(model), state(expected))


def test_a_loss_of_ones_own_has_no_place_in_a_compiled_step() -> None:
    model = converted(BF16)
    step = TrainStep(model, loss_times, sgd(model), compile="aot_eager")
    with pytest.raises(PolicyError, match="compile= makes model and loss one graph"), step.window():
        pass
    with pytest.raises(PolicyError, match="compile= makes model and loss one graph"):
        step.backward(loss_times(model(X[0])))


# ------------------------------------------------------------------------------------- another policy


def test_switching_the_policy_is_two_runs_glued_by_hand() -> None:
    def run(switch: bool) -> list[Tensor]:
        model = converted("O2,dtype=bf16")
        optimizer = AdamW(model.parameters())
        step = TrainStep(model, loss_times, optimizer, accumulate_steps=2)
        for i in range(20):
            if i == 10 and switch:
                step.switch("O1")
                assert step.switches == ((5, "O1"),)
            elif i == 10:
                view = fxamp.convert(runner_of(model).model, policy="O1,dtype=bf16")
                step = TrainStep(view, loss_times, optimizer, accumulate_steps=2)
            step(X[i % 4] * (1 + i))
        return state(model)

    assert equal(run(True), run(False))


def test_a_switch_is_in_the_state_and_resumes() -> None:
    model, again = converted("O2,dtype=bf16"), converted("O2,dtype=bf16")
    step, resumed = (TrainStep(m, loss_times, sgd(m)) for m in (model, again))
    step(X[0])
    step.switch("O1,dtype=bf16")
    step(X[1])
    resumed.load_state_dict(step.state_dict())
    assert resumed.switches == step.switches == ((1, "O1,dtype=bf16"),)
    for x in X:
        step(x)
        resumed(x)
    assert equal(state(model), state(again))
    assert runner_of(again).graphs.policy.level == runner_of(model).graphs.policy.level
    assert dict(fxamp.report(step).training)["policy from window 1 on"] == "O1,dtype=bf16"


def test_a_switch_to_a_plan_replays_it_and_is_in_the_state() -> None:
    by_hand = converted("O1,dtype=bf16,modules.first=fp32")
    by_hand(X[0])
    plan = fxamp.plan_of(by_hand)
    model, again = converted(BF16), converted(BF16)
    step, resumed = (TrainStep(m, loss_times, sgd(m)) for m in (model, again))
    step(X[0])
    step.switch(plan)
    step(X[1])
    assert [(d.key, d.colour) for d in fxamp.plan_of(model).decisions] == [(d.key, d.colour) for d in plan.decisions]
    saved = copy.deepcopy(step.state_dict())
    step(X[2])
    resumed.load_state_dict(saved)
    resumed(X[2])
    assert equal(state(model), state(again))
    assert [d.colour for d in fxamp.plan_of(again).decisions] == [d.colour for d in plan.decisions]
    step.switch(BF16)
    assert step.state_dict()["switched_plan"] is None


def test_a_plan_of_a_whole_model_is_switched_to_in_each_view_of_it() -> None:
    def blocks(policy: str) -> nn.Sequential:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(2)]
        return nn.Sequential(*(fxamp.convert(layer, policy=policy + ",output_dtype=autocast") for layer in layers))

    fp32, low = blocks("O1,dtype=bf16,modules.0=fp32"), blocks(BF16)
    fp32(X[0])
    plan = fxamp.plan_of(fp32)
    step = TrainStep(low, loss_times, sgd(low))
    step.switch(plan)
    assert torch.equal(low(X[0]), fp32(X[0]))
    found = fxamp.plan_of(low).decisions
    assert [(d.key, d.colour) for d in found] == [(d.key, d.colour) for d in plan.decisions]
    assert {d.module_path for d in found} == {"0.0", "0.1", "1.0", "1.1"}
    with pytest.raises(PolicyError, match="another model: it decides on nothing in '1', which is a view"):
        step.switch(dataclasses.replace(plan, decisions=plan.decisions[:2]))


def test_a_switch_that_cannot_be_is_refused() -> None:
    model = converted(BF16)
    step = TrainStep(model, loss_times, sgd(model), accumulate_steps=2)
    step(X[0])
    with pytest.raises(PolicyError, match="a policy is switched between two windows"):
        step.switch("O1")
    step(X[1])
    with pytest.raises(PolicyError, match=r"a switch keeps the dtype: Net runs with dtype=torch\.bfloat16"):
        step.switch("O1,dtype=fp16")
    other = fxamp.convert(nn.Sequential(nn.Linear(6, 2)), (X[0],), policy="O1,dtype=bf16")
    with pytest.raises(PolicyError, match="the plan is of another model: Net has no module '0'"):
        step.switch(fxamp.plan_of(other))
    plain = Net()
    unconverted = TrainStep(plain, loss_times, sgd(plain))
    with pytest.raises(PolicyError, match="no part of this model is a view"):
        unconverted.switch("O1")
    step(X[0])
    assert step(X[1]).stepped


@pytest.mark.default_case(policy="O1,dtype=fp16")
@pytest.mark.parametrize("policy", [FP16, BF16])
def test_a_gradient_that_a_hook_makes_nan_skips_where_gradients_are_clipped(policy: str) -> None:
    model = converted(policy)

    def spoil(parameters: list[Tensor]) -> None:
        assert parameters[0].grad is not None
        parameters[0].grad.fill_(math.nan)

    step = TrainStep(model, loss_times, sgd(model), max_grad_norm=0.1, on_gradients=spoil)
    before = state(model)
    assert step(X[0]).reason == "overflow"
    assert equal(before, state(model))
    with pytest.raises(PolicyError, match="on_gradients must be callable, got int"):
        TrainStep(model, loss_times, sgd(model), on_gradients=3)  # type: ignore[arg-type]


def test_complex_gradients_that_are_not_finite_skip() -> None:
    class Phases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.view_as_real(x * self.weight)

    for clip in (1.0, None):
        model = converted("O1,dtype=bf16", Phases)
        step = TrainStep(model, loss_times, sgd(model), max_grad_norm=clip)
        assert step(X[0]).stepped
        before = state(model)
        assert not step(X[0], math.nan).stepped
        assert equal(before, state(model))


# ------------------------------------------------------------------------------------- resuming under other settings


def test_a_window_that_goes_on_from_a_state_has_the_mean_of_all_its_losses() -> None:
    found = []
    for resumed in (False, True):
        model = converted(BF16)
        step = TrainStep(model, loss_times, sgd(model), accumulate_steps=4)
        step(X[0], weight=2.0)
        step(X[1] * 3, weight=1.0)
        if resumed:
            saved = step.state_dict()
            step = TrainStep(model, loss_times, sgd(model), accumulate_steps=4)
            step.load_state_dict(saved)
        step(X[2], weight=1.0)
        found.append(step(X[3], weight=4.0).mean_loss)
    assert torch.equal(*found)


def test_a_state_of_other_settings_says_what_differs_and_needs_a_word() -> None:
    def step_of(policy: str = BF16, **settings: Any) -> TrainStep:
        model = converted(policy)
        return TrainStep(model, loss_times, sgd(model), **settings)

    saved = step_of(max_grad_norm=1.0, accumulate_steps=2).state_dict()
    for settings, name in (
        ({"max_grad_norm": 2.0, "accumulate_steps": 2}, "max_grad_norm"),
        ({"max_grad_norm": 1.0, "accumulate_steps": 4}, "accumulate_steps"),
        ({"max_grad_norm": 1.0, "accumulate_steps": 2, "policy": "O1,dtype=bf16"}, "policy"),
    ):
        other = step_of(**settings)
        with pytest.raises(PolicyError, match=rf"saved with {name} .*pass allow=\['{name}'\]"):
            other.load_state_dict(saved)
        other.load_state_dict(saved, allow=[name])
        for x in X:
            other(x)
    with pytest.raises(
        PolicyError, match="allow takes 'policy', 'max_grad_norm', 'accumulate_steps', got 'optimizers'"
    ):
        step_of().load_state_dict(saved, allow=["optimizers"])


def test_the_generators_of_python_and_numpy_are_in_the_state() -> None:
    import random

    numpy = pytest.importorskip("numpy")
    model = converted(BF16)
    step = TrainStep(model, loss_times, sgd(model))
    saved = copy.deepcopy(step.state_dict())
    drawn = random.random(), numpy.random.rand(), torch.rand(1)
    random.random(), numpy.random.rand()
    step.load_state_dict(saved)
    assert (random.random(), numpy.random.rand(), torch.rand(1)) == drawn


def test_a_scheduler_made_for_epochs_and_a_model_that_is_hardly_trained_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = converted(BF16)
    optimizer = SGD(model.second.parameters(), lr=0.1)
    TrainStep(model, loss_times, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 30))
    assert "no optimizer of this TrainStep trains 80 % of the trainable weights" in caplog.text
    assert "StepLR steps after each window, and 30 windows are few" in caplog.text
