"""A model that is compiled or converted already is refused at once, by name, and the way out is said."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxamp
from fxamp import CaptureError

X = torch.randn(3, 4)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def in_place(module: nn.Module, **options: Any) -> nn.Module:
    module.compile(backend=options.pop("backend", "fxamp"), options=options or None)
    return module


def by_fxamp(module: nn.Module) -> Any:
    return fxamp.compile(module, backend="eager")


def by_torch(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


COMPILED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "fxamp.compile": (by_fxamp, r"is a view of fxamp, so it runs in mixed precision already"),
    "torch.compile": (by_torch, r"\(OptimizedModule\) is what torch\.compile returned"),
    "in place, fxamp": (in_place, r"is compiled in place, by its compile\(\)"),
    "in place, another": (lambda m: in_place(m, backend="eager"), r"is compiled in place, by its compile\(\)"),
}


@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("convert", [fxamp.convert, fxamp.plan])
def test_what_is_compiled_is_not_converted(how: str, convert: Callable[..., Any]) -> None:
    compiles, said = COMPILED[how]
    with pytest.raises(CaptureError, match=rf"module '\(root\)'.*{said}.*[Cc]onvert the original model"):
        convert(compiles(model()), (X,))


@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("inputs", [(), ((X,),)])
def test_nor_is_a_model_of_which_a_part_is(how: str, inputs: tuple[Any, ...]) -> None:
    compiles, said = COMPILED[how]
    whole = model()
    whole[2] = compiles(whole[2])
    with pytest.raises(CaptureError, match=rf"module '2'.*{said}"):
        fxamp.convert(whole, *inputs)


@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("capture", [by_fxamp, lambda m: fxamp.convert(m, (X,), capture="jit")])
def test_what_is_compiled_is_not_compiled_again(how: str, capture: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match=r"use it as it is, or give fxamp\.compile (the original model|a copy)"):
        capture(COMPILED[how][0](model()))


def test_a_copy_of_a_model_compiled_in_place_is_not_compiled() -> None:
    compiled: Any = in_place(model())
    converted = fxamp.convert(copy.deepcopy(compiled), (X,))
    assert fxamp.plan_of(converted).decisions


def test_what_is_converted_is_not_compiled_by_fxamp_again() -> None:
    whole: Any = model()
    converted = fxamp.convert(whole[2], (torch.randn(3, 8),), check=False)
    with pytest.raises(CaptureError, match=r"this module is converted already: compile it by torch\.compile"):
        fxamp.compile(converted)
    whole[2] = converted
    with pytest.raises(CaptureError, match=r"submodule '2' of this Sequential is converted already"):
        fxamp.compile(whole)


@pytest.mark.parametrize("settings", [True, "fxamp"])
@pytest.mark.parametrize("how", COMPILED)
def test_a_compiled_step_takes_no_model_that_is_compiled(how: str, settings: bool | str) -> None:
    compiled = COMPILED[how][0](model())
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    with pytest.raises(fxamp.PolicyError, match=r"the model is compiled by torch\.compile already: leave compile at"):
        fxamp.TrainStep(compiled, None, optimizer, compile=settings)
