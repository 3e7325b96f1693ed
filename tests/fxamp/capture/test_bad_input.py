"""What cannot be captured is refused with its name and the way out, and the model is left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.dynamo.resolve import resolve
from passes._torch import guards_of
from tests.support.helpers import (
    FRONT_ENDS,
    Two,
    assert_untouched,
    example,
    fingerprint,
    o0,
)

both = pytest.mark.parametrize("front_end", FRONT_ENDS)


@pytest.mark.parametrize(
    ("bad", "said"), [(3, "not int"), (Two, "the class Two: make an instance"), (None, "not NoneType")]
)
def test_what_is_no_module_is_refused(bad: Any, said: str) -> None:
    with pytest.raises(fxamp.NotAModuleError, match=said):
        fxamp.convert(bad, (example(),))


def test_converting_twice_is_refused() -> None:
    converted = o0(Two())
    with pytest.raises(fxamp.CaptureError, match=r"converted already.*plan_of"):
        fxamp.convert(converted, (example(),))
    with pytest.raises(fxamp.CaptureError, match="submodule '1' is converted already"):
        fxamp.convert(nn.Sequential(nn.ReLU(), converted), (example(),))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"args": (torch.zeros(2, 5),)}, "Two rejects the example inputs: RuntimeError"),
        ({"args": (1, 2, 3)}, r"Two rejects the example inputs: forward\(\) takes"),
        ({"args": ()}, r"Two rejects the example inputs: forward\(\) missing"),
        ({"args": 3}, "args is a tuple of example inputs, not int"),
        ({"kwargs": [3]}, "kwargs is a dict of example inputs, not list"),
        ({"capture": "trace"}, "capture='trace' is not one of auto, fx, export, jit"),
        ({"capture": "export"}, "needs example inputs"),
    ],
)
def test_bad_arguments_are_named_and_the_model_left_alone(options: dict[str, Any], said: str) -> None:
    model = Two()
    before = fingerprint(model)
    with pytest.raises(fxamp.CaptureError, match=said):
        fxamp.convert(model, **options)
    assert_untouched(model, before)


@both
def test_low_inputs_that_the_model_rejects_are_named(front_end: str) -> None:
    with pytest.raises(fxamp.CaptureError, match=r"rejects the example inputs.*'x' is torch\.bfloat16"):
        o0(Two(), (example().bfloat16(),), None, front_end)


def test_trainable_low_parameters_are_refused_and_frozen_ones_are_not() -> None:
    model = Two().bfloat16()
    with pytest.raises(fxamp.PolicyError, match=r"trainable.*'l\.weight' \(bfloat16\).*model\.float\(\)"):
        fxamp.convert(model, (example().bfloat16(),))
    fxamp.convert(model.requires_grad_(False), (example().bfloat16(),))


def test_a_failed_capture_names_construct_file_and_line() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.l(x) if x.sum().item() > 0 else self.m(x)  # the line

    model = Two(forward)
    before = fingerprint(model)
    with pytest.raises(fxamp.CaptureError, match=r"GuardOnDataDependent.*test_bad_input\.py:\d+ \(.*# the line\)"):
        o0(model)
    assert_untouched(model, before)


def test_a_model_on_a_device_without_op_lists_is_refused_with_the_way_out() -> None:
    class Elsewhere(nn.Linear):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([OnMps()])

    class OnMps(Tensor):
        device = SimpleNamespace(type="mps")  # type: ignore[assignment]

    message = r"Elsewhere is on 'mps', for which fxamp has no op lists: move the model to one of cpu, cuda, xpu before"
    with pytest.raises(fxamp.PolicyError, match=message):
        resolve(fxamp.Policy(), Elsewhere(2, 2), None)
    assert resolve(fxamp.Policy(device="cuda"), Elsewhere(2, 2), None).device == "cuda"


def test_an_exporter_that_does_not_say_what_it_assumed_is_refused() -> None:
    with pytest.raises(fxamp.CaptureError, match="does not report its guards on sizes"):
        guards_of(SimpleNamespace())  # type: ignore[arg-type]


def test_what_is_logged_says_that_it_is_ours(caplog: pytest.LogCaptureFixture) -> None:
    def counts(self: Any, x: Tensor) -> Any:
        return checkpoint(self.l, x, use_reentrant=False)

    with caplog.at_level("WARNING", "fxamp"):
        fxamp.convert(Two(counts), policy="O1")
    assert [r.getMessage()[:32] for r in caplog.records] == ["fxamp: counts is captured at its"]


def test_what_an_op_rejects_in_a_trace_is_raised_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    def matrix(self: Any, x: Tensor) -> Tensor:
        return torch.mm(x, self.l.weight[:, 1:].T)

    with pytest.raises(fxamp.CaptureError, match="matrix rejects the example inputs"):
        fxamp.convert(Two(matrix), (example(),), policy="O1")
    assert not [r.getMessage() for r in caplog.records if r.name.startswith("torch")]
