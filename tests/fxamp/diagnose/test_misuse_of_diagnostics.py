"""What is wrong with a call of a diagnostic is named, and the way out: an input, a loss, a target, a region."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxamp
from fxamp.demo import LeNet5

X, Y = torch.randn(4, 1, 8, 8), torch.randint(10, (4,))
ALL = [fxamp.census, fxamp.find_overflow, fxamp.estimate_error, fxamp.measure_error]


@pytest.mark.parametrize("diagnostic", ALL)
@pytest.mark.parametrize(
    ("inputs", "words"),
    [(X.double(), "input 'x' is float64"), (X.to("meta"), "input 'x' is on meta, and the parameters are on cpu")],
)
def test_an_input_that_does_not_fit_is_named(diagnostic: Any, inputs: Any, words: str) -> None:
    with pytest.raises(fxamp.CaptureError, match=words):
        diagnostic(LeNet5(), inputs, Y, loss=nn.functional.cross_entropy)


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, torch.OutOfMemoryError])
def test_what_the_model_raises_itself_is_not_laid_on_an_input(kind: type[Exception]) -> None:
    class Refusing(LeNet5):
        def forward(self, x: Any, lengths: Any) -> Any:  # type: ignore[override]
            raise kind("no room for lengths")

    with pytest.raises(kind, match="no room for lengths") as raised:
        fxamp.census(Refusing(), (X, torch.ones(4, dtype=torch.float64)))
    assert type(raised.value) is kind


@pytest.mark.parametrize("diagnostic", ALL)
def test_a_loss_that_is_a_class_and_a_target_that_is_missing_are_named(diagnostic: Any) -> None:
    with pytest.raises(fxamp.PolicyError, match=r"loss=CrossEntropyLoss\(\)"):
        diagnostic(LeNet5(), X, Y, loss=nn.CrossEntropyLoss)
    for loss in (nn.functional.cross_entropy, nn.CrossEntropyLoss()):
        with pytest.raises(fxamp.PolicyError, match="takes a target, the third argument"):
            diagnostic(LeNet5(), X, loss=loss)


def test_a_loss_whose_own_code_lacks_an_argument_raises_its_own_error() -> None:
    def loss(output: Any, target: Any) -> Any:
        return nn.functional.cross_entropy(output)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        fxamp.census(LeNet5(), X, Y, loss=loss)


def test_a_policy_of_another_kind_is_told_how_one_is_written() -> None:
    with pytest.raises(fxamp.PolicyError, match=r'such as "O1,dtype=bf16", or a fxamp.Policy, not torch.bfloat16'):
        fxamp.convert(LeNet5(), policy=torch.bfloat16)  # type: ignore[arg-type]
