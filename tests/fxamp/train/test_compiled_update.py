"""What comes after backward, compiled: the numbers of an eager update to rounding, and the same decisions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import fxamp
from fxamp.train.step import TrainStep

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of a module that Dynamo imports

GRAPHS: list[GraphModule] = []


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch.compiler.reset()
    GRAPHS.clear()


def makes_kernels(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Stand for a backend that generates code, of which nothing is known but that it is worth its while."""
    GRAPHS.append(copy.deepcopy(gm))
    return gm.forward


def traces(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Stand for one that traces forward and backward to kernels, as Inductor does."""
    made: Callable[..., Any] = torch._dynamo.lookup_backend("aot_eager")(gm, inputs)  # type: ignore[arg-type]
    return made


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_times(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    labels, factor = target
    return F.cross_entropy(output, labels) * factor


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)


def train(
    optimizers_of: Callable[[Any], Any], windows: int = 12, factors: dict[int, float] | None = None,
    scheduler: Callable[[Optimizer], Any] | None = None, **settings: Any,
) -> tuple[TrainStep, list[Any]]:  # fmt: skip
    model = net()
    optimizers = optimizers_of(model)
    several = optimizers if isinstance(optimizers, list) else [optimizers]
    schedulers = [scheduler(o) for o in several] if scheduler is not None else None
    step = TrainStep(model, loss_times, optimizers, scheduler=schedulers, **settings)
    shown = []
    for index in range(windows * step.accumulate_steps):
        x, y = batch(index)
        result = step(x, (y, torch.tensor((factors or {}).get(index, 1.0))))
        if result.reason != "accumulating":
            shown.append((result.stepped, result.skipped, result.scale, result.kept, several[0].param_groups[0]["lr"]))
    return step, shown


def assert_near(ours: TrainStep, theirs: TrainStep, tolerance: float = 2e-6) -> None:
    """Compare parameters: compiled, an optimizer computes its bias corrections in float32, and not in Python."""
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


COMPILED: dict[str, Any] = {"compile": {"backend": makes_kernels}}
TRACED: dict[str, Any] = {"compile": {"backend": traces}}
KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": lambda m: SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda m: Adam(m.parameters(), lr=0.01, amsgrad=True),
    "AdamW": lambda m: AdamW(m.parameters(), lr=0.01),
    "AdamW, foreach": lambda m: AdamW(m.parameters(), lr=0.01, foreach=True),
    "RMSprop": lambda m: RMSprop(m.parameters(), lr=0.01, momentum=0.1, centered=True),
    "Adagrad": lambda m: Adagrad(m.parameters(), lr=0.05),
    "NAdam": lambda m: NAdam(m.parameters(), lr=0.01),
    "two": lambda m: [
        AdamW(m.get_submodule("0").parameters(), lr=0.01),
        SGD(m.get_submodule("2").parameters(), lr=0.1, momentum=0.9),
    ],
}


@pytest.mark.parametrize(
    ("kind", "clip"),
    [
        *((kind, 0.5) if kind == "two" else pytest.param(kind, 0.5, marks=pytest.mark.matrix) for kind in KINDS),
        ("SGD", None),
        *(pytest.param(kind, None, marks=pytest.mark.matrix) for kind in KINDS if kind != "SGD"),
    ],
)
def test_a_compiled_update_takes_the_same_steps_in_one_graph_that_a_schedule_does_not_compile_anew(
    kind: str, clip: float | None
) -> None:
    settings: dict[str, Any] = {
        "factors": {4: float("inf"), 7: float("nan")}, "max_grad_norm": clip,
        "scheduler": lambda o: LambdaLR(o, lambda i: 0.9**i),
    }  # fmt: skip
    ours, shown = train(KINDS[kind], scaler=fxamp.LossScaler(growth_interval=3), **settings, **TRACED)
    theirs, expected = train(KINDS[kind], scaler=fxamp.LossScaler(growth_interval=3), **settings)
    assert shown == expected
    assert [skipped for _, skipped, *_ in shown].count(True) == 2
    assert_near(ours, theirs)
    assert ours.compiled is not None
    assert ours.compiled.update.eager == ""
    assert ours.compiled.update.region.frames == len(ours.optimizers)
    assert [e.culprit for e in ours.scaler.history] == [e.culprit for e in theirs.scaler.history]


def test_a_checkpoint_and_a_scheduler_see_numbers() -> None:
    step, shown = train(KINDS["AdamW"], 4, scheduler=lambda o: LambdaLR(o, lambda i: 0.5**i), **COMPILED)
    group = step.optimizers[0].state_dict()["param_groups"][0]
    assert group["lr"] == 0.01 * 0.5**4
    assert group["capturable"] is False
    assert [type(lr) for *_, lr in shown] == [float] * 4


def test_a_schedule_of_momentum_ends_compiling_where_it_would_never_end() -> None:
    def cycle(optimizer: Optimizer) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=30)

    ours, _ = train(KINDS["momentum"], 12, scheduler=cycle, **COMPILED)
    theirs, _ = train(KINDS["momentum"], 12, scheduler=cycle)
    assert_near(ours, theirs)
    assert ours.compiled is not None
    assert ours.compiled.update.eager == "'momentum' changes from step to step, so that every step would compile again"
    assert ours.compiled.update.region.frames <= 2


def test_a_window_cut_short_is_compiled_too() -> None:
    runs = [train(KINDS["AdamW"], 3, accumulate_steps=2, **how)[0] for how in (COMPILED, {})]
    for step in runs:
        x, y = batch(50)
        step(x, (y, torch.tensor(1.0)))
        assert step.flush().stepped
    assert_near(runs[0], runs[1])


def _hooked(model: nn.Module) -> Optimizer:
    optimizer = AdamW(model.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


class Halved(SGD):
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(0.5)
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (lambda m: AdamW(m.parameters(), lr=0.01, fused=True), "AdamW is fused"),
        (_hooked, "AdamW has hooks on its step"),
        (lambda m: Halved(m.parameters(), lr=0.1), "Halved is not an optimizer of torch.optim"),
    ],
)
def test_what_a_graph_would_not_show_or_do_better_is_left_alone(kind: Any, reason: str) -> None:
    ours, shown = train(kind, 4, max_grad_norm=0.5, **COMPILED)
    theirs, expected = train(kind, 4, max_grad_norm=0.5)
    assert shown == expected
    assert all(map(torch.equal, ours.model.parameters(), theirs.model.parameters()))
    assert ours.compiled is not None
    assert ours.compiled.update.eager == reason
    assert len(GRAPHS) == 1  # model and loss


def test_an_update_that_cannot_be_one_graph_runs_as_it_is_from_then_on_and_says_why() -> None:
    def adafactor(model: nn.Module) -> Optimizer:  # which reads its count of steps as a number
        return torch.optim.Adafactor(model.parameters(), lr=0.01)

    ours, shown = train(adafactor, 4, max_grad_norm=0.5, **COMPILED)
    theirs, expected = train(adafactor, 4, max_grad_norm=0.5)
    assert shown == expected
    assert all(map(torch.equal, ours.model.parameters(), theirs.model.parameters()))
    assert ours.compiled is not None
    assert "data-dependent" in ours.compiled.update.eager


def test_where_the_first_windows_overflow_the_state_is_made_by_the_first_step_that_is_taken() -> None:
    settings: dict[str, Any] = {"factors": {0: float("inf"), 1: float("inf"), 4: float("nan")}}
    runs = [train(KINDS["AdamW"], 6, scaler=fxamp.LossScaler(), **settings, **how) for how in (COMPILED, {})]
    (ours, shown), (theirs, expected) = runs
    assert shown == expected
    assert_near(ours, theirs)
    assert ours.compiled is not None
    assert ours.compiled.update.region.frames == 1


def test_after_a_state_was_loaded_steps_are_compiled() -> None:
    ours, _ = train(KINDS["AdamW"], 3, **COMPILED)
    saved = copy.deepcopy(ours.state_dict())
    resumed, _ = train(KINDS["AdamW"], 0, **COMPILED)
    resumed.load_state_dict(saved)
    for step in (ours, resumed):
        for index in range(3, 6):
            x, y = batch(index)
            step(x, (y, torch.tensor(1.0)))
    assert_near(ours, resumed)
    assert resumed.compiled is not None
    assert resumed.compiled.update.eager == ""


def test_a_copy_compiles_for_itself() -> None:
    ours, _ = train(KINDS["AdamW"], 3, **COMPILED)
    copied = copy.deepcopy(ours)
    before = [p.detach().clone() for p in ours.model.parameters()]
    for index in range(3, 6):
        x, y = batch(index)
        copied(x, (y, torch.tensor(1.0)))
    assert all(map(torch.equal, before, ours.model.parameters()))
    theirs, _ = train(KINDS["AdamW"], 6)
    assert_near(copied, theirs)


def test_where_torch_compile_is_kept_off_the_update_is_the_eager_one() -> None:
    ours, _ = train(KINDS["AdamW"], 3, **COMPILED)
    theirs, _ = train(KINDS["AdamW"], 4)
    with torch.compiler.set_stance("force_eager"):
        x, y = batch(3)
        ours(x, (y, torch.tensor(1.0)))
    assert_near(ours, theirs)
    assert ours.compiled is not None
    assert ours.compiled.update.eager == "torch.compile was disabled where the step was called"
    x, y = batch(4)
    ours(x, (y, torch.tensor(1.0)))
    assert ours.compiled.update.eager == ""
