"""Sizes 1 and 0, which the exporter takes no account of, are tried against the model, and guarded where it branches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from fxamp.trust.small_sizes import _Calls
from passes._torch import FakeTensorMode


class Attention(nn.Module):
    """Attends to itself, and does something else for one token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        q, k, v = self.qkv(x * scale).chunk(3, -1)
        tokens = x.shape[1]
        if tokens > 1:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(tokens, tokens).tril().bool())
        return v * 0.5 + q


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0) / x.size(0) if x.size(0) else x.new_zeros(x.shape[1:])


def converted(model: nn.Module, *shapes: tuple[int, ...]) -> Any:
    return fxamp.convert(model, tuple(torch.randn(s) for s in shapes), policy="O0", capture="export")


def test_a_branch_on_one_token_is_guarded() -> None:
    model = Attention()
    module = converted(model, (2, 5, 8), (2, 5, 1))
    one = torch.randn(2, 1, 8), torch.randn(2, 1, 1)
    with pytest.raises(fxamp.CaptureError, match=r"that satisfy x.size\(\)\[1\] >= 2; this call gives 'x' \(2, 1, 8\)"):
        module(*one)
    for batch, tokens in ((1, 4), (3, 2), (0, 3)):
        x, scale = torch.randn(batch, tokens, 8), torch.randn(batch, tokens, 1)
        assert torch.equal(module(x, scale), model(x, scale))
    alone = fxamp.convert(model, one, policy="O0", capture="export")  # the other branch
    assert torch.equal(alone(*one), model(*one))


def test_a_branch_on_an_empty_batch_is_guarded() -> None:
    module = converted(Mean(), (4, 3))
    assert torch.equal(module(torch.ones(1, 3)), torch.ones(3))
    with pytest.raises(fxamp.CaptureError, match=r"x.size\(\)\[0\] >= 1"):
        module(torch.ones(0, 3))


def test_a_model_without_such_a_branch_has_no_such_guard() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    module = converted(model, (5, 4)).eval()
    assert not any(">=" in guard for guard in module.call_spec.guards)
    assert torch.equal(module(torch.ones(1, 4)), model.eval()(torch.ones(1, 4)))


def test_what_fake_tensors_ask_is_no_kernel() -> None:
    """How often they ask for a device depends on what torch has cached, and so would a guard."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    calls, q = _Calls(mode), mode.from_tensor(torch.randn(2, 4, 6, 8))
    with mode, calls:
        torch.ops.aten._assert_tensor_metadata.default(q, None, None, torch.float32)
        F.scaled_dot_product_attention(q, q, q)
    called = {str(func) for func, *_ in calls.count}
    assert any("attention" in name for name in called)
    assert not called & {"prim.device.default", "aten._assert_tensor_metadata.default"}
