"""What a newcomer's mistakes are answered by: the culprit is named, and what to write instead."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxamp
from fxamp.demo import LeNet5

X, Y = torch.randn(4, 1, 8, 8), torch.randint(10, (4,))
LOADER: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=2)


def step(**arguments: Any) -> None:
    model = LeNet5()
    fxamp.TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), **arguments)


def convert(*args: Any, **kwargs: Any) -> None:
    fxamp.convert(LeNet5(), *args, **kwargs)


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "weights on meta": (
        lambda: fxamp.convert(LeNet5().to("meta"), (X,)), fxamp.CaptureError,
        ("input 'x' is on cpu, and the parameters are on meta", "to_empty(device=...)"),
    ),
    "a double input": (
        lambda: convert((X.double(),)), fxamp.CaptureError,
        ("input 'x' is float64", "the parameters are float32: give .float()"),
    ),
    "a wrong shape": (
        lambda: convert((torch.randn(32, 8, 8),)), fxamp.CaptureError,
        ("expected input[1, 32, 8, 16] to have 1 channels, but got 32 channels instead",),
    ),
    "two inputs by position": (
        lambda: convert(X, Y), fxamp.CaptureError, ("several inputs by position are one tuple", "(model, (x, y))"),
    ),
    "a DataLoader": (
        lambda: convert(LOADER), fxamp.CaptureError, ("not DataLoader", "give the inputs of one batch"),
    ),
    "a DataLoader to a census": (
        lambda: fxamp.census(LeNet5(), LOADER), fxamp.PolicyError, ("not DataLoader", "the inputs of one batch"),
    ),
    "two inputs to a diagnostic": (
        lambda: fxamp.estimate_error(LeNet5(), X, Y), fxamp.PolicyError,
        ("a target was given, the third argument, without loss=", "one tuple, (x, y)"),
    ),
    "dtype=": (
        lambda: convert((X,), dtype=torch.bfloat16), TypeError,
        ("convert() has no argument 'dtype'", 'write policy="O1,dtype=bf16"'),
    ),
    "a misspelt argument": (
        lambda: convert((X,), polciy="O1"), TypeError, ("no argument 'polciy'; the nearest name is 'policy'",),
    ),
    "a function": (
        lambda: fxamp.convert(lambda x: x, (X,)), fxamp.NotAModuleError,  # type: ignore[arg-type]
        ("not function: make it the forward of a module",),
    ),
    "on_collapse=": (
        lambda: step(on_collapse="recolour"), TypeError, ("'on_collapse': write `except fxamp.ScaleCollapseError",),
    ),
    "grad_clip=": (
        lambda: step(grad_clip=1.0), TypeError, ("TrainStep() has no argument 'grad_clip': write max_grad_norm=",),
    ),
    "gradient_accumulation_steps=": (
        lambda: step(gradient_accumulation_steps=4), TypeError, ("write accumulate_steps=",),
    ),
    "a precision of Lightning": (
        lambda: convert((X,), policy="bf16-mixed"), fxamp.PolicyError,
        ("unknown level 'bf16-mixed'", "what Lightning and Accelerate call 'bf16-mixed' is 'O1,dtype=bf16' here"),
    ),
    "a precision of Accelerate": (
        lambda: convert((X,), policy="no"), fxamp.PolicyError, ("is 'O0' here",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_the_way_out(mistake: str) -> None:
    make, kind, said = MISTAKES[mistake]
    with pytest.raises(kind) as raised:
        make()
    assert type(raised.value) is kind
    text = str(raised.value)
    assert [part for part in said if part not in text] == [], text


def test_gradients_inside_of_frozen_are_warned_of_once() -> None:
    view = fxamp.convert(LeNet5(), (X,), policy="O1,dtype=bf16")
    with fxamp.frozen(view), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        view(X)
    with fxamp.frozen(view):
        with pytest.warns(UserWarning, match="none reaches a weight there"):
            view(X)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            view(X)


def test_a_child_that_is_a_view_already_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    model = LeNet5()
    model.fc1 = fxamp.convert(model.fc1, policy="O1,dtype=bf16,output_dtype=autocast")
    with caplog.at_level(logging.WARNING, logger="fxamp"):
        view = fxamp.convert(model, (X,), policy="O1,dtype=bf16")
        found = fxamp.census(view, X)
    assert found.differences == ()
    assert "did not run all of its plan" not in caplog.text
    assert fxamp.plan_of(view).complete
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(view(X), LeNet5.forward(model, X).float())


def test_a_failing_check_of_a_plan_does_not_bury_its_message(tmp_path: Path) -> None:
    (tmp_path / "test_p.py").write_text(
        "import torch\nfrom fxamp.demo import LeNet5\n\n\ndef test_p(precision_plan):\n"
        "    precision_plan.check(LeNet5(), (torch.randn(2, 1, 8, 8),), policy='O1,dtype=bf16')\n"
    )
    root = Path(fxamp.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_p.py", "--update-precision-plans", "-p", "fxamp.pytest_plugin"],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert "wrote test_p/test_p.plan.json" in run.stdout
    assert "torch.__trace" not in run.stdout
    assert len(run.stdout.splitlines()) < 40


class Says(nn.Module):
    """A model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.l(x)


@pytest.mark.parametrize("warm", [False, True])
def test_of_a_wrong_input_there_is_torchs_error_and_no_other_traceback(
    warm: bool, caplog: pytest.LogCaptureFixture
) -> None:
    view = fxamp.convert(Says(), policy="O1,dtype=bf16")
    if warm:
        view(torch.randn(2, 8))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        view(torch.randn(2, 5))
    assert "Traceback" not in caplog.text
