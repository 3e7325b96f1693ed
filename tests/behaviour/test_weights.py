"""Weights are read anew at every call, computed ones too, and frozen low ones are not cast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.front_ends import BF16, F32, FRESH, casts, convert, each_front_end, one
from tests.support.helpers import Two, example

pytestmark = FRESH


@pytest.mark.default_case(front_end="graph")
@each_front_end
def test_no_weight_is_stale_and_no_gradient_is_lost(front_end: str) -> None:
    torch.manual_seed(0)
    model = Two()
    module = convert(model, one(), front_end)
    with torch.autocast("cpu"):
        with torch.no_grad():
            first = module(*one())
        again = module(*one())
        assert torch.equal(first, again)
        again.sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = module(*one()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses == sorted(losses, reverse=True)
        assert len(set(losses)) == 3
        with torch.no_grad():
            before = module(*one())
            model.l.weight.data.copy_(torch.ones(6, 6))
            model.m.weight.data.mul_(2)
            after = module(*one())
            assert not torch.equal(before, after)
            assert torch.equal(after.bfloat16(), model(*one()))


@pytest.mark.default_case(front_end="graph")
@each_front_end
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("root", [True, False], ids=["root", "child"])
def test_a_parametrized_weight_is_computed_in_fp32_at_every_call(kind: str, root: bool, front_end: str) -> None:
    torch.manual_seed(0)
    layer = getattr(nn.utils.parametrizations, kind)(nn.Linear(6, 6))
    model = layer if root else Two(lambda self, x: self.m(self.k(x)), k=layer)
    eager = copy.deepcopy(model)
    twin: Any = eager if root else eager.k
    module = convert(model, one(), front_end)
    vectors = [b.clone() for b in layer.buffers()]
    before = module(example())
    eager(example())
    for now, then, theirs in zip(layer.buffers(), vectors, twin.buffers(), strict=True):
        assert now.dtype == F32
        assert not torch.equal(now, then)
        assert torch.equal(now, theirs)  # the power iteration is FP32
    with torch.no_grad():
        for p in (*layer.parametrizations.parameters(), *twin.parametrizations.parameters()):
            p.mul_(torch.linspace(1, 2, p.numel()).view_as(p))
    after = module(example())
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, eager(example()), rtol=0.03, atol=0.03)
    after.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == F32 for p in layer.parameters())


@pytest.mark.default_case(front_end="view")
@each_front_end
def test_a_frozen_low_base_is_not_cast_and_its_adapters_train(front_end: str) -> None:
    def adapted(self: Any, x: Tensor) -> Tensor:
        low = F.linear(x.to(BF16), self.base.weight, self.base.bias)
        return low.float() + self.b(self.a(x))

    torch.manual_seed(0)
    base = nn.Linear(6, 6).to(BF16).requires_grad_(False)
    model = Two(adapted, base=base, a=nn.Linear(6, 2, bias=False), b=nn.Linear(2, 6, bias=False))
    module = convert(model, one(), front_end)
    got = module(*one())
    torch.testing.assert_close(got, model(*one()), rtol=0.02, atol=0.02)
    got.sum().backward()
    grads = {n: p.grad.dtype for n, p in model.named_parameters() if p.grad is not None}
    assert grads == {"a.weight": F32, "b.weight": F32}
    assert not [n for n in casts(module) if "base" in str(n.all_input_nodes[0])]
