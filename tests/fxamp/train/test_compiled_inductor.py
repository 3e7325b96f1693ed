"""A training step compiled by Inductor: near the eager one, compiled once, and found again by another process."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import fxamp
from fxamp.measure.inductor import recording
from fxamp.train.step import TrainStep
from fxamp.train.weights import Mode
from reports import compiled_step

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of a module that torch imports
STEPS = 30


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))


def batch(index: int, rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(rows, 16, generator=generator), torch.randint(8, (rows,), generator=generator)


def warm_up(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 5) * 0.95**i)


def by_torch(compile: bool) -> list[Tensor]:
    """Train under autocast, in eager or compiled; return the parameters."""
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    scheduler = warm_up(optimizer)
    called: Any = torch.compile(model) if compile else model
    for index in range(STEPS):
        x, y = batch(index)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(called(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def by_step(compile: bool, weights: Mode = "auto") -> tuple[list[Tensor], TrainStep, list[list[int]]]:
    """Train by TrainStep; return the parameters, the step, and how many frames were compiled after each window."""
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    converted = fxamp.convert(model, (batch(0)[0],), policy="O1,dtype=bf16")
    step = TrainStep(
        converted, F.cross_entropy, optimizer, max_grad_norm=0.5, scheduler=warm_up(optimizer), compile=compile,
        weights=weights,
    )  # fmt: skip
    frames = []
    for index in range(STEPS):
        assert step(*batch(index)).stepped
        frames.append([region.frames for region in step.compiled.regions] if step.compiled is not None else [])
    return [p.detach().clone() for p in model.parameters()], step, frames


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return torch.cat([(x - y).flatten() for x, y in zip(a, b, strict=True)]).norm().item()


@pytest.mark.matrix  # which builds kernels: test_compiled_step and test_compiled_update compare steps that are traced
@pytest.mark.parametrize("weights", ["per_step", "per_use"])
def test_thirty_compiled_steps_are_as_near_the_eager_ones_as_those_of_torch_compile_under_autocast(
    weights: Mode,
) -> None:
    torch.compiler.reset()
    eager, _, _ = by_step(False)
    ours, step, frames = by_step(True, weights)
    torchs = distance(by_torch(True), by_torch(False))
    assert torchs > 0
    assert distance(ours, eager) <= 1.5 * torchs
    assert frames[4] == frames[-1] == [1, 1]
    assert step.compiled is not None
    for region in step.compiled.regions:
        assert not region.breaks
        assert not region.fallbacks


COUNTS = """
import json, torch, torch._inductor.config, fxamp
from torch._dynamo.utils import counters
torch._inductor.config.cpp.simdlen = 1  # nothing is built to find out what this machine has
x, model = torch.ones(2, 4), torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = fxamp.TrainStep(model, lambda out: out.square().sum(), optimizer, compile="fxamp")
step(x)
step(x)
print(json.dumps(counters["aot_autograd"]))
"""


@pytest.mark.parametrize("converts", [True, False], ids=["converting", "converted"])
def test_the_graphs_of_a_step_can_be_cached(converts: bool) -> None:
    from torch._functorch._aot_autograd.autograd_cache import check_cacheable

    given: list[Any] = []

    def keep(gm: Any, inputs: Any) -> Any:
        given.append(gm)
        return gm

    torch.compiler.reset()
    model: nn.Module = nn.Linear(4, 3)
    compile: dict[str, Any] = {"backend": "fxamp", "options": {"policy": "O1,dtype=bf16", "backend": keep}}
    if not converts:
        model, compile = fxamp.convert(model, (torch.ones(2, 4),), policy="O1,dtype=bf16"), {"backend": keep}
    step = TrainStep(model, lambda out: out.square().sum(), torch.optim.SGD(model.parameters(), lr=0.1),
                     weights="per_use" if converts else "per_step", compile=compile)  # fmt: skip
    for _ in range(2):
        step(torch.ones(2, 4))
    assert len(given) == 2
    for gm in given:
        check_cacheable(gm)


@pytest.mark.matrix  # which builds kernels in two processes
def test_another_process_finds_all_graphs_of_backend_fxamp_in_the_cache(tmp_path: Path) -> None:
    cached = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", COUNTS], capture_output=True, text=True, check=True, env={**os.environ, **cached},
        )  # fmt: skip
        found.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = found
    assert first["autograd_cache_saved"] == first["total"] == 2
    assert second["autograd_cache_hit"] == second["total"] == 2
    assert not second.get("autograd_cache_miss")
    assert not second.get("autograd_cache_bypass")


@pytest.mark.matrix  # which builds the kernels of three steps
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")  # so that kernels are counted anew
def test_the_peak_and_what_is_saved_are_at_most_those_of_compiled_autocast() -> None:
    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 256), nn.Linear(256, 8))

    x, y = batch(0, rows=256)
    model = wide()
    optimizer = AdamW(model.parameters(), fused=True)

    @functools.partial(torch.compile, options=recording())
    def loss_under_autocast() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(x), y)

    def by_hand() -> Tensor:
        loss = loss_under_autocast()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch.compiler.reset()
    theirs = compiled_step.count(by_hand)
    modes: tuple[Mode, ...] = ("per_use", "per_step")
    for policy, weights in itertools.product(("O1,dtype=bf16", "O2,dtype=bf16"), modes):
        ours = wide()
        converted = fxamp.convert(ours, (x,), policy=f"{policy},output_dtype=autocast")  # not 4 kB more of logits
        optimizer = AdamW(ours.parameters(), fused=True)
        step = TrainStep(converted, F.cross_entropy, optimizer, weights=weights, compile=True)
        torch.compiler.reset()
        found = compiled_step.count(lambda step=step: step(x, y).loss)  # type: ignore[misc]
        assert 0 < found.saved_bytes <= theirs.saved_bytes
        assert 0 < (found.peak or 0) <= (theirs.peak or 0), (policy, weights)
