"""What a training step promises to the bit, it promises whether it runs as it is or `torch.compile` traces it."""

from __future__ import annotations

import inspect

import pytest
import torch

from fxamp.train.step import TrainStep


@pytest.fixture(params=[False, pytest.param("aot_eager", marks=pytest.mark.matrix)])
def eager_and_traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every TrainStep of a test that does not say otherwise this `compile`."""
    if request.param:
        torch.compiler.reset()
    defaults = inspect.unwrap(TrainStep.__init__).__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "compile", request.param)
