"""At O1 a cast that the cut moves changes no strides that a kernel sees, forward or backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxamp

SLICES: dict[str, Any] = {
    "of a cat": lambda x, y: torch.cat([y, x], 1)[:, :5],
    "behind an ellipsis": lambda x, y: torch.cat([y, x], 1)[..., :5, :],
    "split": lambda x, y: torch.cat([y, x], 1).split(5, 1)[0],
    "chunk": lambda x, y: torch.cat([y, x], 1).chunk(2, 1)[1],
    "unbind": lambda x, y: torch.stack([y, x], 2).unbind(2)[1],
    "of a stack": lambda x, y: torch.stack([y, x], 2)[:, :, 0],
    "of what is flipped": lambda x, y: y.flip(1)[:, :3],
    "of a copy": lambda x, y: y.clone()[:, :3],
    "of a slice": lambda x, y: torch.cat([y, x], 1)[:, 1:][:, :4],
}


class Sliced(nn.Module):
    def __init__(self, part: Any) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(8, 8), part

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(self.part(x, y)) @ y.mT


@pytest.mark.parametrize("name", SLICES)
def test_a_product_of_a_slice_has_the_bits_of_autocast(name: str) -> None:
    torch.manual_seed(0)
    model, x, y = Sliced(SLICES[name]), torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model(x, y)
    assert torch.equal(fxamp.convert(model, (x, y), policy="O1,dtype=bf16")(x, y), theirs.float())


class Joined(nn.Module):
    """A class token in FP32 joined with a normalised image in 16 bits, which a layer reads."""

    def __init__(self, join: Any) -> None:
        super().__init__()
        self.join, self.norm = join, nn.LayerNorm(8)
        self.mix, self.images = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        token, image = torch.split(self.norm(x), [1, 16], 1)
        image = self.images(self.mix(image.mT.unflatten(-1, (4, 4)))).flatten(2).mT
        return self.layer(self.join(token, image))


JOINS: dict[str, Any] = {
    "cat": lambda t, h: torch.cat((t, h), 1),
    "hstack": lambda t, h: torch.hstack((t, h)),
    "stack": lambda t, h: torch.stack((t.expand(-1, 16, -1), h), 1),
    "pad": lambda t, h: F.pad(h, (0, 0, 1, 0)) + t,
}


@pytest.mark.parametrize("name", JOINS)
def test_gradients_of_what_is_joined_have_the_bits_of_autocast(name: str) -> None:
    torch.manual_seed(0)
    model, x, made = Joined(JOINS[name]), torch.randn(4, 17, 8), []
    view = fxamp.convert(model, (x,), policy="O1,dtype=bf16")
    for call in (model, view):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=call is model):
            out = call(x)
        out.float().square().mean().backward()
        made.append({name: p.grad for name, p in model.named_parameters()})
    assert not [name for name, g in made[0].items() if not torch.equal(g, made[1][name])]  # type: ignore[arg-type]
