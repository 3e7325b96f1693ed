"""Random runs of a TrainStep against a loop written by hand with torch.autocast and GradScaler: the same bits at O1.

A run that is resumed goes on in a new process; one may be cut off by an error, an interrupt, or one in the midst of a
step, after which a state is loaded; another policy is switched to, and rolled back. Without a loss scale the loop by
hand skips a step whose gradients are not finite. And twenty faults planted in TrainStep, each of which some of these
runs shows.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxamp
from fxamp.train import step as step_file
from fxamp.train import update as update_file
from fxamp.train.loop import Loop
from fxamp.train.scaler import LossScaler
from fxamp.train.step import TrainStep
from fxamp.train.window import Window, close_window
from fxamp.view import copies as copies_file
from fxamp.view.copies import Copies
from fxamp.view.view import runner_of
from passes.contract.errors import PolicyError
from tests.fxamp.train.test_edges import SCHEDULERS
from tests.support.processes import in_another_process

# Of a loop whose first step is skipped, and of schedulers that are made of others.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step()`")

SETTINGS: dict[str, tuple[Any, ...]] = {
    "low": (torch.bfloat16, torch.float16),
    "weights": ("per_use", "per_step"),
    "accumulate": (1, 2, 3),
    "clip": (None, 0.05),
    "optimizers": ("adamw", "sgd", "both", "fused"),
    "scheduler": (None, *SCHEDULERS),
    "ema": (False, True),
    "overflow": (False, True),
    "resume": (False, True),
    "flush": (False, True),
    "breaks": (None, "error", "interrupt", "half a step"),
    "switch": (False, True),
}
MICRO_BATCHES, STOP = 13, 7  # where a run is stopped that goes on in another process
BREAK, SWITCH = 5, 10  # the micro-batch that is cut off, and the one before which a switch is rolled back


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.norm(self.first(x))))


def chosen(seed: int) -> dict[str, Any]:
    generator = random.Random(seed)
    return {name: generator.choice(values) for name, values in SETTINGS.items()} | {"seed": seed}


def batches(run: dict[str, Any]) -> list[tuple[Tensor, Tensor, float]]:
    generator = torch.Generator().manual_seed(run["seed"])
    out = []
    for i in range(MICRO_BATCHES):
        x = torch.randn(4, 6, generator=generator)
        factor = math.inf if run["overflow"] and i in (3, 8) else 1.0
        out.append((x, torch.randint(3, (4,), generator=generator), factor))
    return out


def optimizers_of(model: Net, run: dict[str, Any]) -> list[Optimizer]:
    first, rest = [*model.first.parameters()], [*model.norm.parameters(), *model.last.parameters()]
    if run["optimizers"] == "both":
        return [AdamW(first, lr=0.01), SGD(rest, lr=0.1, momentum=0.9)]
    if run["optimizers"] == "sgd":
        return [SGD([*first, *rest], lr=0.1, momentum=0.9)]
    return [AdamW([*first, *rest], lr=0.01, fused=run["optimizers"] == "fused")]


def schedulers_of(optimizers: list[Optimizer], run: dict[str, Any]) -> list[Any]:
    return [] if run["scheduler"] is None else [SCHEDULERS[run["scheduler"]](o) for o in optimizers]


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, which it does not in a process that a shell runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def parts(run: dict[str, Any]) -> tuple[Net, list[Optimizer], list[Any], AveragedModel | None]:
    torch.manual_seed(run["seed"])
    model = Net()
    optimizers = optimizers_of(model, run)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) if run["ema"] else None
    return model, optimizers, schedulers_of(optimizers, run), ema


def shown(model: Net, optimizers: list[Optimizer], ema: AveragedModel | None, scale: float) -> list[Tensor]:
    states = [
        t for o in optimizers for p in o.param_groups[0]["params"] for t in o.state[p].values() if torch.is_tensor(t)
    ]
    rates = torch.tensor([o.param_groups[0]["lr"] for o in optimizers])
    averages = [] if ema is None else [*ema.parameters()]
    return [t.detach().clone() for t in (*model.parameters(), *states, *averages, rates, torch.tensor(scale))]


def by_hand(run: dict[str, Any]) -> list[list[Tensor]]:
    """Train by a loop; return what there is after each window."""
    model, optimizers, schedulers, ema = parts(run)
    scaled = run["low"] == torch.float16
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scaled)
    out, seen, given = [], 0, batches(run)
    for i, (x, y, factor) in enumerate(given):
        if i == BREAK and run["breaks"] in ("error", "interrupt"):  # the window is gone
            model.zero_grad()
            seen = 0
            continue
        with torch.autocast("cpu", run["low"]):
            output = model(x)
        loss = F.cross_entropy(output.float(), y) * factor
        scaler.scale(loss / run["accumulate"]).backward()
        seen += 1
        if seen < run["accumulate"] and not (run["flush"] and i + 1 == len(given)):
            continue
        if seen < run["accumulate"]:
            for p in model.parameters():
                p.grad.mul_(run["accumulate"] / seen)  # type: ignore[union-attr]
        for o in optimizers:
            scaler.unscale_(o)
        finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())  # type: ignore[union-attr]
        if run["clip"] is not None:
            nn.utils.clip_grad_norm_(model.parameters(), run["clip"])
        for o in optimizers:
            if scaled and run["clip"] is None:
                scaler.step(o)
            elif finite:
                o.step()
        if finite:
            for scheduler in schedulers:
                scheduler.step()
            if ema is not None:
                ema.update_parameters(model)
        scaler.update()
        for o in optimizers:
            o.zero_grad()
        seen = 0
        out.append(shown(model, optimizers, ema, scaler.get_scale()))
    return out


class Run:
    """A TrainStep for a run, from its first micro-batch on or from a state."""

    def __init__(self, run: dict[str, Any]) -> None:
        self.run, self.out, self.cut = run, list[list[Tensor]](), ""
        self.model, self.optimizers, schedulers, self.ema = parts(run)
        view = fxamp.convert(self.model, policy=fxamp.Policy("O1", dtype=run["low"]))
        scaler = fxamp.LossScaler(init_scale=2.0**10, growth_interval=2) if run["low"] == torch.float16 else None
        made_of = {"scheduler": schedulers or None, "ema": self.ema, "weights": run["weights"]}
        self.step = TrainStep(
            view, self.loss, self.optimizers, scaler=scaler,
            accumulate_steps=run["accumulate"], max_grad_norm=run["clip"], **made_of,
        )  # fmt: skip

    def loss(self, output: Tensor, target: tuple[Tensor, float]) -> Tensor:
        if self.cut == "error":
            raise ArithmeticError
        if self.cut == "interrupt":
            signal.raise_signal(signal.SIGINT)
        return F.cross_entropy(output, target[0]) * target[1]

    def train(self, first: int, last: int) -> None:
        for i, (x, y, factor) in [*enumerate(batches(self.run))][first:last]:
            if i == BREAK and self.breaks(self.run["breaks"], x, (y, factor)):
                continue
            if i >= SWITCH and self.run["switch"] and not self.step.position and not self.step.switches:
                self.switch_and_back(x, (y, factor))
            if self.step(x, (y, factor)).reason != "accumulating":
                self.show()

    def breaks(self, how: str | None, x: Tensor, target: Any) -> bool:
        """Cut a micro-batch off; return whether it is gone for good."""
        if how == "half a step":
            before = copy.deepcopy(self.step.state_dict())
            hooks = [o.register_step_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT)) for o in self.optimizers]
            with contextlib.suppress(KeyboardInterrupt):
                self.step(x, target)
            for hook in hooks:
                hook.remove()
            if self.step.torn:
                with pytest.raises(PolicyError, match="half a step"):
                    self.step(x, target)
            self.step.load_state_dict(before)
            return False
        if how is None:
            return False
        self.cut = how
        with pytest.raises((ArithmeticError, KeyboardInterrupt)):
            self.step(x, target)
        self.cut = ""
        return True

    def switch_and_back(self, x: Tensor, target: Any) -> None:
        """Follow O2 for a micro-batch, and go back to the state before."""
        before = copy.deepcopy(self.step.state_dict())
        self.step.switch(f"O2,dtype={'fp16' if self.run['low'] == torch.float16 else 'bf16'}")
        self.step(x, target)
        self.step.load_state_dict(before)
        assert not self.step.switches

    def finish(self, first: int) -> list[list[Tensor]]:
        """Train to the end, and return what there was after each window."""
        self.train(first, MICRO_BATCHES)
        if self.run["flush"] and self.step.position:
            self.step.flush()
            self.show()
        assert runner_of(self.step.model).graphs  # the plan ran
        return self.out

    def show(self) -> None:
        self.out.append(shown(self.model, self.optimizers, self.ema, self.step.scaler.get_scale()))


def resume(run: dict[str, Any], file: str) -> None:
    """Go on from the state in a file, and leave there what there was after each window."""
    again = Run(run)
    again.step.load(file)
    torch.save(again.finish(STOP), file)


def by_step(run: dict[str, Any], resumed: Callable[..., Any]) -> list[list[Tensor]]:
    """Train by a TrainStep, which may be saved, in the middle of a window or not, and go on as another."""
    begun = Run(run)
    if not run["resume"]:
        return begun.finish(0)
    begun.train(0, STOP)
    with tempfile.TemporaryDirectory() as folder:
        begun.step.save(file := f"{folder}/step.pt")
        close_window(begun.step)
        resumed(resume, run, file)
        return [*begun.out, *torch.load(file)]


def differs(run: dict[str, Any], resumed: Callable[..., Any] = in_another_process) -> bool:
    ours, theirs = by_step(run, resumed), _expected(run["seed"])
    if len(ours) != len(theirs):
        return True
    return not all(len(a) == len(b) and all(map(_same, a, b)) for a, b in zip(ours, theirs, strict=True))


@functools.cache
def _expected(seed: int) -> list[list[Tensor]]:
    return by_hand(chosen(seed))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


SEEDS = range(400)


@pytest.mark.parametrize(
    "seed", [seed if i < 8 else pytest.param(seed, marks=pytest.mark.matrix) for i, seed in enumerate(SEEDS)]
)
def test_a_random_run_has_the_bits_of_the_loop(seed: int) -> None:
    assert not differs(chosen(seed)), chosen(seed)


def test_the_runs_cover_every_pair_of_settings() -> None:
    runs = [chosen(seed) for seed in SEEDS]
    for (a, these), (b, those) in itertools.combinations(SETTINGS.items(), 2):
        for pair in itertools.product(these, those):
            assert any((run[a], run[b]) == pair for run in runs), (a, b, pair)


def test_a_plan_that_changes_the_result_changes_it() -> None:
    run = {**chosen(SEEDS[0]), "low": torch.bfloat16, "overflow": False}
    torch.manual_seed(0)
    model = Net()
    x = batches(run)[0][0]
    views = [fxamp.convert(model, policy=p) for p in ("O1,dtype=bf16", "O1,dtype=bf16,modules.first=fp32")]
    assert not torch.equal(views[0](x), views[1](x))


# ------------------------------------------------------------------------------------- planted faults


def _patched(owner: Any, name: str, change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, change(getattr(owner, name)))


def _no(_: Any) -> Any:
    return lambda *a, **k: None


def _undivided(before: Any) -> Any:
    def backward(self: Any, window: Any, loss: Tensor, *rest: Any) -> Any:
        return before(self, window, loss * self.accumulate_steps, *rest)

    return backward


def _without(name: str) -> Callable[[Any], Any]:
    def change(before: Any) -> Any:
        def follow(self: Any, update: Any) -> Any:
            options, self.options = self.options, dataclasses.replace(self.options, **{name: ()})
            try:
                return before(self, update)
            finally:
                self.options = options

        return follow

    return change


def _halving(before: Any) -> Any:
    def update(scaler: Any) -> Any:
        seen = before(scaler)
        if scaler._scale is not None:
            scaler._scale.mul_(0.5)
        return seen

    return update


def _unscaling_by_half(before: Any) -> Any:
    return lambda self, optimizer, inverse, *rest: before(self, optimizer, inverse * 0.5, *rest)


def _at_the_start(before: Any) -> Any:
    return lambda self, state: before(self, {**state, "position": 0})


def _end(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Give the end of a window other values."""

    def change(before: Any) -> Any:
        return lambda end, **k: before(end._replace(**{n: f(end) for n, f in changes.items()}), **k)

    return change


def _of_so_many(before: Any) -> Any:
    def average(self: Any, *args: Any, **k: Any) -> Any:
        self.size = self.position
        return before(self, *args, **k)

    return average


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the loss is not divided": _patched(TrainStep, "_backward", _undivided),
    "gradients are not cleared": _patched(Loop, "_clear", lambda _: lambda *a, **k: []),
    "no clipping": _patched(update_file, "clip", _no),
    "clipping to twice the norm": _patched(update_file, "clip", lambda f: lambda p, m, n: f(p, 2 * m, n)),
    "clipping by half of the norm": _patched(update_file, "clip", lambda f: lambda p, m, n: f(p, m, n / 2)),
    "clipping before unscaling": _patched(update_file, "clip", lambda f: lambda p, m, n: f(p, m, n * 2**10)),
    "an overflow steps": _patched(update_file, "_found_inf", lambda f: lambda *_: False),
    "nothing steps": _patched(update_file, "_found_inf", lambda f: lambda *_: True),
    "schedulers stay": _patched(TrainStep, "_follow", _without("schedulers")),
    "averages stay": _patched(TrainStep, "_follow", _without("averages")),
    "all follow, skipped or not": _patched(
        TrainStep, "_follow", lambda f: lambda self, u: f(self, u._replace(held_back=dict.fromkeys(u.held_back, False)))
    ),
    "the scale is never updated": _patched(update_file, "update_scale", _no),
    "the scale is halved once more": _patched(update_file, "update_scale", _halving),
    "gradients are unscaled by another scale": _patched(LossScaler, "_unscale_grads_", _unscaling_by_half),
    "a partial window is not a mean": _patched(Window, "average", _of_so_many),
    "only the first optimizer steps": _patched(step_file, "take_step", _end(optimizers=lambda e: e.optimizers[:1])),
    "only the last optimizer steps": _patched(step_file, "take_step", _end(optimizers=lambda e: e.optimizers[-1:])),
    "no norm is given": _patched(step_file, "take_step", _end(max_grad_norm=lambda e: None)),
    "copies of weights are those of the first window": lambda patch: (
        patch.setattr(Copies, "end", _no(None)), patch.setattr(copies_file._Copy, "is_of", lambda *_: True),
    )[0],
    "a state within a window loses its place": _patched(Window, "load", _at_the_start),
}  # fmt: skip


def test_twenty_faults_are_planted() -> None:
    assert len(FAULTS) == 20


@pytest.mark.matrix
@pytest.mark.parametrize("fault", FAULTS)
def test_some_run_shows_a_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = SEEDS[:60]
    for seed in seeds:
        _expected(seed)
    FAULTS[fault](monkeypatch)

    def shows(seed: int) -> bool:
        try:
            return differs(chosen(seed), resumed=lambda go_on, *given: go_on(*given))  # where the fault is, too
        except (RuntimeError, PolicyError):
            return True

    assert any(map(shows, seeds)), fault
