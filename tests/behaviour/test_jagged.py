"""Jagged tensors, in which sequences of several lengths lie one behind the other, without padding."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from tests.support.front_ends import FRESH

pytestmark = [*FRESH, pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")]


class Block(nn.Module):
    """A block of a transformer over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = self.norm(x)
        q, k, v = (each(x).unflatten(-1, (2, 8)).transpose(1, 2) for each in (self.query, self.key, self.value))
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return x + F.gelu(self.out(found))


def sequences(*lengths: int) -> Tensor:
    rows = torch.randn(sum(lengths), 16, generator=torch.Generator().manual_seed(sum(lengths)))
    offsets = torch.tensor((0, *itertools.accumulate(lengths)))
    return torch.nested.nested_tensor_from_jagged(rows, offsets, min_seqlen=min(lengths), max_seqlen=max(lengths))


def without_lengths(*lengths: int) -> Tensor:
    return torch.nested.nested_tensor([*sequences(*lengths).unbind()], layout=torch.jagged)


def run(module: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the values of the output, and the gradients of all parameters."""
    values = module(x).values()
    return [values, *torch.autograd.grad(values.float().square().sum(), [*model.parameters()])]


@pytest.mark.parametrize(("sequences", "primed"), [(sequences, False), (sequences, True), (without_lengths, True)])
def test_a_block_over_jagged_tensors_is_as_under_autocast(sequences: Any, primed: bool) -> None:
    model = Block()
    given = (sequences(3, 5),) if primed else None
    view = fxamp.convert(model, given, policy="O1,output_dtype=autocast")
    plain = fxamp.convert(model, given, policy="O0")
    for x in (sequences(3, 5), sequences(2, 7, 4)):
        with torch.autocast("cpu"):
            expected = run(model, model, x)
        for ours, theirs in zip(run(view, model, x), expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
        for ours, theirs in zip(run(plain, model, x), run(model, model, x), strict=True):
            assert torch.equal(ours, theirs)
    assert {d.code for d in fxamp.plan_of(view).decisions if d.op == "linear"} == {"as_autocast"}
    assert not fxamp.plan_of(view).deviations


class Made(nn.Module):
    """Makes a jagged tensor itself, and returns it; one of its layers is outside of autocast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, offsets: Tensor) -> Any:
        made = torch.nested.nested_tensor_from_jagged(x, offsets)
        with torch.autocast("cpu", enabled=False):
            exact = self.first(made)
        return self.second(torch.tanh(exact))


@pytest.mark.parametrize("policy", ["O0", "O1,output_dtype=autocast"])
def test_a_model_may_make_one_and_leave_autocast(policy: str) -> None:
    model, x, offsets = Made(), torch.randn(8, 16), torch.tensor([0, 3, 8])
    view = fxamp.convert(model, (x, offsets), policy=policy)
    with torch.autocast("cpu", enabled=policy != "O0"):
        expected = model(x, offsets)
    got = view(x, offsets)
    assert torch.equal(got.values(), expected.values())
    assert torch.equal(got.offsets(), offsets)


def test_an_override_is_obeyed() -> None:
    model, x = Block(), sequences(3, 5)
    view = fxamp.convert(model, (x,), policy="O1,modules.query=fp32")
    assert {d.module_path: d.colour for d in fxamp.plan_of(view).decisions if d.op == "linear"} == {
        "query": "float32", "key": "bfloat16", "value": "bfloat16",
    }  # fmt: skip
    assert not torch.equal(view(x).values(), fxamp.convert(model, (x,))(x).values())


@pytest.mark.default_case(policy="O3")
@pytest.mark.parametrize("policy", ["O2", "O3", "O1,share_casts=always", "O1,modules.out=fp32", "O1,unknown_ops=keep"])
def test_other_policies_run_it(policy: str) -> None:
    model, x = Block(), sequences(3, 5)
    ours, exact = run(fxamp.convert(model, (x,), policy=policy), model, x), run(model, model, x)
    for got, expected in ((ours[:1], exact[:1]), (ours[1:], exact[1:])):  # the output, and the whole gradient
        difference = torch.cat([(a - b).flatten() for a, b in zip(got, expected, strict=True)])
        assert 0 < difference.norm() <= 0.03 * torch.cat([b.flatten() for b in expected]).norm()
