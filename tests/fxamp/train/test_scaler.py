"""LossScaler is GradScaler bit for bit with its extensions off, and each extension does what it says."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from fxamp.errors import ScaleCollapseError
from fxamp.train.scaler import LossScaler, is_held_back
from passes.contract.errors import FxampError, PolicyError
from tests.support.helpers import saved
from tests.support.training import Reads

OK, INF, NAN = 1.0, math.inf, math.nan


def make_problem(seed: int = 0, **kwargs: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    return model, torch.optim.Adam(model.parameters(), lr=0.1, **kwargs)


def run_step(scaler: GradScaler, model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = OK) -> float:
    """Run one step with gradients multiplied by `factor`, and give the scale after it."""
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean() * factor
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def random_factors(steps: int, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    choice = torch.randint(0, 8, (steps,), generator=generator).tolist()
    return [{0: INF, 1: NAN}.get(c, OK) for c in choice]


def run_trajectory(scaler: GradScaler, factors: list[float], **kwargs: Any) -> list[tuple[float, torch.Tensor]]:
    model, optimizer = make_problem(**kwargs)
    return [(run_step(scaler, model, optimizer, f), model.weight.detach().clone()) for f in factors]


def assert_same_trajectory(a: list[tuple[float, torch.Tensor]], b: list[tuple[float, torch.Tensor]]) -> None:
    assert [scale for scale, _ in a] == [scale for scale, _ in b]
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------- as GradScaler


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("settings", [{}, {"init_scale": 3.0, "growth_factor": 1.7, "backoff_factor": 0.3}])
def test_with_extensions_off_it_is_gradscaler_bit_for_bit(settings: dict[str, Any], fused: bool) -> None:
    factors = random_factors(50)
    ours = run_trajectory(LossScaler("cpu", growth_interval=3, **settings), factors, fused=fused)
    theirs = run_trajectory(GradScaler("cpu", growth_interval=3, **settings), factors, fused=fused)
    assert_same_trajectory(ours, theirs)
    assert len({scale for scale, _ in ours}) > 3


@pytest.mark.parametrize("fused", [False, True])
def test_with_extensions_off_it_reads_the_device_as_often_as_gradscaler(fused: bool) -> None:
    counts = []
    for scaler in (LossScaler("cpu"), GradScaler("cpu")):
        model, optimizer = make_problem(fused=fused)
        with Reads() as syncs:
            for factor in (OK, INF, OK):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(2, 4)).mean() * factor).backward()
                scaler.step(optimizer)
                scaler.update()
        counts.append(syncs.count)
    assert counts[0] == counts[1]


def test_max_skips_costs_an_ordinary_optimizer_no_further_read_of_the_device() -> None:
    scaler = LossScaler("cpu", max_skips=5, hysteresis=2, min_scale=1.0)
    model, _ = make_problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Reads() as syncs:
        scaler.scale(model(torch.ones(2, 4)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert syncs.count == 1


def _unscale_twice(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def _unscale_after_step(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def _step_twice(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)
    scaler.step(optimizer)


def _step_without_gradients(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    scaler.step(optimizer)


def _pickle_within_a_step(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    pickle.dumps(scaler)


MISUSES: list[Callable[[GradScaler, torch.optim.Optimizer], object]] = [
    _unscale_twice,
    _unscale_after_step,
    _step_twice,
    _step_without_gradients,
    _pickle_within_a_step,
    lambda scaler, optimizer: scaler.update(),
    lambda scaler, optimizer: scaler.update(torch.ones(2)),
    lambda scaler, optimizer: scaler.step(optimizer, closure=lambda: 0.0),
    lambda scaler, optimizer: scaler.load_state_dict({}),
    lambda scaler, optimizer: scaler.load_state_dict({"scale": 2.0}),
    lambda scaler, optimizer: scaler.scale([torch.ones(()), 1.0]),  # type: ignore[list-item]
]


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_raises_what_gradscaler_raises(misuse: Callable[[GradScaler, torch.optim.Optimizer], object]) -> None:
    raised = []
    for scaler in (LossScaler(), GradScaler("cpu")):
        model, optimizer = make_problem()
        scaler.scale(model(torch.ones(2, 4)).mean()).backward()
        with pytest.raises(Exception) as info:  # noqa: PT011 - which one is what is compared
            misuse(scaler, optimizer)
        raised.append((info.type, str(info.value)))
    assert raised[0] == raised[1]


def test_step_and_update_before_any_loss_raise_what_gradscaler_raises() -> None:
    _, optimizer = make_problem()
    uses: list[Callable[[GradScaler], object]] = [
        lambda scaler: scaler.update(),
        lambda scaler: scaler.unscale_(optimizer),
        lambda scaler: scaler.step(optimizer),
    ]
    for use in uses:
        with pytest.raises(AssertionError) as theirs:
            use(GradScaler("cpu"))
        with pytest.raises(AssertionError) as ours:
            use(LossScaler())
        assert str(ours.value) == str(theirs.value)


def test_device_none_becomes_that_of_the_first_loss() -> None:
    scaler = LossScaler(init_scale=8.0)
    model, optimizer = make_problem()
    assert scaler.is_enabled()
    run_step(scaler, model, optimizer)
    scaler.scale(torch.ones(()))
    scaler.update(torch.tensor(4.0))  # GradScaler compares devices here
    assert scaler.get_scale() == 4.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_device_cuda_without_cuda_disables_itself_as_gradscaler_does() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = LossScaler("cuda")
    assert not scaler.is_enabled()
    assert_same_trajectory(run_trajectory(scaler, [OK] * 3), run_trajectory(GradScaler("cpu", enabled=False), [OK] * 3))


def test_disabled_it_behaves_as_the_disabled_gradscaler() -> None:
    scaler = LossScaler(enabled=False, max_skips=1)
    model, optimizer = make_problem()
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    assert run_step(scaler, model, optimizer) == 1.0
    assert run_step(scaler, model, optimizer, NAN) == 1.0
    assert model.weight.isnan().all()
    assert scaler.state_dict() == {}
    assert scaler.history == ()
    assert not is_held_back(scaler, optimizer)
    scaler.load_state_dict({"scale": 2.0})
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()


def test_positional_arguments_are_gradscalers() -> None:
    ours, theirs = LossScaler("cpu", 8.0, 3.0, 0.25, 7, True), GradScaler("cpu", 8.0, 3.0, 0.25, 7, True)
    state = ours.state_dict()
    del state["fxamp"]
    assert state == theirs.state_dict()


# ------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("to_ours", [True, False])
def test_state_moves_between_gradscaler_and_lossscaler_in_mid_run(to_ours: bool) -> None:
    factors = random_factors(40, seed=1)
    reference = run_trajectory(GradScaler("cpu", growth_interval=3), factors)
    model, optimizer = make_problem()
    first: GradScaler = GradScaler("cpu", growth_interval=3) if to_ours else LossScaler(growth_interval=3)
    second: GradScaler = LossScaler() if to_ours else GradScaler("cpu")
    got = [(run_step(first, model, optimizer, f), model.weight.detach().clone()) for f in factors[:20]]
    second.load_state_dict(first.state_dict())
    got += [(run_step(second, model, optimizer, f), model.weight.detach().clone()) for f in factors[20:]]
    assert_same_trajectory(got, reference)


def test_state_keeps_extensions_and_their_counts() -> None:
    scaler = LossScaler(init_scale=16.0, min_scale=2.0, max_scale=64.0, hysteresis=3, max_skips=9)
    model, optimizer = make_problem()
    run_step(scaler, model, optimizer, INF)
    run_step(scaler, model, optimizer, INF)
    other = LossScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert run_step(other, model, optimizer, INF) == 8.0  # the third overflow in a row


def test_state_survives_torch_save_with_weights_only() -> None:
    scaler = LossScaler(max_skips=3)
    assert saved(scaler.state_dict(), weights_only=True) == scaler.state_dict()


def test_loading_brings_the_scale_within_the_bounds() -> None:
    collapsed = GradScaler("cpu", init_scale=1e-6).state_dict()
    fresh, used = LossScaler(min_scale=1.0), LossScaler(min_scale=1.0)
    run_step(used, *make_problem())
    for scaler in (fresh, used):
        scaler.load_state_dict(collapsed)
        assert scaler.get_scale() == 1.0


def test_loading_bad_extensions_changes_nothing() -> None:
    scaler = LossScaler()
    before = scaler.state_dict()
    bad = LossScaler(init_scale=2.0).state_dict()
    bad["fxamp"]["hysteresis"] = 0
    with pytest.raises(PolicyError, match="hysteresis"):
        scaler.load_state_dict(bad)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_goes_on_where_the_original_was(copy_of: Callable[[LossScaler], LossScaler]) -> None:
    scaler = LossScaler(init_scale=16.0, hysteresis=2, growth_interval=3)
    model, optimizer = make_problem()
    for factor in (OK, OK, INF):
        run_step(scaler, model, optimizer, factor)
    twin = copy_of(scaler)
    assert twin.state_dict() == scaler.state_dict()
    assert twin.history == scaler.history
    assert run_step(twin, model, optimizer, INF) == 8.0
    assert scaler.get_scale() == 16.0


# ------------------------------------------------------------------------------------- extensions


def test_static_scale_stays_and_overflows_are_still_skipped() -> None:
    scaler = LossScaler(init_scale=128.0, growth_interval=1, dynamic=False)
    model, optimizer = make_problem()
    assert [run_step(scaler, model, optimizer, f) for f in (OK, OK, INF, NAN, OK)] == [128.0] * 5
    before = model.weight.detach().clone()
    run_step(scaler, model, optimizer, INF)
    assert torch.equal(model.weight, before)
    scaler.scale(torch.ones(()))
    scaler.update(64.0)
    assert scaler.get_scale() == 64.0


def test_scale_never_falls_below_the_floor() -> None:
    scaler = LossScaler(init_scale=5.0, min_scale=1.0)
    model, optimizer = make_problem()
    assert [run_step(scaler, model, optimizer, NAN) for _ in range(40)] == [2.5, 1.25] + [1.0] * 38


def test_scale_never_rises_above_the_ceiling() -> None:
    scaler = LossScaler(init_scale=2.0**16, max_scale=2.0**24, growth_interval=1)
    model, optimizer = make_problem()
    scales = [run_step(scaler, model, optimizer, 1e-30) for _ in range(300)]
    assert max(scales) == scales[-1] == 2.0**24
    assert model.weight.isfinite().all()


def test_a_new_scale_is_brought_within_the_bounds() -> None:
    scaler = LossScaler(min_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.update(0.5)
    assert scaler.get_scale() == 1.0


def test_hysteresis_backs_off_from_the_kth_overflow_in_a_row_on() -> None:
    scaler = LossScaler(init_scale=64.0, hysteresis=3, growth_interval=2)
    model, optimizer = make_problem()
    overflows = [INF, INF, INF, INF, OK, INF, INF, OK, OK]
    scales = [run_step(scaler, model, optimizer, f) for f in overflows]
    assert scales == [64, 64, 32, 16, 16, 16, 16, 16, 32]


def test_hysteresis_restarts_growth_at_every_overflow() -> None:
    scaler = LossScaler(init_scale=64.0, hysteresis=2, growth_interval=2)
    model, optimizer = make_problem()
    assert [run_step(scaler, model, optimizer, f) for f in (OK, INF, OK, OK)] == [64, 64, 64, 128]


@pytest.mark.parametrize("fused", [False, True])
def test_max_skips_raises_at_the_kth_skip_in_a_row_only(fused: bool) -> None:
    scaler = LossScaler(init_scale=8.0, min_scale=1.0, max_skips=3)
    model, optimizer = make_problem(fused=fused)
    for factor in (INF, INF, OK, INF, INF):
        run_step(scaler, model, optimizer, factor)
    with pytest.raises(ScaleCollapseError, match="3 steps in a row"):
        run_step(scaler, model, optimizer, INF)
    run_step(scaler, model, optimizer)  # and the scaler goes on
    assert [event.skipped for event in scaler.history] == [True, True, False, True, True, True, False]


def test_collapse_names_the_first_bad_parameters_and_says_nan() -> None:
    scaler = LossScaler(max_skips=1)
    model, optimizer = make_problem()
    scaler.name_parameters(model.named_parameters())
    with pytest.raises(ScaleCollapseError, match=r"First bad parameters: weight \(NaN\), bias \(NaN\)\. A NaN"):
        run_step(scaler, model, optimizer, NAN)


def test_collapse_says_inf_where_gradients_are_infinite() -> None:
    scaler = LossScaler(max_skips=1)
    param = nn.Parameter(torch.ones(2))
    scaler.scale((param * torch.tensor([INF, 1.0])).sum()).backward()
    optimizer = torch.optim.SGD([("p", param)], lr=0.1)
    scaler.step(optimizer)
    with pytest.raises(ScaleCollapseError, match=r"First bad parameters: p \(inf\)\. An inf"):
        scaler.update()


def test_collapse_names_unnamed_parameters_by_place_and_shape_and_counts_the_rest() -> None:
    scaler = LossScaler(max_skips=1)
    params = [nn.Parameter(torch.ones(size)) for size in (2, 3, 4, 5, 6)]
    optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1)
    scaler.scale(torch.stack([(p * (NAN if i else OK)).sum() for i, p in enumerate(params)]).sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(ScaleCollapseError, match=r"parameter 0 of group 1 \(shape \(3,\)\) \(NaN\).* and 1 more"):
        scaler.update()


def test_collapse_looks_into_sparse_gradients() -> None:
    scaler = LossScaler(max_skips=1)
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.named_parameters(), lr=0.1)
    scaler.scale(table(torch.tensor([1, 1, 2])).sum() * NAN).backward()
    scaler.step(optimizer)
    with pytest.raises(ScaleCollapseError, match=r"weight \(NaN\)"):
        scaler.update()


def test_collapse_after_gradients_are_gone_says_so() -> None:
    scaler = LossScaler(max_skips=1)
    model, optimizer = make_problem()
    scaler.scale(model(torch.ones(1, 4)).sum() * NAN).backward()
    scaler.step(optimizer)
    optimizer.zero_grad()
    with pytest.raises(ScaleCollapseError, match="gone already"):
        scaler.update()


def test_history_lists_scales_and_skips() -> None:
    scaler = LossScaler(init_scale=8.0)
    model, optimizer = make_problem()
    for factor in (OK, INF, NAN):
        run_step(scaler, model, optimizer, factor)
    assert scaler.history == (
        (1, 8.0, False, ""),
        (2, 8.0, True, "parameter 0 of group 0 (shape (3, 4)) (inf)"),
        (3, 4.0, True, "parameter 0 of group 0 (shape (3, 4)) (NaN)"),
    )
    for _ in range(200):
        run_step(scaler, model, optimizer)
    assert len(scaler.history) == 128
    assert scaler.history[-1].update == 203


def test_history_names_the_first_bad_parameter_and_does_not_read_it_before_it_is_asked() -> None:
    scaler = LossScaler("cpu")
    model, optimizer = make_problem()
    scaler.name_parameters(model.named_parameters())
    with Reads() as syncs:
        run_step(scaler, model, optimizer, NAN)
    counted = syncs.count
    with Reads() as plain:
        run_step(GradScaler("cpu"), model, optimizer, NAN)
    assert counted == plain.count
    assert [event.culprit for event in scaler.history] == ["weight (NaN)"]


def test_max_skips_reads_the_device_of_a_fused_optimizer_once_in_as_many_updates() -> None:
    scaler = LossScaler("cpu", max_skips=4)
    model, optimizer = make_problem(fused=True)
    unread = []
    for factor in (OK, OK, OK, OK, INF, INF, INF):
        run_step(scaler, model, optimizer, factor)
        unread.append(scaler._in_a_row.at_most)
    assert unread == [1, 2, 3, 0, 1, 2, 3]
    with pytest.raises(ScaleCollapseError, match="4 steps in a row"):
        run_step(scaler, model, optimizer, INF)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_gradients_for_a_penalty_are_unscaled_and_can_be_differentiated(scale: float) -> None:
    scaler, weight = LossScaler("cpu", init_scale=scale), nn.Parameter(torch.tensor([1.0, 2.0]))
    x = torch.tensor([3.0, 5.0], requires_grad=True)
    (gradient,) = scaler.grad((weight * x).square().sum(), x, create_graph=True)
    assert torch.equal(gradient, 2 * weight.square() * x)
    scaler.scale(gradient.square().sum()).backward()
    scaler.unscale_(torch.optim.SGD([weight], lr=0.1))
    assert weight.grad is not None
    assert torch.equal(weight.grad, (16 * weight**3 * x**2).detach())
    assert torch.equal(LossScaler(enabled=False).grad(x.square().sum(), [x])[0], 2 * x)


def test_a_penalty_of_low_gradients_does_not_underflow() -> None:
    scaler, x = LossScaler("cpu", init_scale=1024.0), torch.ones(2, dtype=torch.float16, requires_grad=True)
    (gradient,) = scaler.grad(x.float().sum() * 1e-8, x)
    assert gradient.dtype == torch.float32
    assert bool((gradient > 0.9e-8).all())


def test_found_inf_tells_whether_a_step_was_skipped() -> None:
    scaler = LossScaler()
    (good, good_optimizer), (bad, bad_optimizer) = make_problem(), make_problem()
    x = torch.ones(2, 4)
    scaler.scale(good(x).mean() + bad(x).mean() * INF).backward()
    scaler.unscale_(bad_optimizer)
    assert is_held_back(scaler, bad_optimizer)
    assert not is_held_back(scaler, good_optimizer)  # nothing known yet
    scaler.step(good_optimizer)
    scaler.step(bad_optimizer)
    assert (bool(is_held_back(scaler, good_optimizer)), bool(is_held_back(scaler, bad_optimizer))) == (False, True)
    scaler.update()
    assert not is_held_back(scaler, bad_optimizer)


# ------------------------------------------------------------------------------------- bad input


def test_a_scale_that_gradscaler_takes_is_taken() -> None:
    ours, theirs = LossScaler("cpu", init_scale=1e38), GradScaler("cpu", init_scale=1e38)
    for scaler in (ours, theirs):
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler.scale(weight.sum() * 1e-3).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, torch.full((2,), 0.999))
    assert ours.get_scale() == theirs.get_scale()


def test_a_name_is_not_given_to_another_parameter_that_takes_the_place_of_the_first_in_memory() -> None:
    scaler = LossScaler("cpu")
    first = nn.Parameter(torch.ones(2))
    scaler.name_parameters([("first", first)])
    assert len(scaler._names) == 1
    del first
    assert len(scaler._names) == 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *[("init_scale", v) for v in (NAN, INF, -1.0, 0.0, 1e-40, 3.5e38, True, "2", None)],
        *[("growth_factor", v) for v in (NAN, INF, -2.0, 1.0, 0.5, True)],
        *[("backoff_factor", v) for v in (NAN, INF, -0.5, 0.0, 1.0, 2.0, False)],
        *[("growth_interval", v) for v in (NAN, INF, -1, 0, 2.5, True, 2**31)],
        *[("min_scale", v) for v in (NAN, INF, -1.0, 0.0, True)],
        *[("max_scale", v) for v in (NAN, INF, -1.0, 0.0, True)],
        *[("hysteresis", v) for v in (NAN, 0, -1, 1.5, True, None)],
        *[("max_skips", v) for v in (NAN, 0, -1, 1.5, True)],
        *[("dynamic", v) for v in (None, 1, "yes")],
        *[("device", v) for v in ("gpu", 1.5)],
    ],
)
def test_bad_settings_are_named_with_their_value(setting: str, value: Any) -> None:
    with pytest.raises(PolicyError) as info:
        LossScaler(**{setting: value})
    assert setting in str(info.value)
    assert repr(value) in str(info.value)
    assert isinstance(info.value, (FxampError, ValueError))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_scale": 4.0, "max_scale": 2.0}, "min_scale must be at most max_scale=2.0, got 4.0"),
        ({"init_scale": 1.0, "min_scale": 2.0}, "init_scale must lie between min_scale=2.0 and max_scale=None"),
        ({"init_scale": 8.0, "max_scale": 4.0}, "init_scale must lie between min_scale=None and max_scale=4.0"),
    ],
)
def test_contradictory_bounds_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        LossScaler(**settings)  # type: ignore[arg-type]


def test_setters_check_as_the_constructor_does() -> None:
    scaler = LossScaler()
    with pytest.raises(PolicyError, match="growth_factor"):
        scaler.set_growth_factor(NAN)
    with pytest.raises(PolicyError, match="backoff_factor"):
        scaler.set_backoff_factor(-1.0)
    with pytest.raises(PolicyError, match="growth_interval"):
        scaler.set_growth_interval(0)
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(7)
    settings = (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    assert settings == (3.0, 0.25, 7)


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float16, "FP16"), (torch.bfloat16, "BF16")])
def test_unscale_refuses_trainable_low_parameters(dtype: torch.dtype, kind: str) -> None:
    scaler = LossScaler()
    model = nn.Linear(4, 3).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(2, 4, dtype=dtype)).sum()).backward()
    name = str(dtype).removeprefix("torch.")
    message = rf"unscale {kind} gradients.*parameter 0 of group 0 \(shape \(3, 4\)\)' \({name}\)"
    with pytest.raises(PolicyError, match=message):
        scaler.step(optimizer)


def test_unscale_takes_frozen_low_parameters() -> None:
    scaler = LossScaler()
    base, adapter = nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*base.parameters(), *adapter.parameters()], lr=0.1)
    before = adapter.weight.detach().clone()
    scaler.scale(adapter(base(torch.ones(2, 4).half()).float()).sum()).backward()
    scaler.step(optimizer)
    assert not torch.equal(adapter.weight, before)
