"""What a newcomer's mistakes are answered by: the culprit is named, and what to write instead."""

from __future__ import annotations

import logging
import os
import re
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
X_8 = torch.randn(4, 8)
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


def test_a_child_at_o0_is_refused_where_the_model_rounds() -> None:
    model = nn.Sequential(Says(), Says())
    author = model[1]
    model[1] = fxamp.convert(author, policy="O0")
    with pytest.raises(fxamp.CaptureError, match=r"'1' of this Sequential is a view at O0.*modules\.1=fp32") as refused:
        fxamp.convert(model, policy="O1,dtype=bf16")
    assert fxamp.convert(model, policy="O0")(X_8).dtype is torch.float32
    model[1] = author
    way_out = re.search(r"policy='([^']+)'", str(refused.value))
    assert way_out is not None
    colours = {d.module_path: d.colour for d in fxamp.plan(model, (X_8,), policy=way_out[1]).decisions}
    assert colours == {"0.l": "bfloat16", "1.l": "float32"}


@pytest.mark.parametrize("policy", ["O1,dtype=bf16", fxamp.Policy("O1", dtype="bf16")])
def test_a_policy_in_the_place_of_inputs_is_told_its_name(policy: Any) -> None:
    with pytest.raises(fxamp.CaptureError, match=r"give a policy by its name: policy='O1,dtype=bf16'"):
        fxamp.convert(Says(), policy)


def test_an_op_that_is_misspelt_is_told_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    fxamp.convert(Says(), policy="O1,dtype=bf16,ops.liner=fp32")(X_8)
    assert "no op of that name was captured; the nearest name is 'linear'" in caplog.text


def mean_loss(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


@pytest.mark.parametrize(
    "call",
    [
        lambda m: fxamp.convert(m, (X_8, X_8), policy="O1,dtype=bf16"),
        lambda m: fxamp.census(m, (X_8, X_8), loss=mean_loss),
        lambda m: fxamp.TrainStep(m, mean_loss, torch.optim.SGD(m.parameters(), 0.1))((X_8, X_8)),
        lambda m: fxamp.TrainStep(fxamp.convert(m), mean_loss, torch.optim.SGD(m.parameters(), 0.1))((X_8, X_8)),
    ],
    ids=["convert", "census", "step", "step of a view"],
)
def test_a_target_among_the_inputs_is_told_so(call: Any) -> None:
    with pytest.raises(fxamp.FxampError, match=r"Says (cannot be called with|rejects) .* 2 .*target"):
        call(Says())


def test_a_loss_of_other_arguments_is_named() -> None:
    def make() -> None: ...

    with pytest.raises(fxamp.PolicyError, match=r"loss\(output, target\), which it does not take: make\(\) got 2"):
        fxamp.census(Says(), X_8, X_8, loss=make)
    with pytest.raises(fxamp.PolicyError, match=r"loss\(output\), which it does not take: make\(\) got 1"):
        fxamp.census(Says(), X_8, loss=make)


def test_a_scaler_without_its_device_prints() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert repr(fxamp.LossScaler("cuda")).startswith("<fxamp LossScaler: ")
    assert repr(fxamp.LossScaler(enabled=False)) == "<fxamp LossScaler: disabled>"


def test_a_view_that_was_saved_is_read_where_the_file_is_trusted(tmp_path: Path) -> None:
    view = fxamp.convert(Says(), policy="O1,dtype=bf16")
    torch.save(view, tmp_path / "view.pt")
    again = torch.load(tmp_path / "view.pt", weights_only=False)  # as the guide on capture says
    assert torch.equal(again(X_8), view(X_8))


BREAKS = """
import torch, fxamp
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.means = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4), []
    def forward(self, x):
        h = self.a(x)
        self.means.append(float(x.mean()))
        return self.b(h)
x, y = torch.randn(4, 8), torch.randint(4, (4,))
fxamp.measure_error(Net(), x, y, loss=torch.nn.functional.cross_entropy)
"""


def test_a_graph_break_is_told_in_our_words_alone(tmp_path: Path) -> None:
    script = tmp_path / "breaks.py"
    script.write_text(BREAKS)
    environment = {**os.environ, "PYTHONPATH": str(Path(fxamp.__file__).parents[1])}
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, env=environment, timeout=120
    )
    assert "Graph break from" not in ran.stderr
    assert "___stack" not in ran.stderr
    assert "code behind a graph break reads an object that code in front of it makes anew" in ran.stderr


def test_an_input_that_overflows_is_named_as_in_the_call() -> None:
    view = fxamp.convert(Says(), policy="O1,dtype=fp16")
    found = fxamp.find_overflow(view, X_8 * 1e6, X_8, loss=mean_loss)
    assert "the cast of input 0 makes inf in float16" in str(found)
