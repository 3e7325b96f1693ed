"""TrainStep defines what a loop written by hand leaves open: what a step does, gives, and refuses."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

import fxamp
from fxamp.errors import NotAModuleError, ScaleCollapseError
from fxamp.train.result import StepResult
from fxamp.train.scaler import LossScaler
from fxamp.train.step import TrainStep
from passes.contract.errors import PolicyError
from tests.support.small import loss_of as loss_times
from tests.support.small import weights_of as weights

# ------------------------------------------------------------------------------------- one step


def make_step(**settings: Any) -> tuple[nn.Linear, TrainStep]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    settings.setdefault("scaler", LossScaler(init_scale=8.0))
    return model, TrainStep(model, loss_times, SGD(model.parameters(), lr=0.5), **settings)


X = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.5, 0.25, 2.0, 1.0]])


def test_result_says_what_happened() -> None:
    model, step = make_step(accumulate_steps=2, max_grad_norm=1.0)
    expected = loss_times(model(X)).detach()
    expected_norm = torch.stack(
        [g.norm() for g in torch.autograd.grad(loss_times(model(X)), list(model.parameters()))]
    ).norm()
    first, second = step(X), step(X)
    assert torch.equal(first.loss, expected)
    assert torch.equal(second.loss, expected)
    assert not second.loss.requires_grad
    assert (first.reason, first.stepped, first.skipped, first.grad_norm) == ("accumulating", False, False, None)
    assert (second.reason, second.stepped, second.skipped) == ("stepped", True, False)
    assert first.scale == second.scale == 8.0
    assert second.grad_norm is not None
    torch.testing.assert_close(second.grad_norm, expected_norm)
    with pytest.raises(AttributeError):
        second.scale = 1.0


def test_one_bad_micro_batch_skips_its_window_and_leaves_nothing_behind() -> None:
    model, step = make_step(accumulate_steps=4)
    before = weights(model)
    results = [step(X, factor) for factor in (1.0, 1.0, math.inf, 1.0)]
    assert [r.reason for r in results] == ["accumulating"] * 3 + ["overflow"]
    assert results[-1].skipped
    assert all(map(torch.equal, before, weights(model)))
    assert all(p.grad is None for p in model.parameters())
    assert step.scaler.get_scale() == 4.0


def test_scheduler_waits_for_the_first_step_and_nobody_warns() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    step = TrainStep(model, loss_times, optimizer, scaler=8.0, scheduler=scheduler)
    step(X, math.inf)  # a warning would be an error here
    assert scheduler.last_epoch == 0
    step(X)
    assert scheduler.last_epoch == 1


def test_without_loss_scaling_a_norm_that_is_not_finite_skips_too() -> None:
    model, step = make_step(scaler=None, max_grad_norm=1.0)
    before = weights(model)
    result = step(X, math.nan)
    assert (result.stepped, result.skipped, result.reason, result.scale) == (False, True, "overflow", 1.0)
    assert all(map(torch.equal, before, weights(model)))


def test_an_infinite_norm_of_finite_gradients_is_no_overflow() -> None:
    # As in a loop by hand: clipping to an infinite norm makes finite gradients 0, and the step is taken.
    for scaler in (None, 1.0):
        model, step = make_step(scaler=scaler, max_grad_norm=1.0)
        before = weights(model)
        result = step(X, 1e30)
        assert result.grad_norm is not None
        assert result.grad_norm.isinf()
        assert (result.stepped, result.reason) == (True, "stepped")
        assert all(map(torch.equal, before, weights(model)))


@pytest.mark.usefixtures("eager_and_traced")
def test_an_infinite_max_grad_norm_measures_and_clips_nothing() -> None:
    (a, plain), (b, measured) = make_step(), make_step(max_grad_norm=math.inf)
    plain(X)
    norm = measured(X).grad_norm
    assert norm is not None
    assert norm.isfinite()
    measured(X, 1e30)  # whose norm is infinite
    plain(X, 1e30)
    assert all(map(torch.equal, weights(a), weights(b)))


@pytest.mark.parametrize("scaler", [None, 8.0, "dynamic"])
def test_no_gradients_at_all_is_an_outcome(scaler: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    model.register_parameter("idle", nn.Parameter(torch.ones(1)))
    step = TrainStep(
        model,
        loss_times,
        SGD([model.get_parameter("idle")], lr=0.5),
        scaler=LossScaler() if scaler == "dynamic" else scaler,
    )
    result = step(X)
    assert (result.stepped, result.skipped, result.reason) == (False, False, "no_gradients")
    assert result.loss.isfinite()


def test_a_frozen_model_is_no_gradients_too() -> None:
    model, step = make_step()
    model.requires_grad_(False)
    assert step(X).reason == "no_gradients"
    model.requires_grad_(True)
    assert step(X).stepped


def test_a_scale_for_one_step_leaves_the_scaler_as_it_was() -> None:
    _, step = make_step(scaler=LossScaler(init_scale=8.0, growth_interval=2, max_skips=2))
    step(X)
    before = step.scaler.state_dict()
    for factor in (1.0, math.inf, math.nan):
        assert step(X, factor, scale=128.0).scale == 128.0
    assert step.scaler.state_dict() == before
    assert step(X).scale == 8.0
    assert step.scaler.get_scale() == 16.0


@pytest.mark.usefixtures("eager_and_traced")
def test_a_scale_for_one_step_scales_and_unscales() -> None:
    (a, plain), (b, scaled) = make_step(scaler=None), make_step(scaler=None)
    seen: list[Tensor] = []
    a.weight.register_hook(seen.append)
    b.weight.register_hook(seen.append)
    plain(X)
    assert scaled(X, scale=128.0).stepped
    assert torch.equal(seen[1], seen[0] * 128.0)
    assert all(map(torch.equal, weights(a), weights(b)))


def test_a_window_has_one_scale() -> None:
    _, step = make_step(accumulate_steps=2)
    step(X, scale=4.0)
    with pytest.raises(PolicyError, match=r"scale=2.0 within a window that began with 4.0"):
        step(X, scale=2.0)
    assert step(X).scale == 4.0  # left out: that of the window
    step(X)
    with pytest.raises(PolicyError, match="the scale of the scaler"):
        step(X, scale=2.0)


@pytest.mark.usefixtures("eager_and_traced")
def test_flush_takes_the_mean_over_what_was_seen() -> None:
    (a, whole), (b, partial) = make_step(accumulate_steps=2), make_step(accumulate_steps=8)
    for step in (whole, partial):
        step(X)
        step(2 * X)
    result = partial.flush()
    assert (result.reason, result.stepped) == ("stepped", True)
    assert all(map(torch.equal, weights(a), weights(b)))  # 8 / 2 is exact
    empty = partial.flush()
    assert (empty.reason, empty.stepped, empty.loss.isnan().item()) == ("no_gradients", False, True)
    assert all(map(torch.equal, weights(a), weights(b)))


@pytest.mark.usefixtures("eager_and_traced")
def test_a_call_that_raises_abandons_its_window_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    (a, step), (b, fresh) = make_step(accumulate_steps=2), make_step(accumulate_steps=2)
    step(X, scale=2.0)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|same reduction dim"):
        step(torch.ones(2, 5))
    assert "left a window after 1 of 2 micro-batches, whose gradients are gone" in caplog.text
    assert all(p.grad is None for p in a.parameters())
    for one in (step, fresh):
        assert one(X).scale == 8.0
        assert one(X).stepped
    assert all(map(torch.equal, weights(a), weights(b)))


def test_collapse_names_the_models_parameters_and_training_can_go_on() -> None:
    model, step = make_step(scaler=LossScaler(init_scale=4.0, min_scale=1.0, max_skips=3))
    step(X, math.nan)
    step(X, math.nan)
    with pytest.raises(ScaleCollapseError, match=r"3 steps in a row.*weight \(NaN\), bias \(NaN\)"):
        step(X, math.nan)
    assert all(p.grad is None for p in model.parameters())
    assert step(X).stepped


def test_mode_and_model_stay_as_they_are() -> None:
    model, step = make_step()
    for mode in (True, False):
        model.train(mode)
        step(X)
        assert model.training is mode
    assert step.model is model


# ------------------------------------------------------------------------------------- inputs, outputs, state


class Flexible(nn.Module):
    """Takes two inputs and returns its loss in the way it was told to."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.kind = kind

    def forward(self, x: Tensor, scale: float = 1.0, labels: Tensor | None = None) -> Any:
        loss = self.linear(x).mean() * scale
        return {"attribute": SimpleNamespace(loss=loss), "key": {"loss": loss}, "none": {"logits": x}}[self.kind]


@pytest.mark.parametrize("kind", ["attribute", "key"])
@pytest.mark.parametrize("inputs", [X, (X,), (X, 1.0), {"x": X}, {"x": X, "labels": X}])
def test_inputs_and_losses_of_every_kind(inputs: Any, kind: str) -> None:
    model = Flexible(kind)
    assert TrainStep(model, None, SGD(model.parameters(), lr=0.1))(inputs).stepped


def test_packed_sequence_is_one_input() -> None:
    model = nn.GRU(4, 3, batch_first=True)
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 5, 4), torch.tensor([5, 3]), batch_first=True)
    step = TrainStep(model, lambda output: output[0].data.mean(), SGD(model.parameters(), lr=0.1))
    assert step(packed).stepped


# ------------------------------------------------------------------------------------- which scaler


def with_plan(dtype: torch.dtype | None, level: str = "O1") -> nn.Module:
    view: nn.Module = fxamp.convert(nn.Linear(4, 1), policy=fxamp.Policy(level, dtype=dtype))
    return view


def auto_scaler(model: nn.Module) -> LossScaler:
    return TrainStep(model, loss_times, SGD(model.parameters(), lr=0.1)).scaler


def test_auto_scales_fp16_with_guards() -> None:
    for model in (with_plan(torch.float16), nn.Sequential(with_plan(torch.float16))):
        extensions = auto_scaler(model).state_dict()["fxamp"]
        assert (extensions["min_scale"], extensions["max_scale"], extensions["max_skips"]) == (1.0, 2.0**24, None)


@pytest.mark.parametrize(("dtype", "scaled"), [("fp16", True), ("bf16", False)])
def test_auto_sees_a_compiled_model_inside_a_wrapper(dtype: str, scaled: bool) -> None:
    torch.manual_seed(0)
    compiled: Any = fxamp.compile(nn.Linear(4, 1), policy=f"O1,dtype={dtype}", backend="eager")
    model = nn.Sequential(nn.Identity(), compiled)
    step = TrainStep(model, loss_times, SGD(model.parameters(), lr=0.1))
    assert step(X * 0.01).stepped
    assert step.scaler.is_enabled() is scaled
    assert step.scaler.get_scale() == (2.0**16 if scaled else 1.0)


def test_a_disabled_scaler_anywhere_does_not_disturb_fp16_training() -> None:
    disabled = GradScaler("cpu", enabled=False)
    model = fxamp.convert(nn.Linear(4, 1), (X,), policy="O1,dtype=fp16")
    step = TrainStep(model, loss_times, SGD(model.parameters(), lr=0.1), scaler=None)
    with pytest.warns(UserWarning, match="FP16"):
        assert step(X).stepped
    assert not disabled.is_enabled()


@pytest.mark.parametrize(
    "model", [nn.Linear(4, 1), with_plan(torch.bfloat16), with_plan(None), with_plan(torch.float16, "O0")]
)
def test_auto_scales_nothing_else(model: nn.Module) -> None:
    assert not auto_scaler(model).is_enabled()


def test_a_number_is_a_static_scale() -> None:
    _, step = make_step(scaler=16)
    assert [step(X, factor).scale for factor in (1.0, math.inf, 1.0)] == [16.0] * 3


def test_fp16_without_loss_scaling_warns_once() -> None:
    model = with_plan(torch.float16)
    step = TrainStep(model, loss_times, SGD(model.parameters(), lr=0.1), scaler=None)
    step(X, scale=128.0)  # scaled: no warning
    with pytest.warns(UserWarning, match="FP16 without loss scaling") as caught:
        step(X)
    assert caught[0].filename == __file__
    step(X)  # a second warning would be an error here


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accumulate_steps": 0}, "accumulate_steps must be an int from 1"),
        ({"accumulate_steps": 2.0}, "accumulate_steps must be an int from 1"),
        ({"accumulate_steps": True}, "accumulate_steps must be an int from 1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a number greater than 0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be a number greater than 0"),
        ({"max_grad_norm": math.nan}, "max_grad_norm must be a number greater than 0"),
        ({"scaler": "dynamic"}, 'a LossScaler, a number, None or "auto"'),
        ({"scaler": math.nan}, "scaler must be a number"),
        ({"scaler": -1.0}, "scaler must be a number"),
        ({"scaler": True}, "scaler must be a number"),
        ({"scaler": GradScaler("cpu")}, "must be a fxamp.LossScaler"),
        ({"loss_fn": "mse"}, "loss_fn must be callable"),
        ({"optimizer": []}, "empty list"),
        ({"optimizer": "adam"}, "optimizer must be a torch Optimizer or a list of them, got str"),
        ({"scheduler": "cosine"}, "scheduler must be a torch LRScheduler or a list of them, got str"),
        ({"scheduler": StepLR(SGD([torch.ones(1)], lr=0.1), 1)}, "StepLR belongs to none of the optimizers"),
        ({"ema": object()}, "ema must be a torch AveragedModel or a list of them, got object"),
        ({"weights": "shadow"}, "weights must be one of 'auto', 'per_step', 'per_use', got 'shadow'"),
        ({"reduce": "step"}, 'reduce must be "micro_batch" or "window", got .step.'),
        ({"compile": 1}, "compile must be False, True, the name of a torch.compile backend or a mapping"),
        ({"compile": "inductr"}, "there is no torch.compile backend 'inductr'; the nearest name is 'inductor'"),
        ({"compile": {"mod": "default"}}, "compile has no option 'mod'; the nearest name is 'mode'"),
        ({"compile": {"options": {"freezin": True}}}, "Unexpected optimization option freezin"),
    ],
)
def test_bad_arguments_are_named(settings: dict[str, Any], message: str) -> None:
    model = nn.Linear(4, 1)
    arguments = {"model": model, "loss_fn": None, "optimizer": SGD(model.parameters(), lr=0.1), **settings}
    with pytest.raises(PolicyError, match=message):
        TrainStep(**arguments)


def test_something_other_than_a_module_is_refused() -> None:
    with pytest.raises(NotAModuleError, match="function"):
        TrainStep(lambda x: x, None, SGD([torch.ones(1)], lr=0.1))  # type: ignore[arg-type]


def test_reduce_on_plateau_is_refused_with_the_way_out() -> None:
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(PolicyError, match=r"call scheduler.step\(metric\) yourself"):
        TrainStep(model, None, optimizer, scheduler=ReduceLROnPlateau(optimizer))


def test_trainable_low_parameters_are_named_up_to_three() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half(), nn.Linear(4, 1).bfloat16())
    with pytest.raises(
        PolicyError, match=r"'1.weight' \(float16\), '1.bias' \(float16\), '2.weight' \(bfloat16\) and 1 more\. Up"
    ):
        TrainStep(model, None, SGD(model.parameters(), lr=0.1))
    model.requires_grad_(False)
    TrainStep(model, None, SGD(model.parameters(), lr=0.1))


def test_low_parameters_outside_the_model_are_found() -> None:
    outside = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(PolicyError, match=r"parameter 0 of optimizer 0 \(shape \(3,\)\)"):
        TrainStep(nn.Linear(4, 1), None, SGD([outside], lr=0.1))


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"none of the trainable parameters of Linear.*from model\.parameters\(\)"):
        TrainStep(nn.Linear(4, 1), None, SGD(nn.Linear(4, 1).parameters(), lr=0.1))
    frozen, head = nn.Linear(4, 1).requires_grad_(False), nn.Linear(1, 1)
    TrainStep(frozen, None, SGD(head.parameters(), lr=0.1))  # what is trained is in the loss


def test_a_parameter_in_two_optimizers_is_refused() -> None:
    model = nn.Linear(4, 1)
    with pytest.raises(PolicyError, match="weight is in two optimizers"):
        TrainStep(model, None, [SGD(model.parameters(), lr=0.1), SGD([model.weight], lr=0.1)])


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, True, "8"])
def test_a_bad_scale_for_one_step_is_refused(scale: Any) -> None:
    _, step = make_step()
    with pytest.raises(PolicyError, match="scale must be a number"):
        step(X, scale=scale)


@pytest.mark.parametrize("inputs", [[X], 3.0, None])
def test_inputs_of_other_kinds_are_refused_with_the_way_out(inputs: Any) -> None:
    _, step = make_step()
    with pytest.raises(PolicyError, match=r"tuple\(inputs\) for several inputs, \(inputs,\)"):
        step(inputs)


def test_bad_losses_are_refused() -> None:
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(PolicyError, match=r"tensor of one element, not one of shape \(2, 1\)"):
        TrainStep(model, lambda output: output, optimizer)(X)
    with pytest.raises(PolicyError, match="tensor of one element, not float"):
        TrainStep(model, lambda output: output.sum().item(), optimizer)(X)
    with pytest.raises(PolicyError, match="does not depend on any trainable parameter"):
        TrainStep(model, lambda output: output.sum().detach(), optimizer)(X)
    with pytest.raises(PolicyError, match="has no loss"):
        TrainStep(model, None, optimizer)(X)
    with pytest.raises(
        PolicyError, match=r"a target was given, the third argument, without loss= \(loss_fn of a TrainStep\)"
    ):
        TrainStep(model, None, optimizer)(X, X)
    flexible = Flexible("none")
    with pytest.raises(PolicyError, match=r"the output \(dict\) has no loss"):
        TrainStep(flexible, None, SGD(flexible.parameters(), lr=0.1))(X)


def test_results_cannot_be_changed() -> None:
    _, step = make_step()
    result = step(X)
    assert isinstance(result, StepResult)
    for name in ("loss", "stepped", "skipped", "scale", "grad_norm", "kept", "reason"):
        with pytest.raises(AttributeError):
            setattr(result, name, getattr(result, name))


def replace_layer(model: nn.Module) -> None:
    model.add_module("1", nn.Linear(4, 1))


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def load_by_assigning(model: nn.Module) -> None:
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("compile", [False, "aot_eager"])
@pytest.mark.parametrize(("change", "first"), [(replace_layer, "1.weight"), (load_by_assigning, "0.weight")])
def test_parameters_that_no_optimizer_has_are_named_once(
    change: Any, first: str, compile: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    view = fxamp.convert(model, policy="O1,dtype=bf16")
    step = TrainStep(view, loss_times, SGD(model.parameters(), 0.1), compile=compile)
    step(X)
    assert not warned(caplog)
    change(model)
    for _ in range(3):
        step(X)
    (text,) = warned(caplog)
    assert f"no optimizer of this TrainStep has '{first}' and" in text


def test_a_step_that_can_train_nothing_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model, step = make_step()
    model.requires_grad_(False)
    for _ in range(3):
        assert step(X).reason == "no_gradients"
    _, text = warned(caplog)  # the first says that it is not converted
    assert "no parameter of the optimizers requires a gradient, the first is 'weight'" in text


def test_parameters_that_are_left_out_from_the_start_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[1].requires_grad_(False)
    step = TrainStep(fxamp.convert(model, policy="O1,dtype=bf16"), loss_times, SGD(model[0].parameters(), 0.1))
    step(X)
    model[1].requires_grad_(True)  # as of a discriminator that another step trains
    nn.Linear(1, 1)  # registers parameters elsewhere
    step(X)
    step(X)
    assert not warned(caplog)


def test_a_state_that_cannot_be_saved_is_named_by_its_file(tmp_path: Path) -> None:
    place = tmp_path / "none" / "x.pt"
    with pytest.raises(FileNotFoundError) as missing:
        make_step()[1].save(place)
    assert str(missing.value) == f"[Errno 2] No such file or directory: '{place}'"
