"""Kernels, bytes and memory that a step has on a GPU, counted where there is none; and where that cannot be done."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxamp.errors import MeasureError
from fxamp.measure.fake_cuda import device, library, model, tally
from fxamp.measure.fake_cuda.breakdown import Breakdown
from fxamp.measure.fake_cuda.count import count
from passes.contract.errors import FxampError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of a module that torch imports
REPORTS = Path(__file__).parents[4] / "reports"
# What is missing where it could be installed is a failure: `library.refuse` says what.
counted = pytest.mark.skipif(
    sys.platform != "linux" or bool(torch.version.cuda or torch.version.hip),
    reason="a GPU is feigned by torch's CPU build on Linux alone",
)

STEPS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.head = nn.Linear(width, 1024)

    def forward(self, x):
        logits = self.head(x)
        return logits.logsumexp(1).mean(), logits.detach().float().exp()

def make(**options):
    return Net(**options), (torch.randn(512, 256),)

def images(**options):
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    layers(torch.randn(2, 3, 8, 8))
    return Scored(layers), (torch.randn(2, 3, 8, 8),)

class Scored(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        logits = self.layers(x)
        return logits.float().logsumexp(1).mean(), logits.detach()

def ask():
    return Net().to("cuda" if torch.cuda.is_available() else "cpu"), (torch.randn(512, 256),)

def alone():
    return Net()

def train(model, args, kwargs, keep=False, low=False, fused=True, read=False, compile=True, dtype="bfloat16"):
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    function = torch.compile(lambda *args: model(*args)) if compile else model
    kept = []

    def step():
        with torch.autocast("cuda", getattr(torch, dtype), enabled=low):
            loss, output = function(*args)
        kept[:] = [output] if keep else []
        del output
        loss.backward()
        kept.clear()
        if read:
            float(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step
"""


@pytest.fixture
def steps(tmp_path: Path) -> Callable[..., Breakdown]:
    (tmp_path / "steps.py").write_text(STEPS)

    def of(build: str = "make", **options: Any) -> Breakdown:
        return count(f"steps.py:{build}", "steps.py:train", run_options=options, folder=tmp_path)

    return of


def test_the_private_names_of_torch_that_it_takes_are_there() -> None:
    assert device.missing() == []


def test_one_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device.NAMES, "torch.cuda", ("is_available", "was_here_once"))
    with pytest.raises(MeasureError, match=r"has no torch\.cuda\.was_here_once"):
        device.install()


@counted
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_batch_norm_is_counted_in_each_dtype(dtype: str, steps: Callable[..., Breakdown]) -> None:
    """In FP16 torch asks cuDNN, in BF16 it does not."""
    assert steps("images", low=True, dtype=dtype).total.kernels > 5


@pytest.mark.slow
@counted
def test_bert_base_has_the_kernels_that_an_h200_ran() -> None:
    rows = json.loads((REPORTS / "gpu.json").read_text())["sections"]["compiled"]["BERT-base, 32 x 128, BF16"]
    measured = next(row for row in rows if row["variant"] == "torch.autocast")
    one, two = (
        count(
            "reports/compiled_step.py:model",
            "reports/compiled_step.py:train",
            build_options={"name": "BERT-base", "layers": layers},
            run_options={"name": "torch.autocast"},
        )
        for layers in (1, 2)
    )
    kernels, casts = (
        getattr(two.total, key) + 10 * (getattr(two.total, key) - getattr(one.total, key))
        for key in ("kernels", "cast_kernels")
    )
    assert casts == pytest.approx(measured["cast kernels"], abs=2)
    assert kernels == pytest.approx(measured["kernels"], rel=0.05)


@pytest.mark.slow
@counted
def test_what_a_caller_keeps_during_backward_is_in_the_peak(steps: Callable[..., Breakdown]) -> None:
    freed, kept = steps(low=True), steps(low=True, keep=True)
    assert kept.total.kernels == freed.total.kernels
    output, scalars = 512 * 1024 * 4, 16
    assert freed.peak == pytest.approx(max(freed.forward.peak, freed.backward.peak), abs=scalars)
    assert kept.peak == pytest.approx(kept.backward.peak + output, abs=scalars)
    assert kept.peak > freed.peak


@pytest.mark.slow
@counted
def test_an_optimizer_is_counted_as_it_runs(steps: Callable[..., Breakdown]) -> None:
    fused, foreach = steps(), steps(fused=False)
    parameters = 256 * 1024 + 1024
    assert fused.inference.kernels == 0
    assert fused.forward == foreach.forward
    assert fused.outside.kernels < foreach.outside.kernels
    assert 28 * parameters <= fused.outside.moved_bytes < 28.1 * parameters
    assert fused.forward.cast_kernels == fused.backward.cast_kernels == 0


@pytest.mark.slow
@counted
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"build": "ask"}, r"asks torch.cuda.is_available\(\) while it makes its model"),
        ({"build": "alone"}, "returned a model without inputs"),
        ({"build": "absent"}, "has no callable|has no 'absent'"),
        ({"compile": False}, "Inductor compiled nothing"),
        ({"read": True}, "raised DataDependentOutputException"),
    ],
)
def test_what_cannot_be_counted_is_named(steps: Callable[..., Breakdown], options: Any, said: str) -> None:
    with pytest.raises(FxampError, match=said):
        steps(**options)


@pytest.mark.parametrize(
    ("place", "name", "value", "said"),
    [
        (sys, "platform", "darwin", "takes Linux, and this is darwin"),
        (sys, "platform", "win32", "takes Linux, and this is win32"),
        (torch.version, "cuda", "13.0", "takes torch's CPU build"),
        (torch.version, "hip", "7.1", "takes torch's CPU build"),
        (library, "compiler", lambda: None, r"install g\+\+"),
        (importlib.util, "find_spec", lambda name: None, "pip install triton"),
    ],
)
def test_where_it_cannot_be_done_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, value: Any, said: str
) -> None:
    if place is not sys:
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(library, "compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr(place, name, value)
    with pytest.raises(MeasureError, match=said):
        count("steps.py:make", "steps.py:train")


def test_a_model_of_over_a_gigabyte_is_made_without_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sizes.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    assert {p.device.type for p in model.build("sizes.py:make", {})[0].parameters()} == {"cpu"}
    monkeypatch.setattr(model, "LARGEST", 1024 * 1024)
    made, (args, _) = model.build("sizes.py:make", {})
    assert {t.device.type for t in (*made.parameters(), *args)} == {"meta"}


@pytest.mark.parametrize(
    ("lists", "sizes", "launches"),
    [
        (4, [1] * 36, 1),  # as many tensors as a launch of four lists takes
        (4, [1] * 37, 2),
        (1, [1] * 220, 2),
        (4, [320 * 65536], 1),  # as many chunks
        (4, [320 * 65536 + 1], 2),
        (2, [321 * 65536, 1], 2),
    ],
)
def test_lists_of_tensors_are_divided_into_launches(lists: int, sizes: list[int], launches: int) -> None:
    tensors = [torch.empty(size, device="meta") for size in sizes]
    assert sum(tally._launches([tensors] * lists)) == launches


def test_a_tied_weight_is_one_on_the_gpu_too() -> None:
    made = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    made["b"].weight = made["a"].weight
    model.moved(tally.FakeGpu(), made, ((), {}))
    assert made["a"].weight is made["b"].weight
