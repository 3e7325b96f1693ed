"""A capture with every dimension dynamic is given up where it costs too much; then the first dimensions alone are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxamp
from fxamp.capture.model.dims import Dims
from fxamp.capture.model.limit import Limit, TooMuch


class Windows(nn.Module):
    """Pads to whole windows, shifts and cuts them, time and again, as Swin does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for mix in self.mix:
            b, h, w, c = x.shape
            x = F.pad(x, (0, 0, 0, -w % 3, 0, -h % 3))
            high, wide = x.shape[1] // 3, x.shape[2] // 3
            x = mix(x.view(b, high, 3, wide, 3, c).transpose(2, 3).reshape(-1, 9, c))
            x = x.view(b, high, wide, 3, 3, c).transpose(2, 3).reshape(b, 3 * high, 3 * wide, c)
            x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 1::2]], -1).unflatten(-1, (2, c)).sum(-2)
        return x


def test_what_compares_sizes_by_long_formulas_is_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dims, "LIMIT", Limit(seconds=120.0))  # a slow machine would come to the limit of time first
    model, x = Windows(), torch.randn(2, 24, 24, 4)
    module = fxamp.convert(model, (x,), policy="O0")
    note = next(n for n in module.plan.notes if n.startswith("only the first dimension of each input is dynamic"))
    assert "capture with all dimensions dynamic compares sizes by a formula of" in note
    other = torch.randn(5, 24, 24, 4)
    assert torch.equal(module(other), model(other))
    with pytest.raises(fxamp.CaptureError, match="size"):
        module(torch.randn(2, 25, 24, 4))


def test_what_compares_them_by_short_ones_keeps_every_dimension() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.Conv2d(2, 2, 3, stride=2), nn.AdaptiveAvgPool2d(1)
    )
    module = fxamp.convert(model, (torch.randn(2, 1, 9, 9),), policy="O0")
    other = torch.randn(3, 1, 17, 12)
    assert torch.equal(module(other), model(other))


def test_time_is_limited_too_and_more_calls_may_take_more() -> None:
    check = Limit(seconds=0.0, seconds_per_call=1.0).watch()
    check(())
    check = Limit(seconds=-1.0, seconds_per_call=0.001).watch()
    with pytest.raises(TooMuch, match="takes more than -1 s of processor time plus 1 ms for each call of"):
        check(())
