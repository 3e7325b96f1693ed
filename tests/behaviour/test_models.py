from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.helpers import autocast_runs_lstms
from tests.support.zoo import BY_NAME, NO_FP16_ON_CPU, ZOO, Zoo

every_model = pytest.mark.parametrize("entry", ZOO, ids=lambda entry: entry.name)


def _gradients(entry: Zoo, dtype: torch.dtype | None) -> dict[str, Tensor | None]:
    model = entry.build()
    args, kwargs = entry.inputs(2)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = entry.loss(model(*args, **kwargs))
    assert torch.isfinite(loss)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@every_model
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(None, id="fp32"),
        pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.matrix),
        pytest.param(torch.float16, id="fp16", marks=pytest.mark.matrix),
    ],
)
def test_every_parameter_gets_a_gradient(entry: Zoo, dtype: torch.dtype | None) -> None:
    if dtype is not None and entry.name in NO_FP16_ON_CPU and not autocast_runs_lstms(dtype):
        pytest.skip("torch.autocast cannot run it on this CPU")

    gradients = _gradients(entry, dtype)

    assert [name for name, gradient in gradients.items() if gradient is None] == []


@every_model
def test_building_twice_gives_the_same_model(entry: Zoo) -> None:
    first, second = entry.build().state_dict(), entry.build().state_dict()

    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@every_model
def test_inputs_of_another_batch_size_run_too(entry: Zoo) -> None:
    model = entry.build().eval()
    args, kwargs = entry.inputs(5)

    assert torch.isfinite(entry.loss(model(*args, **kwargs)))


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(ZOO)
