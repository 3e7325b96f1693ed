"""Norms: of layers, by hand, with computed weights, and the statistics that they keep."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.front_ends import (
    F32,
    FRESH,
    FRONT_ENDS,
    Case,
    assert_as_autocast,
    assert_eager,
    at_levels,
    check,
    convert,
    each_front_end,
    each_low,
    legs,
    one,
)
from tests.support.helpers import Two, example, matrix

pytestmark = FRESH


def normalised(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, **options), nn.Linear(6, 6))


CASES = {
    "batch norm": Case(normalised(), one, legs=("view",)),
    "without affine": Case(normalised(affine=False), one, legs=("view",)),
    "without statistics": Case(normalised(track_running_stats=False), one, legs=("view",)),
}


@pytest.mark.parametrize(("case", "front_end"), legs(CASES))
def test_a_batch_norm_has_the_values_of_autocast(case: str, front_end: str) -> None:
    check(CASES[case], front_end)


def layer_norm_of_fp32(self: Any, x: Tensor) -> Any:
    return F.layer_norm(x, (6,), self.l(x)[0]), F.layer_norm(x, (6,), self.m(x)[0], self.m.bias)


def group_norm_of_fp32(self: Any, x: Tensor) -> Any:
    return F.group_norm(x, 2, self.l(x)[0])


def batch_norm_of_fp32(self: Any, x: Tensor) -> Any:
    return F.batch_norm(x, x.mean(0), x.var(0), self.l(x)[0], self.l(x)[1])


def instance_norm_of_fp32(self: Any, x: Tensor) -> Any:
    return F.instance_norm(x[None], None, None, self.l(x)[0, :4], self.l(x)[1, :4])


def norms_with_weights_of_two_dtypes(self: Any, x: Tensor) -> Any:
    y, weight = self.l(x), self.m(x)[0]
    mean, var = x.mean(0), x.var(0)
    batch = F.batch_norm(y, mean, var, weight, self.m.bias) + F.batch_norm(y, mean, var, self.m.bias, weight)
    return F.layer_norm(y, (6,), weight, self.m.bias) + F.layer_norm(y, (6,), self.m.bias, weight) + batch


def norms_as_autocast_runs_them(self: Any, x: Tensor) -> Any:
    y, weight, bias = self.l(x), self.m(x)[0], self.m(x)[1]
    return F.layer_norm(y, (6,), weight, bias) + F.group_norm(y, 2, self.m.bias, self.l.bias)


NORMS = (layer_norm_of_fp32, norms_with_weights_of_two_dtypes, norms_as_autocast_runs_them, group_norm_of_fp32,
         batch_norm_of_fp32, instance_norm_of_fp32)  # fmt: skip


@pytest.mark.default_case(front_end="view", name="fp16", low=torch.float16)
@each_low(*FRONT_ENDS)
@pytest.mark.parametrize("norm", [*NORMS[:2], *matrix(*NORMS[2:])], ids=lambda f: f.__name__)
def test_a_norm_takes_computed_weights(norm: Any, front_end: str, name: str, low: torch.dtype) -> None:
    torch.manual_seed(0)
    model, (x,) = Two(norm), one()
    levels = ("O0", *(f"{level},dtype={name}" for level in ("O1", "O2", "O3")))
    exact, rounded, *further = at_levels(model, (x,), front_end, *levels)
    assert_eager(exact(), model, (x,))
    assert_as_autocast(rounded(), model, (x,), low)
    for module in further:
        with torch.no_grad():
            torch.testing.assert_close(module()(x), model(x), atol=0.1, rtol=0.05)


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_norms_written_by_hand_stay_in_range_at_o2(front_end: str) -> None:
    def norms(self: Any, x: Tensor) -> dict[str, Tensor]:
        y = self.l(x) + 300
        zero = self.m(x) * 0
        return {
            "rms": y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6),
            "sqrt": y / torch.sqrt((y * y).sum(-1, keepdim=True)),
            "square": y * y.square().mean(-1, keepdim=True).add(1e-6).rsqrt(),
            "normalize": F.normalize(zero, dim=-1),
            "rsqrt": zero * torch.rsqrt(zero.abs() + 1e-8),
            "sum": (y * 100).sum()[None],
        }

    torch.manual_seed(0)
    model = Two(norms)
    module = convert(model, one(), front_end, "O2,dtype=fp16")
    got, exact = module(*one()), model(*one())
    for name, expected in exact.items():
        assert got[name].isfinite().all(), name
        assert torch.allclose(got[name], expected, rtol=0.01, atol=1e-3), name


def test_running_statistics_are_those_of_fp32_after_fifty_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    eager = copy.deepcopy(model)
    module = convert(model, one())
    for i in range(50):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(i))
        module(x)
        eager(x)
    ours: Any = model[1]
    theirs: Any = eager[1]
    assert ours.running_mean.dtype == ours.running_var.dtype == F32
    assert int(ours.num_batches_tracked) == int(theirs.num_batches_tracked) == 50
    torch.testing.assert_close(ours.running_mean, theirs.running_mean, rtol=0, atol=1e-3)
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=0, atol=1e-3)
    module.eval()
    eager.eval()
    torch.testing.assert_close(module(example()), eager(example()), rtol=0.02, atol=0.02)


def test_a_frozen_batch_norm_inside_a_training_model_stays_frozen() -> None:
    model = Two(lambda self, x: self.m(self.norm(self.l(x))), norm=nn.BatchNorm1d(6))
    module = convert(model, one())
    norm: Any = model.norm
    norm.eval()
    module(example())
    assert int(norm.num_batches_tracked) == 0
    assert torch.equal(norm.running_mean, torch.zeros(6))
    norm.train()
    module(example())
    assert int(norm.num_batches_tracked) == 1
